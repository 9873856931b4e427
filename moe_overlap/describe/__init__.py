"""What exists: models, clusters, flags, units. Standard library only."""
