"""Layers that megatron-core lacks, or has only with Transformer Engine."""
