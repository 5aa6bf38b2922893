"""Accepts or replaces drafted tokens so that what is emitted is distributed as the target's."""
