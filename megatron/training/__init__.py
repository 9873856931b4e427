"""Megatron's flag dialect and training loop on megatron-core.

The wheel of megatron-core is a namespace package; this package is a portion of it. Later wheels ship a `megatron.training` of
their own: `PORTION` identifies the imported one (`pretrain_moe.py` checks it).
"""

PORTION = "moe-overlap"
