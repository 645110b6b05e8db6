"""Sparse attention: token indexes for a model, so that decoding reads only selected tokens."""
