"""The engine: paged cache, prefix reuse, continuous batching, sampling, and the server on top of it."""
