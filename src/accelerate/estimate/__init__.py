"""How much memory training would take: `models` builds the model, `batches` a step to measure, `usage` adds it up."""
