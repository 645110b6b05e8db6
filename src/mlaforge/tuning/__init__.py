"""Tuning: measurement of kernels' configurations at the shapes of a model, and the table that launches read."""
