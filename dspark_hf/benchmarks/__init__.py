"""Benchmarks of `generate()` that put every number beside plain Transformers' own."""
