"""A wrapped model in lm-evaluation-harness, dense and sparse, beside the model as it was.

A text lists numbered lines with a code each; the model is asked for one of the codes, once to
write it (generate_until) and once for how likely it is (loglikelihood). Nothing is fetched.

A likelihood is read off one forward over the whole text, as a prompt is: neither drafts nor
selected pages have a part in it, and it must not change. Written codes may, with sparse attention.
`batch_size` is 1: lm_eval's stop criterion answers for a whole batch at once, so larger batches
run in the model's own loop, without drafts and densely, and the log says so.

Install:  pip install 'dspark-hf[lm-eval]'
Run:      python examples/lm_eval_drift.py --tiny
Output:   one line per way of decoding: the scores, the answers that are the plain model's, draft
          tokens accepted, and the share of pages read.
Time:     20 seconds on a CPU with --tiny, most of it imports.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from dspark_hf import DSparkForCausalLM
from dspark_hf.attention.policy import SparsePolicy

Docs = list[dict[str, str]]


def main() -> None:
    """Evaluate a model plain, wrapped, and wrapped with sparse attention."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or hub id of a causal LM")
    parser.add_argument("--tiny", action="store_true", help="random weights, made here")
    parser.add_argument("--lines", type=int, default=24, help="lines of each text")
    parser.add_argument("--tokens", type=int, default=128, help="tokens read per step, sparsely")
    arguments = parser.parse_args()
    if not arguments.tiny and arguments.model is None:
        parser.error("pass --model or --tiny")
    if arguments.tiny:
        model, tokenizer = tiny_model()
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model)
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    docs = line_docs(arguments.lines)
    plain = evaluate(model, tokenizer, docs)
    show("plain", plain, plain)
    DSparkForCausalLM.wrap(model, drafter="lookup")
    dense = evaluate(model, tokenizer, docs)
    show("wrapped", dense, plain)
    print(f"  accepted {model.dspark.metrics.accepted} of {model.dspark.metrics.verified} drafted")
    policy = SparsePolicy(tokens=arguments.tokens, min_context=0)
    with model.dspark.sparse_attention(policy) as stats:
        sparse = evaluate(model, tokenizer, docs)
    show("sparse", sparse, plain)
    print(f"  read {stats.share:.0%} of the pages in {stats.calls} attention calls")


def line_docs(num_lines: int, num_docs: int = 4) -> Docs:
    """Return texts that list codes and end in a question for one of them, and the answer."""
    draw = random.Random(0)  # noqa: S311 - no secret
    docs = []
    for _ in range(num_docs):
        codes = [str(draw.randrange(1000, 10_000)) for _ in range(num_lines)]
        lines = [f"Line {place}: the code is {code}." for place, code in enumerate(codes)]
        asked = draw.randrange(num_lines)
        text = "\n".join([*lines, f"Line {asked}: the code is"])
        docs.append({"text": text, "code": codes[asked]})
    return docs


def evaluate(model: Any, tokenizer: Any, docs: Docs, batch_size: int = 1) -> dict[str, Any]:
    """Run both tasks on a model.

    Args:
        model: Wrapped or not; lm_eval sees a Transformers model either way.
        tokenizer: Its tokenizer.
        docs: As from `line_docs`.
        batch_size: Rows per call.

    Returns:
        dict[str, Any]: Both scores by name; `answers` and log `likelihoods`, one per text.
    """
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    found = simple_evaluate(
        model=lm,
        tasks=tasks(docs),
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    scores, samples = found["results"], found["samples"]
    return {
        "exact match": scores["write_code"]["exact_match,stripped"],
        "likeliest": scores["score_code"]["acc,none"],
        "answers": [sample["resps"][0][0] for sample in samples["write_code"]],
        "likelihoods": [sample["resps"][0][0][0] for sample in samples["score_code"]],
    }


def tasks(docs: Docs) -> list[dict[str, Any]]:
    """Return the two tasks, as lm_eval reads them from a YAML file."""
    both = {
        "custom_dataset": lambda **_: {"test": Dataset.from_list(docs)},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{code}}",
    }
    written = {
        "task": "write_code",
        "output_type": "generate_until",
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
        "filter_list": [
            {
                "name": "stripped",
                "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}],
            }
        ],
    }
    scored = {
        "task": "score_code",
        "output_type": "loglikelihood",
        "metric_list": [{"metric": "acc"}],
    }
    return [{**both, **written}, {**both, **scored}]


def show(name: str, found: dict[str, Any], plain: dict[str, Any]) -> None:
    """Print the scores of a way of decoding, and how many answers are the plain model's."""
    same = sum(a == b for a, b in zip(found["answers"], plain["answers"], strict=True))
    mean = sum(found["likelihoods"]) / len(found["likelihoods"])
    print(
        f"{name}: exact match {found['exact match']:.2f}, likeliest {found['likeliest']:.2f}, "
        f"log-likelihood {mean:.3f}, answers as plain {same} of {len(plain['answers'])}"
    )


def tiny_model() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return a model of random weights and a tokenizer of one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: place for place, token in enumerate(["<eos>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        initializer_range=0.2, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    special = {"eos_token": "<eos>", "pad_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    return LlamaForCausalLM(config).eval(), tokenizer


if __name__ == "__main__":
    main()
