"""Rules across flags, by what they are about. A rule raises and never assigns."""
