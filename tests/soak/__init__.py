"""A soak of the queue: one queue for many minutes, under unlike requests and drawn faults.

`make soak`, or `PYTHONPATH=tests python -m soak --minutes 30`.
"""
