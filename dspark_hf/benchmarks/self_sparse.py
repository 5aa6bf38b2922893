"""Part of section "sparse": greedy decoding by self-sparse drafts, dense steps beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dspark_hf.benchmarks.timing import timed
from dspark_hf.drafting.self_sparse import SelfSparseDrafter
from dspark_hf.evaluation.corpus import read_documents
from dspark_hf.targets.flat import FlatTarget, read_prompt
from dspark_hf.values import DraftRequest, Feed

if TYPE_CHECKING:
    from dspark_hf.benchmarks.bench import Bench

NEW_TOKENS, DRAFTED = 48, 4
"""Tokens decoded each way, and those drafted per round."""


@torch.no_grad()
def self_sparse_run(bench: Bench, model: Any, context: int) -> dict[str, Any]:
    """Decode a text's continuation densely and by self-sparse drafts, one after the other.

    Of a context beyond the model's positions, the keys and values of its last tokens are those of
    as many positions as it has, repeated: steps cost what they would, acceptance is that text's.

    Args:
        bench: Tokenizer, settings and clock.
        model: Wrapped.
        context: Tokens before the first decoded one.

    Returns:
        dict[str, Any]: Seconds per token of both ways, accepted length, and how many tokens agree.
    """
    limit = min(context, bench.model.config.max_position_embeddings - NEW_TOKENS - DRAFTED)
    text = bench.tokenizer("\n\n".join(read_documents()))["input_ids"][: limit + 1]
    first = text.pop()
    target = FlatTarget(model, context + NEW_TOKENS + DRAFTED + 1)
    read_prompt(target, text)
    if len(text) < context:
        times = -(-context // len(text))
        layers = [
            tuple(t.repeat(1, times, 1)[:, -context:] for t in pair)
            for pair in target.keys_values(0, len(text))
        ]
        target.free(0)
        target.restore(0, layers)  # type: ignore[arg-type]
    history = (text * (context // len(text) + 1))[-context:]
    most = min(NEW_TOKENS, bench.settings.max_new_tokens)
    dense = timed(lambda: _densely(target, first, most), bench.clock)
    target.rollback(0, context)
    drafter = SelfSparseDrafter(min_context=0)
    drafter.bind(target)
    found = timed(lambda: _drafted(target, drafter, [*history, first], most), bench.clock)
    texts, rounds = found.result
    return {
        "context": context,
        "is_repeated": len(text) < context,
        "tokens": most,
        "drafted": DRAFTED,
        "accepted_length": len(texts) / rounds,
        "dense_s": dense.wall_s / most,
        "drafted_s": found.wall_s / len(texts),
        "same_tokens": sum(a == b for a, b in zip(dense.result, texts, strict=False)),
    }


def _densely(target: FlatTarget, token: int, count: int) -> list[int]:
    """Decode a number of tokens, one by one."""
    made = []
    for _ in range(count):
        token = int(target.forward([Feed(0, [token], 1)])[0][-1].argmax())
        made.append(token)
    return made


def _drafted(
    target: FlatTarget, drafter: SelfSparseDrafter, ids: list[int], count: int
) -> tuple[list[int], int]:
    """Decode at least a number of tokens by drafts; return them and the rounds."""
    made: list[int] = []
    rounds, generator = 0, torch.Generator()
    while len(made) < count:
        (proposal,) = drafter.propose([DraftRequest(0, ids, DRAFTED, None, generator)])
        fed = [ids[-1], *proposal.ids]
        best = target.forward([Feed(0, fed, len(fed))])[0].argmax(dim=-1).tolist()
        agreed = 0
        while agreed < len(proposal.ids) and proposal.ids[agreed] == best[agreed]:
            agreed += 1
        new = best[: agreed + 1]
        ids = ids + new
        made += new
        target.rollback(0, len(ids) - 1)
        rounds += 1
    return made, rounds
