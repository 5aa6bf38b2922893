"""Submitting to a queue: what a caller's thread does, while the engine's thread decodes."""

from __future__ import annotations

import threading

import tiny
from dspark_hf import GenerationQueue
from harness import wrapped
from served import Gate


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
