"""Prompt attention where each tile of queries reads a list of cache pages."""
