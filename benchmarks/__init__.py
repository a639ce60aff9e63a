"""Times of every kernel and of others' kernels for the same operation, on one GPU: see ``python -m benchmarks --help``."""
