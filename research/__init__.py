"""Experiments of papers and alternatives that mlaforge does not ship: see README.md."""
