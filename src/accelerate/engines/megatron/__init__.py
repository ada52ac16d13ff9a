"""Megatron-LM on megatron-core: models, their weights, steps and the engine that trains them."""
