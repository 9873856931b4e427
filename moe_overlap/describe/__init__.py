"""What exists: models, clusters, expert loads. Standard library only."""
