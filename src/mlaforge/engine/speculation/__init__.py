"""Speculative decoding: drafters, verification, and how many tokens to draft."""
