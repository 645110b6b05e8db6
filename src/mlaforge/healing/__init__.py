"""A converted model trained towards its original."""
