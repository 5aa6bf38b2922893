"""Checkpoints of block drafters: from each published layout to one BlockSpec, and back."""
