"""Descriptions of what exists: models, clusters, expert loads. Standard library only."""
