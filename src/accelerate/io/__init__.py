"""Files of tensors: one engine for checkpoints, loading and offload. It knows blocks and formats, and no runs."""
