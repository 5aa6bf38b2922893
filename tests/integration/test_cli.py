"""The command line on a tiny saved model whose tokens are bytes."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

import tiny
from dspark_hf.cli.app import app
from dspark_hf.cli.doctor import break_even, dtype_advice, layer_kinds, thread_advice
from dspark_hf.cli.render import Piece, pieces_of
from dspark_hf.cli.session import parse_keywords
from dspark_hf.errors import ConfigError
from dspark_hf.verification.acceptance import Decision, Greedy, Rejection

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REPETITIVE = "tea cup tea cup tea cup tea"
"""Lookup drafts after this from the first round on."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, a padding token before them and an end token behind."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<pad>", *alphabet, "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106 - a token of text
        eos_token="<eos>",  # noqa: S106 - as above
        chat_template=TEMPLATE,
    )


def save(model, folder):
    """Save a model with the byte tokenizer."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama with as many tokens as the tokenizer and room for every prompt of the package."""
    model = tiny.llama(vocab_size=258, max_position_embeddings=4096)
    return save(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory):
    """Another Llama, to draft with."""
    model = tiny.llama(seed=6, vocab_size=258, max_position_embeddings=4096)
    return save(model, tmp_path_factory.mktemp("small"))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text(f"{REPETITIVE}\n\none two one two one\n", encoding="utf-8")
    return str(path)


def invoke(*args: str, exit_code: int = 0) -> str:
    """Run a command on a wide terminal without colours and return all it wrote."""
    result = CliRunner().invoke(app, [*args], env={"COLUMNS": "200"})
    assert result.exit_code == exit_code, result.output
    return result.output


