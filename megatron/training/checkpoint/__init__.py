"""Checkpoints: what is saved, when, and how it loads into another layout."""
