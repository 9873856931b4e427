"""Chooses a plan: capture, profile, cost, search."""