def plain_text(folder, prompt, max_new_tokens, *, chat=True):
    """Return what the saved model says to a prompt by Transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if chat:
        prompt = f"<user>{prompt}\n<assistant>"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    new = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)


def accept_anything(rule, scores, draft, draft_probs, position):
    """Stand-in for a broken acceptance rule."""
    token = int(scores.argmax()) if draft is None else draft
    return Decision(token, draft is not None)


def test_help_lists_every_command():
    output = invoke("--help")
    for name in ("generate", "demo", "doctor", "verify", "bench"):
        assert re.search(rf"^\W*{name}\b", output, re.MULTILINE)


@pytest.mark.parametrize("drafter", ["lookup", "none"])
def test_generate_prints_the_plain_models_text_exactly(folder, drafter):
    output = invoke(
        "generate", "--model", folder, "--prompt", REPETITIVE, "--dtype", "float32",
        "--max-new-tokens", "40", "--drafter", drafter,
    )  # fmt: skip
    assert output.startswith(plain_text(folder, REPETITIVE, 40) + "\n")
    assert "tokens/s" in output
    assert "flat" in output


def test_generate_takes_a_drafting_model_and_no_chat(folder, small_folder):
    output = invoke(
        "generate", "--model", folder, "--prompt", "abc", "--dtype", "float32", "--no-chat",
        "--max-new-tokens", "20", "--drafter", small_folder,
    )  # fmt: skip
    assert output.startswith(plain_text(folder, "abc", 20, chat=False) + "\n")


def test_generate_compares_every_row_of_a_batch(folder):
    output = invoke(
        "generate", "--model", folder, "--prompt", REPETITIVE, "--prompt", "short", "--dtype",
        "float32", "--max-new-tokens", "20", "--compare",
    )  # fmt: skip
    assert "prompt 1" in output
    assert "prompt 2" in output
    assert plain_text(folder, REPETITIVE, 20) in output
    assert "ratio x" in output
    assert output.count("identical: yes") == 2


def test_generate_says_where_texts_part(folder, monkeypatch):
    monkeypatch.setattr("dspark_hf.decode.Decision", lambda token, _: Decision(7, accepted=False))
    output = invoke(
        "generate", "--model", folder, "--prompt", "x", "--dtype", "float32",
        "--max-new-tokens", "5", "--compare",
    )  # fmt: skip
    assert re.search(r"identical: no; they part at token \d, where plain scored the two", output)
    assert "no float32 rounding" in output


def test_sampled_text_repeats_with_its_seed(folder):
    arguments = (
        "generate", "--model", folder, "--prompt", REPETITIVE, "--dtype", "float32", "--sample",
        "--temperature", "5", "--max-new-tokens", "20", "--compare", "--seed",
    )  # fmt: skip
    texts = [invoke(*arguments, seed).partition("tokens/s")[0] for seed in ("1", "1", "2")]
    texts = [text.rpartition("\n")[0] for text in texts]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "no/such/folder"], "must be the path or hub id of a causal LM"),
        (["--dtype", "int3"], "dtype must be one of"),
        (["--drafter", "no-such-drafter"], "drafter must be one of"),
    ],
)
def test_an_error_is_one_line(folder, arguments, words):
    if "--model" not in arguments:
        arguments = ["--model", folder, *arguments]
    output = invoke("generate", "--prompt", "x", *arguments, exit_code=2)
    assert output.startswith("Error: ")
    assert output.count("\n") == 1
    assert words in output


def test_chat_needs_a_template(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "chat_template.jinja").unlink()
    arguments = ("generate", "--model", str(copy), "--prompt", REPETITIVE, "--dtype", "float32")
    output = invoke(*arguments, "--max-new-tokens", "9")
    assert output.startswith(plain_text(folder, REPETITIVE, 9, chat=False) + "\n")
    assert "--chat needs a tokenizer with a chat template" in invoke(
        *arguments, "--chat", exit_code=2
    )


def test_doctor_alone_shows_the_environment():
    output = invoke("doctor")
    assert re.search(r"torch +\d", output)
    assert "OMP_WAIT_POLICY" in output
    assert "--model" in output


def test_doctor_names_the_path_and_what_pays(folder):
    output = invoke("doctor", "--model", folder, "--dtype", "float32")
    assert "flat: all rows of a batch in one ragged forward" in output
    assert "4096" in output
    assert "with chat template" in output
    assert re.search(r"\b16 +17 +\d", output)
    assert "Verifying 9 tokens costs x" in output


def test_doctor_advises_float32_where_16_bits_share_nothing_between_tokens():
    slow, cpu = {1: 0.1, 17: 0.5}, torch.device("cpu")
    (advice,) = dtype_advice(torch.bfloat16, cpu, slow)
    assert "x5.0" in advice
    assert "--dtype float32" in advice
    assert not dtype_advice(torch.bfloat16, cpu, {1: 0.1, 17: 0.2})
    assert not dtype_advice(torch.float32, cpu, slow)
    assert not dtype_advice(torch.float16, torch.device("cuda"), slow)


def test_doctor_names_the_rowwise_path_and_why(tmp_path):
    output = invoke("doctor", "--model", save(tiny.bloom(), tmp_path), "--dtype", "float32")
    assert "rowwise: each row with a cache of its own" in output
    assert re.search(
        r"why +BloomForCausalLM computes attention or positions in its own way", output
    )
    assert "Verifying 9 tokens costs x" in output


def test_doctor_says_when_drafts_cannot_be_verified(tmp_path):
    output = invoke("doctor", "--model", save(tiny.mamba(), tmp_path), "--dtype", "float32")
    assert "own loop: generate() runs as Transformers wrote it" in output
    assert "Drafting cannot help here" in output


def test_verify_passes_a_sound_model(folder, small_folder, prompts):
    output = invoke(
        "verify", "--model", folder, "--drafter", small_folder, "--prompts", prompts, "--dtype",
        "float32", "--max-new-tokens", "16", "--batch-size", "2", "--samples", "200", "--kw",
        "repetition_penalty=1.1", "--kw", "temperature=6.0", "--kw", "top_k=8",
    )  # fmt: skip
    assert "line 1" in output
    assert "line 2" in output
    assert "Sampled tokens: consistent" in output
    assert "No real difference: 2 of 2 texts are equal" in output


def test_verify_catches_a_broken_greedy_rule(folder, prompts, monkeypatch):
    monkeypatch.setattr(Greedy, "decide", accept_anything)
    output = invoke(
        "verify", "--model", folder, "--prompts", prompts, "--dtype", "float32",
        "--max-new-tokens", "16", "--samples", "0", "--kw", "repetition_penalty=1.1", exit_code=1,
    )  # fmt: skip
    # How many prompts are drafted for follows measured times.
    assert re.search("DIFFERENT: [12] greedy texts differ by more than rounding", output)


def test_verify_catches_a_broken_sampling_rule(folder, small_folder, prompts, monkeypatch):
    monkeypatch.setattr(Rejection, "decide", accept_anything)
    output = invoke(
        "verify", "--model", folder, "--drafter", small_folder, "--prompts", prompts, "--dtype",
        "float32", "--max-new-tokens", "4", "--samples", "200", "--kw", "temperature=6.0", "--kw",
        "top_k=8", exit_code=1,
    )  # fmt: skip
    assert "Sampled tokens: different" in output
    assert "DIFFERENT: sampled tokens differ by more than rounding" in output


def test_verify_says_when_nothing_was_drafted(folder, prompts):
    output = invoke(
        "verify", "--model", folder, "--drafter", "none", "--prompts", prompts, "--dtype",
        "float32", "--max-new-tokens", "4", "--samples", "20",
    )  # fmt: skip
    assert "Sampled tokens: inconclusive" in output
    assert "no draft was verified, so this tested no drafting" in output


def test_verify_refuses_an_empty_file_of_prompts(folder, tmp_path):
    path = tmp_path / "none.txt"
    path.write_text("\n", encoding="utf-8")
    output = invoke("verify", "--model", folder, "--prompts", str(path), exit_code=2)
    assert "one prompt a line" in output


def test_demo_shows_both_sides(folder):
    output = invoke("demo", "--model", folder, "--dtype", "float32", "--max-new-tokens", "12")
    assert re.search(r"─ plain ─.*─ dspark ─", output)
    assert output.count("identical: yes") == 2
    assert "identical: 4 of 4" in output
    assert 'pipeline("text-generation", batch_size=4)' in output


@pytest.mark.parametrize(
    ("text", "mask", "expected"),
    [
        ("ab", [True, False], [Piece("a", True), Piece("b", False)]),
        # Three bytes: the character is accepted only if all of them are.
        ("x€y", [False, True, True, True, False],
         [Piece("x", False), Piece("€", True), Piece("y", False)]),
        ("€", [True, True, False], [Piece("€", False)]),
        ("a\tb\r\n", [True] * 5, [Piece(part, True) for part in "a\tb\r\n"]),
        ("", [], []),
    ],
    ids=["ascii", "accepted character", "half accepted character", "control characters", "empty"],
)  # fmt: skip
def test_text_is_cut_at_tokens_and_characters(text, mask, expected):
    tokenizer = byte_tokenizer()
    assert pieces_of(tokenizer, tokenizer(text).input_ids, mask) == expected


def test_pieces_of_any_bytes_join_to_the_decoded_text():
    tokenizer = byte_tokenizer()
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        ids = torch.randint(258, (30,), generator=generator).tolist()
        mask = (torch.rand(30, generator=generator) < 0.5).tolist()
        text = "".join(piece.text for piece in pieces_of(tokenizer, ids, mask))
        assert text == tokenizer.decode(ids, skip_special_tokens=True)


def test_keywords_are_literals_or_text():
    pairs = [
        "repetition_penalty=1.1",
        "top_k=5",
        "stop_strings=['a']",
        "cache_implementation=dynamic",
    ]
    assert parse_keywords(pairs) == {
        "repetition_penalty": 1.1,
        "top_k": 5,
        "stop_strings": ["a"],
        "cache_implementation": "dynamic",
    }


@pytest.mark.parametrize("pair", ["top_k", "no_such_setting=1", "do_sample=True"])
def test_unknown_keywords_are_refused(pair):
    with pytest.raises(ConfigError, match="--kw must be name=value"):
        parse_keywords([pair])


@pytest.mark.parametrize(
    ("ratio", "num_drafts", "expected"),
    [
        (1.0, 4, 0.0),
        (1.5, 1, 0.5),
        (1.75, 2, 0.5),
        (3.0, 2, 1.0),
        (3.1, 2, None),
    ],
)
def test_break_even_solves_the_geometric_sum(ratio, num_drafts, expected):
    assert break_even(ratio, num_drafts) == (
        None if expected is None else pytest.approx(expected, abs=1e-6)
    )


def test_passive_waiting_needs_no_advice(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert thread_advice("PASSIVE") == []
    assert "OMP_WAIT_POLICY=passive" in thread_advice(None)[0]


def test_too_many_threads_are_pointed_out(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    assert "OMP_NUM_THREADS=" in thread_advice("passive")[0]


def test_layers_are_counted_by_kind():
    assert layer_kinds(tiny.gemma2().config) == "2 sliding_attention, 1 full_attention"
    assert layer_kinds(tiny.llama().config) == "3 (one kind)"
