"""Measured seconds of operators and links: keys, the database, look-ups. No torch but in `measure`."""
