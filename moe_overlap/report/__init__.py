"""Answers of the tuner and of plans: as data, then as text."""
