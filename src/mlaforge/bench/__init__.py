"""Benchmarks (scenarios, kernels, conversions) and the gates that judge them."""
