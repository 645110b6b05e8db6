"""A step's computation: the model rewritten for the paged cache, batches, graphs."""
