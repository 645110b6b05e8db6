"""Grouped-query attention into latent attention: layer by layer, resumable, and the checkpoint it writes."""
