"""Measurements of quality, memory and serving: a script for each table of benchmarks/*.json and of a page in docs/."""
