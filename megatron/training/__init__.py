"""Megatron's flag dialect and training loop on megatron-core.

The wheel of megatron-core is a namespace package; this is our portion of it. Later wheels ship a `megatron.training` of their
own: `PORTION` tells which one was imported (`pretrain_moe.py` checks it).
"""

PORTION = "moe-overlap"
