"""Drafters: who guesses the next tokens, and how a caller names one."""
