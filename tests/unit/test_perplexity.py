"""Perplexity and its drift: tokens scored once, one BOS at most, on the path decoding takes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from torch import nn

import tiny
from dspark_hf.attention.policy import SparsePolicy, SparsePrefill
from dspark_hf.attention.sparse import SparseReading, SparseStats
from dspark_hf.errors import ConfigError
from dspark_hf.evaluation import perplexity, perplexity_drift
from dspark_hf.evaluation.corpus import read_documents
from dspark_hf.evaluation.drift import perplexity_drifts
from dspark_hf.evaluation.perplexity import windows_of
from dspark_hf.targets.flat import FlatTarget
from dspark_hf.values import Feed
from word_texts import BOS, WORDS, text_of, word_tokenizer, words

WINDOW = 8
LENGTHS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW * 5 // 2)
LEAST = SparsePolicy(tokens=48, recent_pages=2)


class Bigram(nn.Module):
    """A target whose next-token law is a table: perplexity is known in closed form."""

    def __init__(self) -> None:
        super().__init__()
        stream = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(WORDS, WORDS, generator=stream) * 2)
        self.seen: list[list[int]] = []
        self.config = SimpleNamespace(vocab_size=WORDS)

    @property
    def device(self) -> torch.device:
        return self.table.device

    def get_input_embeddings(self) -> nn.Module:
        return nn.Embedding.from_pretrained(self.table.detach())

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> Any:
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            self.seen.append(ids[mask.bool()].tolist())
        return SimpleNamespace(logits=self.table[input_ids])

    def loss(self, pairs: list[tuple[int, int]]) -> float:
        """Return the mean negative log likelihood of (before, after) pairs."""
        logs = self.table.detach().double().log_softmax(dim=-1)
        return -sum(float(logs[a, b]) for a, b in pairs) / len(pairs)


@pytest.fixture
def bigram() -> Bigram:
    return Bigram()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("bos", ["none", "once", "every"])
def test_windows_score_every_token_but_the_first_once_with_the_promised_context(
    length: int, bos: str
) -> None:
    ids = list(range(100, 100 + length))
    for context in (2, 3, WINDOW):
        for stride in range(1, context):
            scored: list[int] = []
            for window in windows_of(ids, context, stride, bos, BOS):
                assert len(window.ids) <= context
                places = range(len(window.ids) - window.scored, len(window.ids))
                for place in places:
                    token = window.ids[place]
                    # A BOS before the first window stands before its tokens only.
                    wanted = min(context - stride, token - 100 + (bos != "none"))
                    assert place >= max(wanted, 1)
                    scored.append(token)
                assert window.ids.count(BOS) == (
                    bos == "every" or (bos == "once" and window.ids[:2] == [BOS, 100])
                )
            assert scored == ids[bos == "none" :]


@pytest.mark.parametrize("length", [n for n in LENGTHS if n > 1])
@pytest.mark.parametrize("stride", [1, WINDOW // 2, WINDOW - 1])
def test_perplexity_of_a_bigram_target_is_that_in_closed_form(
    bigram: Bigram, length: int, stride: int
) -> None:
    ids = words(length)
    found = perplexity(
        bigram, word_tokenizer(), text_of(ids), context=WINDOW, stride=stride, bos="none"
    )
    pairs = list(itertools.pairwise(ids))
    assert found.scored == length - 1
    assert found.nll == pytest.approx(bigram.loss(pairs), rel=1e-5)
    assert found.ppl == pytest.approx(math.exp(bigram.loss(pairs)), rel=1e-5)


def test_documents_count_by_their_tokens_not_each_alike(bigram: Bigram) -> None:
    rows = [words(21, 1), words(3, 2), words(1, 3)]
    pairs = [pair for ids in rows for pair in itertools.pairwise(ids)]
    data = [text_of(ids) for ids in rows]
    found = perplexity(bigram, word_tokenizer(), data, context=WINDOW, bos="none")
    assert (found.documents, found.scored) == (3, 22)
    assert found.nll == pytest.approx(bigram.loss(pairs), rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "mistral"])
def test_batch_size_and_padding_do_not_matter(name: str) -> None:
    model, tokenizer = tiny.ARCHITECTURES[name](), word_tokenizer()
    data = [text_of(words(n, n)) for n in (37, 5, 50)]
    found = [perplexity(model, tokenizer, data, context=16, batch_size=size) for size in (1, 3, 16)]
    assert {f.scored for f in found} == {92}
    for other in found[1:]:
        assert other.nll == pytest.approx(found[0].nll, rel=1e-5)


@pytest.mark.parametrize("kind", ["automatic", "on request", "without"])
@pytest.mark.parametrize("bos", ["none", "once", "every"])
def test_bos_stands_where_asked_never_twice_and_is_never_scored(
    bigram: Bigram, kind: str, bos: str
) -> None:
    ids, tokenizer = words(20), word_tokenizer(kind)
    found = perplexity(bigram, tokenizer, text_of(ids), context=WINDOW, stride=4, bos=bos)
    has_bos = kind != "without" and bos != "none"
    counts = [seen.count(BOS) for seen in bigram.seen]
    assert counts[0] == has_bos
    assert counts[1:] == [has_bos and bos == "every"] * (len(counts) - 1)
    pairs = list(itertools.pairwise(ids))
    pairs = [(BOS, ids[0]), *pairs] if has_bos else pairs
    assert found.scored == len(pairs)
    assert found.nll == pytest.approx(bigram.loss(pairs), rel=1e-5)


def test_a_bos_that_the_text_brings_is_not_doubled(bigram: Bigram) -> None:
    ids = words(5)
    found = perplexity(bigram, word_tokenizer(), text_of([BOS, *ids]), context=WINDOW)
    assert bigram.seen == [[BOS, *ids]]
    assert found.scored == 5


def test_texts_lists_paths_rows_and_datasets_are_read_alike(tmp_path: Path) -> None:
    rows = ["w2 w3", "w4 w5"]
    path = tmp_path / "text.txt"
    path.write_text(rows[0], encoding="utf-8")
    assert read_documents(rows[0]) == read_documents(path) == read_documents(str(path)) == rows[:1]
    assert read_documents([*rows, " "]) == rows
    for column in ("text", "content", "document"):
        held = [{"id": 1, column: row} for row in rows]
        assert read_documents(held) == rows
        assert read_documents(datasets.Dataset.from_list(held)) == rows
    assert len(read_documents()[0]) > 100_000


@pytest.mark.parametrize("data", ["", [], ["  "], [{"title": "w1"}], [3]], ids=repr)
def test_data_without_text_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match="text"):
        read_documents(data)


@pytest.mark.parametrize(
    "values", [{"stride": 0}, {"stride": 8}, {"bos": "twice"}, {"max_tokens": 1}], ids=str
)
def test_values_that_score_nothing_or_twice_are_refused(
    bigram: Bigram, values: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"stride|bos|two tokens"):
        perplexity(bigram, word_tokenizer("without"), "w02 w03 w04", **{"context": 8, **values})


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.llama(max_position_embeddings=512, initializer_range=0.3)


def drift(model: Any, policy: SparsePolicy, ids: list[int] | None = None, **kwargs: Any) -> Any:
    settings = {"context": 150, "scored": 40, "scored_per_window": 20, **kwargs}
    tokenizer = word_tokenizer("on request")
    return perplexity_drift(model, tokenizer, text_of(ids or words(400)), policy, **settings)


@pytest.mark.parametrize("path", ["steps", "prefill"])
def test_policies_measured_together_say_what_they_say_alone(llama: Any, path: str) -> None:
    prefill = SparsePrefill(tokens=96, min_context=0)
    policies = {
        "few": LEAST.replace(prefill=prefill),
        "more": LEAST.replace(tokens=128, prefill=SparsePrefill(tokens=128, min_context=0)),
    }
    both = perplexity_drifts(
        llama, word_tokenizer("on request"), text_of(words(400)), policies,
        context=150, scored=40, scored_per_window=20, path=path,
    )  # fmt: skip
    for name, policy in policies.items():
        alone = drift(llama, policy, path=path)
        for field in ("ppl_dense", "ppl_sparse", "mean_pages", "sparse_calls", "kl"):
            assert getattr(both[name], field) == pytest.approx(getattr(alone, field), rel=1e-6)


@pytest.mark.parametrize("step_tokens", [1, 7])
def test_drift_is_nothing_with_all_pages_and_plain_with_few(llama: Any, step_tokens: int) -> None:
    full = drift(llama, SparsePolicy(tokens=4096), step_tokens=step_tokens)
    assert abs(full.drift) < 1e-6
    assert full.drift_interval == pytest.approx((0, 0), abs=1e-5)
    assert (full.share, full.top1) == (1, 1)
    few = drift(llama, LEAST, step_tokens=step_tokens)
    assert few.ppl_dense == pytest.approx(full.ppl_dense, rel=1e-4)
    assert few.kl > 0.05
    assert few.overlap < 0.95
    assert few.share < 0.4
    low, high = few.drift_interval
    assert low <= few.drift <= high
    steps = 2 * -(-20 // step_tokens)
    assert (few.sparse_calls, few.scored, few.windows) == (3 * steps, 40, 2)
    assert set(few.to_dict()) >= {"mean_pages", "share", "sparse_calls", "step_tokens", "scored"}


def induction(period: int) -> Any:
    """Return a target that copies the token `period` places back: it needs far context.

    One layer, one head: the key of a token is its position turned, the query the position turned
    back by the period, the value its identity.
    """
    model = tiny.llama(
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=64,
        hidden_size=64, max_position_embeddings=512, vocab_size=WORDS,
    )  # fmt: skip
    attention, half = model.model.layers[0].self_attn, 32
    inverse = model.model.rotary_emb.inv_freq
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, :WORDS] = torch.eye(WORDS)
        # The embedding's norm is one; a constant channel gives queries and keys one direction.
        model.model.embed_tokens.weight[:, -1] = 1.0
        angle = inverse * (period - 1)
        attention.k_proj.weight[:half, -1] = 1.0
        attention.q_proj.weight[:half, -1] = 12 * torch.cos(angle)
        attention.q_proj.weight[half:, -1] = -12 * torch.sin(angle)
        attention.v_proj.weight[:WORDS, :WORDS] = torch.eye(WORDS)
        attention.o_proj.weight[:] = torch.eye(64) * 20
        model.lm_head.weight[:, :WORDS] = torch.eye(WORDS) * 3
    return model


def test_drift_shows_what_a_copying_model_loses_without_far_context() -> None:
    period = 64
    model, ids = induction(period), words(period, seed=5) * 4
    few = drift(model, LEAST, ids, context=240, scored=60, scored_per_window=60)
    full = drift(
        model, SparsePolicy(tokens=4096), ids, context=240, scored=60, scored_per_window=60
    )
    assert few.ppl_dense < 2
    assert few.drift > 1
    assert few.drift_interval[0] > 0
    assert abs(full.drift) < 1e-6


def test_drift_agrees_with_a_slow_loop_of_single_steps(llama: Any) -> None:
    ids, policy = words(150, seed=7), LEAST.replace(tokens=64)
    found = drift(llama, policy, ids, scored=20)
    target = FlatTarget(llama, 16)
    target.read_all_sparsely(SparseReading(policy, SparseStats(), 0))
    loss = []
    with torch.no_grad():
        target.forward([Feed(0, ids[:129], 1, is_prompt=True)])
        for i in range(129, 149):
            logits = target.forward([Feed(0, [ids[i]], 1)])[0][0]
            loss.append(-float(logits.double().log_softmax(-1)[ids[i + 1]]))
    assert found.ppl_sparse == pytest.approx(math.exp(sum(loss) / 20), rel=1e-5)
    plain = llama(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    dense = -sum(float(plain[i, ids[i + 1]]) for i in range(129, 149)) / 20
    assert found.ppl_dense == pytest.approx(math.exp(dense), rel=1e-5)


def in_blocks(tokens: int) -> SparsePolicy:
    """Return a policy that reads all in steps, and a prompt in blocks."""
    return SparsePolicy(tokens=4096, recent_pages=2).replace(
        prefill=SparsePrefill(tokens=tokens, min_context=0)
    )


def test_the_drift_of_prompts_is_nothing_with_all_pages_and_that_of_a_mask_with_few(
    llama: Any,
) -> None:
    ids = words(200, seed=8)
    settings = {"context": 200, "scored": 90, "scored_per_window": 90, "path": "prefill"}
    full = drift(llama, in_blocks(4096), ids, **settings)
    assert abs(full.drift) < 1e-6
    assert (full.share, full.top1, full.scored, full.path) == (1, 1, 90, "prefill")
    # Three blocks behind the first, in three layers.
    assert (full.sparse_calls, full.step_tokens) == (9, 64)
    few = drift(llama, in_blocks(48), ids, **settings)
    assert few.share < 0.8
    q, k = torch.arange(199)[:, None], torch.arange(199)[None]
    near = (k // 16 == 0) | (k >= q // 64 * 64 - 32)
    for found, seen in ((few.ppl_dense, k <= q), (few.ppl_sparse, (k <= q) & near)):
        with torch.no_grad():
            logits = llama(torch.tensor([ids[:-1]]), attention_mask=seen[None, None]).logits[0]
        logs = logits[-90:].double().log_softmax(-1)
        loss = -float(logs[torch.arange(90), torch.tensor(ids[-90:])].mean())
        assert found == pytest.approx(math.exp(loss), rel=1e-5)
    low, high = few.drift_interval
    assert low <= few.drift <= high
    assert drift(llama, in_blocks(48), ids).kl < 1e-6


def test_the_drift_of_prompts_shows_what_a_copying_model_loses_without_far_context() -> None:
    period = 128
    model, ids = induction(period), words(period, seed=5) * 3
    settings = {"context": 380, "scored": 100, "scored_per_window": 100, "path": "prefill"}
    few = drift(model, in_blocks(48).replace(sink_pages=0), ids, **settings)
    assert few.ppl_dense < 2
    assert few.drift_interval[0] > 1


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"policy": "quick"}, "quality"),
        ({"path": "prompt"}, "steps"),
        ({"path": "prefill"}, "SparsePrefill"),
        ({"path": "prefill", "policy": LEAST.replace(prefill=SparsePrefill())}, "act"),
        ({"policy": None}, "policy"),
        ({"context": 1000}, "window"),
        ({"scored_per_window": 0}, "scored_per_window"),
        ({"policy": LEAST.replace(dense_layers=frozenset({0, 1, 2}))}, "act"),
    ],
    ids=str,
)
def test_drift_that_would_measure_nothing_is_refused(
    llama: Any, values: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        drift(llama, **{"policy": LEAST, **values})


@pytest.mark.parametrize("name", ["bloom", "deepseek_v3"])
def test_drift_is_refused_off_the_flat_target(name: str) -> None:
    with pytest.raises(NotImplementedError, match="flat target"):
        drift(tiny.ARCHITECTURES[name](), LEAST)
