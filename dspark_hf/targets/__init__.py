"""Targets: a model seen as rows that can be fed, rolled back and freed."""
