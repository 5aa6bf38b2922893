"""Many chats at once: each client talks to one queue in turns, and the answers share forwards.

Every client asks, waits for its answer piece by piece, and asks on with what was said so far. What
the queue did meanwhile is drawn on a terminal and printed at the end.

Run:      python examples/queue_chats.py --tiny
          python examples/queue_chats.py --model PATH_OR_ID
Output:   each chat's last answer, then the queue's figures.
Time:     half a minute on a CPU with --tiny; with SmolLM2-135M a few minutes.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING, Any

from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkForCausalLM, GenerationQueue
from dspark_hf.serving.watch import render
from tiny_chat import tiny_chat

if TYPE_CHECKING:
    from collections.abc import Sequence

TOPICS = ("a lighthouse", "bread", "the number seven", "a bicycle", "rain", "an old map")
QUESTIONS = ("Tell me something about {}.", "Why is that so?")


async def chat(queue: GenerationQueue, topic: str, max_new_tokens: int) -> str:
    """Hold one chat; return the last answer."""
    messages: list[dict[str, str]] = []
    answer = ""
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question.format(topic)})
        # submit() prepares in this thread, which is short; waiting leaves the loop to the others.
        handle = queue.submit(messages, max_new_tokens=max_new_tokens, do_sample=False)
        answer = "".join([piece async for piece in handle])
        messages.append({"role": "assistant", "content": answer})
    return answer


async def chats(queue: GenerationQueue, topics: Sequence[str], max_new_tokens: int) -> list[str]:
    """Hold all chats at once; return their last answers."""
    return await asyncio.gather(*(chat(queue, topic, max_new_tokens) for topic in topics))


def main() -> None:
    """Hold the chats and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or hub id of a chat model")
    parser.add_argument("--tiny", action="store_true", help="random weights, made here")
    parser.add_argument("--chats", type=int, default=32, help="clients at once")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of an answer")
    arguments = parser.parse_args()
    if not arguments.tiny and arguments.model is None:
        parser.error("pass --model or --tiny")
    model, tokenizer = tiny_chat() if arguments.tiny else load(arguments.model)
    DSparkForCausalLM.wrap(model, drafter="auto", tokenizer=tokenizer)
    topics = [TOPICS[i % len(TOPICS)] for i in range(arguments.chats)]
    with GenerationQueue(model, tokenizer) as queue, queue.watch():
        answers = asyncio.run(chats(queue, topics, arguments.tokens))
        metrics = queue.metrics()
    console = Console(highlight=False)
    for number, (topic, answer) in enumerate(zip(topics, answers, strict=True), start=1):
        console.print(f"{number}. {topic}: {' '.join(answer.split())!r}", markup=False)
    console.print(render(metrics))


def load(source: str) -> tuple[Any, Any]:
    """Return a model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16")
    return model, AutoTokenizer.from_pretrained(source)


if __name__ == "__main__":
    main()
