"""Attention: the dense ragged path, registered with Transformers."""
