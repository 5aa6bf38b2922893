"""Attention of a few new tokens per row over a list of cache pages."""
