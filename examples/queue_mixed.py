"""Short interactive requests in between of a long batch, with and without a priority.

A batch of long texts fills the queue. Once the first of them shows, short requests come: first with
the batch's own priority, so by arrival, then with a higher one. A request of higher priority takes
the place of one that runs, which is parked with its keys and values and goes on later: its text is
the same.

Run:      python examples/queue_mixed.py --tiny
          python examples/queue_mixed.py --model PATH_OR_ID
Output:   per way, the short requests' times to their first token, how long the batch took, and how
          often one of it was parked; whether its texts are the same both times.
Time:     20 seconds on a CPU with --tiny, most of it imports; with SmolLM2-135M a few minutes.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkForCausalLM, GenerationQueue
from dspark_hf.queue_settings import QueueConfig
from tiny_chat import tiny_chat

if TYPE_CHECKING:
    from dspark_hf.serving import RequestHandle

ROWS = 4
"""Rows decoded together: half of the batch waits."""
LONG = "Write a long story that begins so: On day {}, nobody at the harbour expected"
SHORT = "In one word: what colour is {}?"
THINGS = ("snow", "grass", "the sky", "a lemon")
SHARE = 4
"""A short answer has a fourth of a long one's tokens."""


def main() -> None:
    """Run the mix twice and print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or hub id of a causal LM")
    parser.add_argument("--tiny", action="store_true", help="random weights, made here")
    parser.add_argument("--batch", type=int, default=8, help="long requests")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of a long text")
    arguments = parser.parse_args()
    if not arguments.tiny and arguments.model is None:
        parser.error("pass --model or --tiny")
    model, tokenizer = tiny_chat() if arguments.tiny else load(arguments.model)
    DSparkForCausalLM.wrap(model, drafter="auto", tokenizer=tokenizer)
    # The first call of a process pays for imports and for checks of the model.
    model.generate(**tokenizer(SHORT, return_tensors="pt"), max_new_tokens=2)
    texts = []
    for name, priority in (("by arrival", 0), ("with priority", 10)):
        texts.append(mix(model, tokenizer, name, priority, arguments.batch, arguments.tokens))
    print("texts of the batch are the same:", texts[0] == texts[1])


def mix(
    model: Any, tokenizer: Any, name: str, priority: int, num_long: int, num_tokens: int
) -> list[str]:
    """Run the batch with short requests in between; print their times, return the batch's texts."""
    settings = QueueConfig(max_rows=ROWS, order="fifo", prefix_cache=False, patience_s=3600)
    with GenerationQueue(model, tokenizer, settings) as queue:
        begin = perf_counter()
        batch = [
            queue.submit(LONG.format(i), max_new_tokens=num_tokens, do_sample=False)
            for i in range(num_long)
        ]
        next(iter(batch[0]), None)
        short = [ask(queue, thing, num_tokens, priority) for thing in THINGS]
        texts = [handle.result().text for handle in batch]
        seconds, parked = perf_counter() - begin, queue.metrics()["preemptions"]
        first = [handle.result().stats.first_token for handle in short]
    print(
        f"{name}: first token after {median(first):.2f} s (longest {max(first):.2f} s); "
        f"batch {seconds:.2f} s, parked {parked} times"
    )
    return texts


def ask(queue: GenerationQueue, thing: str, num_tokens: int, priority: int) -> RequestHandle:
    """Send a short request."""
    return queue.submit(
        SHORT.format(thing),
        max_new_tokens=max(num_tokens // SHARE, 1),
        do_sample=False,
        priority=priority,
    )


def load(source: str) -> tuple[Any, Any]:
    """Return a model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16")
    return model, AutoTokenizer.from_pretrained(source)


if __name__ == "__main__":
    main()
