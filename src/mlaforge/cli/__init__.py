"""Command line: parses options, calls stages and prints their results."""
