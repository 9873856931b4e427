"""Event simulation of instruction lists: seconds and live bytes of a step."""
