"""Layers beside megatron-core's: where it has none, or none without Transformer Engine."""
