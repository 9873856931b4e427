"""What a checkpoint holds and how it stays complete or absent."""
