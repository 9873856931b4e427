"""Executes an instruction list; it decides nothing."""
