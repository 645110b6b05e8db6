"""A request from prompt to answer: sequences, detokenization, stop conditions, outputs."""
