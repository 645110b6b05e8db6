"""The engine: paged cache, prefix reuse, continuous batching, sampling, speculation; `LLM` holds it in one object."""
