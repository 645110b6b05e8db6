"""Conversion's mathematics, tensors in and out: moments, closed forms, ranks, refits."""
