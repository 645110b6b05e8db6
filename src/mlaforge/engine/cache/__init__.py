"""The paged KV cache: block pools, block tables, the memory itself."""
