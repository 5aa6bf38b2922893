"""Keeps the middle and the spread of every cache page's keys."""
