"""Rules across flags, by subject. A rule raises and never assigns."""
