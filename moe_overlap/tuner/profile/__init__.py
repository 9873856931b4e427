"""Measured seconds of operators and links: keys, the database, what it answers. No torch but in `measure`."""
