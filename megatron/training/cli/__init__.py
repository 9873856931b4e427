"""Megatron's command line: flags, the rules across them, and what is checked before a run starts. No torch."""
