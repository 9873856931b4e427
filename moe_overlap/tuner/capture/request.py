"""Words of a capture's request. Standard library only."""

NO_RECOMPUTATION, FULL = "none", "full"
"""Variants beside lists of modules."""
