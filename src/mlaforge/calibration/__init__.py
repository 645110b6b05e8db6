"""Calibration sets mined from text: sources, embeddings, clusters, and a datasheet of licences."""
