"""Execution of a plan: groups, spans, the MoE layer, step runners, optimizer. Imports torch and megatron-core, never the
tuner."""
