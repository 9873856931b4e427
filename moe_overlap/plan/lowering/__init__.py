"""A plan becomes the static instruction list of one rank."""
