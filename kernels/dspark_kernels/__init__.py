"""Attention and sampling kernels: one folder per operation, each with its PyTorch reference.

Knows nothing of Hugging Face Transformers; `dspark_hf` calls it, never the other way round.
"""
