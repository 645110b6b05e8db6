"""The paged cache: blocks and who holds them, tables of sequences, the memory itself."""
