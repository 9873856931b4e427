"""The model of a run, built from megatron-core's layers."""
