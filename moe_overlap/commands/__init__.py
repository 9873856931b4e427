"""Entry points of the command line: argument parsing, one call, one answer."""
