"""Submitting to a queue: what a caller's thread does, while the engine's thread decodes."""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers import StoppingCriteria

import tiny
from dspark_hf import GenerationQueue
from harness import wrapped


class Gate(StoppingCriteria):
    """Holds a row, and the step it is in, until it is opened."""

    dspark_per_row = True

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.reached.set()
        self.opened.wait(60)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_submitting_does_not_wait_for_the_step_that_runs():
    gate, submitted = Gate(), threading.Event()
    with wrapped(tiny.llama()) as model, GenerationQueue(model) as queue:
        first = queue.submit([5, 6, 7], max_new_tokens=3, stopping_criteria=[gate])
        assert gate.reached.wait(60)
        handles = []

        def submit() -> None:
            handles.append(queue.submit([8, 9], max_new_tokens=3))
            submitted.set()

        thread = threading.Thread(target=submit)
        thread.start()
        was_quick = submitted.wait(30)
        gate.opened.set()
        thread.join()
        assert was_quick
        assert (len(first.result(60).ids), len(handles[0].result(60).ids)) == (3, 3)
