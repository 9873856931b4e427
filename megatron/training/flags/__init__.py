"""How a field of `config.py` becomes a flag, its help, and what is said of flags without effect."""
