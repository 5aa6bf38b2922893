"""Helpers of the kernel tests and benchmarks; nothing here is used at run time."""
