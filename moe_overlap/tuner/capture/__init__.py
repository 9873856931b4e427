"""The operators, shapes, storages and collectives of the real megatron-core model, recorded without a GPU."""
