"""Merges attention outputs over disjoint sets of keys by their log-sum-exp."""
