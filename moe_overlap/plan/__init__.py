"""Decisions about a run: plans, and the instruction lists they are lowered to. Standard library only."""
