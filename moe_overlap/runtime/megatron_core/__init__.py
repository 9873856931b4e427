"""Runs a step on megatron-core's own pipeline schedules."""
