"""Kernels of other libraries as implementations of this package's operations.

Each adapter calls one library's public interface and returns what the reference returns. They run only where
$MLAFORGE_OPS or an argument names them (ops/dispatch.py). Interfaces and layouts are taken from the libraries' public
sources, in the version that library.py names; no GPU has run the adapters yet.
"""
