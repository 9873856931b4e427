"""Decisions inside a layer."""
