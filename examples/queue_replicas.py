"""Two replicas of a model behind one queue; one is killed, and no text is lost.

Each replica is a process with a model of its own. When the second one has begun to answer, it is
killed. What it was decoding goes on in the first one from the tokens that were there, and the
texts are those that generate() gives for each prompt alone. Meanwhile the second one is started
again.

Run:      python examples/queue_replicas.py --tiny
          python examples/queue_replicas.py --model PATH_OR_ID
Output:   what was killed and when, how many requests went on elsewhere, and whether every text is
          the one that generate() gives.
Time:     30 seconds on a CPU with --tiny, most of it imports in three processes.
"""

from __future__ import annotations

import argparse
import os
import signal
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf.serving import ReplicaQueue
from tiny_chat import tiny_chat

PROMPT = "Chapter {}. In the morning the harbour was"
NUM_PROMPTS = 8


def main() -> None:
    """Answer prompts alone, then by two replicas of which one dies, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or hub id of a causal LM")
    parser.add_argument("--tiny", action="store_true", help="random weights, made here")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of a text")
    arguments = parser.parse_args()
    if not arguments.tiny and arguments.model is None:
        parser.error("pass --model or --tiny")
    prompts = [PROMPT.format(i) for i in range(1, NUM_PROMPTS + 1)]
    options = {"max_new_tokens": arguments.tokens, "do_sample": False}
    with TemporaryDirectory() as folder:
        source = arguments.model or saved_tiny_chat(folder)
        expected = texts_alone(source, prompts, options)
        # In 16 bits another batch is another rounding, after which texts may differ.
        with ReplicaQueue.from_pretrained(source, devices=["cpu", "cpu"], dtype="float32") as queue:
            texts, moves = texts_with_one_killed(queue, prompts, options)
            print(f"{moves} requests went on in the other replica")
            print("replicas:", ", ".join(replica.state for replica in queue.replicas))
    same = sum(mine == theirs for mine, theirs in zip(texts, expected, strict=True))
    print(f"texts as generate() gives them: {same} of {len(expected)}")


def texts_with_one_killed(
    queue: ReplicaQueue, prompts: list[str], options: dict[str, Any]
) -> tuple[list[str | None], int]:
    """Return the texts, and how many requests a death made move."""
    handles = [queue.submit(prompt, **options) for prompt in prompts]
    victim = queue.replicas[1]
    # With equal replicas every second request is the second one's.
    for _ in handles[1]:
        break
    os.kill(victim.pid, signal.SIGKILL)
    print(f"replica {victim.place} was killed at {len(handles[1].pieces)} pieces of a text")
    results = [handle.result() for handle in handles]
    return [result.text for result in results], sum(result.stats.moves for result in results)


def texts_alone(source: str, prompts: list[str], options: dict[str, Any]) -> list[str]:
    """Return the texts that generate() gives, one prompt at a time."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="float32")
    texts = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        new = model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    return texts


def saved_tiny_chat(folder: str) -> str:
    """Save the tiny model where replicas can load it; return the folder."""
    model, tokenizer = tiny_chat()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
