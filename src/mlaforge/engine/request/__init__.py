"""One request from prompt to answer: its sequences, detokenization, stop conditions, outputs."""
