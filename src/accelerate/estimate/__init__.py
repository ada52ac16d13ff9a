"""How much memory training would take: `usage` adds it up, `batches` makes a step of a given model to measure, `models`
builds the model."""
