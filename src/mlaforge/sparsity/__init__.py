"""Sparse attention: an index for a model, so that what it generates reads only tokens that matter."""
