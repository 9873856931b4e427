"""How a field of the configuration becomes a flag, and what is said of flags without effect."""
