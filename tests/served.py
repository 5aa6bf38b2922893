"""What tests of the queue and its server share: a tokenizer with a template, a gate, readers."""

from __future__ import annotations

import json
import threading
from typing import Any

import torch
from transformers import StoppingCriteria

from dspark_hf import GenerationQueue
from harness import toy_tokenizer

NAME, DEFAULT = "tiny", 12
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system')"
    " }}{% endif %}{{ message.content }}{% endfor %}"
)
COMPLETION, CHATS = "/v1/completions", "/v1/chat/completions"
TOKENIZER = toy_tokenizer()
TOKENIZER.chat_template = TEMPLATE
TEXT = "abacadaeafag"
CHAT = [{"role": "user", "content": "abac"}, {"role": "user", "content": "adaeafag"}]
"""The template makes of it the same as TEXT."""


class Gate(StoppingCriteria):
    """Holds a row before its second token until it is opened."""

    dspark_per_row = True

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.reached.set()
        self.opened.wait(60)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def full_batch(queue: GenerationQueue) -> tuple[Gate, Any]:
    """Fill a queue of two rows with a request that does not end before the gate is opened."""
    gate, ids = Gate(), TOKENIZER([TEXT, TEXT], return_tensors="pt")["input_ids"]
    # With an end token, rows that stop by a criterion may run here, together.
    ends = {"stopping_criteria": [gate], "eos_token_id": 0}
    held = queue.submit(ids, max_new_tokens=4, do_sample=False, **ends)
    assert gate.reached.wait(60)
    return gate, held


def generated(model: Any, text: str, num_tokens: int, **kwargs: Any) -> tuple[list[int], str]:
    """Return what generate() adds to a text: ids and text."""
    ids = torch.tensor([TOKENIZER(text)["input_ids"]])
    kwargs = {"do_sample": False, "max_new_tokens": num_tokens, **kwargs}
    out = model.generate(ids, tokenizer=TOKENIZER, **kwargs)[0, ids.shape[1] :].tolist()
    return out, TOKENIZER.decode(out, skip_special_tokens=True)


def events(response: Any) -> list[Any]:
    """Return the chunks of a stream that ended as it should."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
