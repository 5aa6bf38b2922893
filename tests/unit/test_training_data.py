"""Training texts: how they are read, held out, ordered, and where drafting begins in them."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from dspark_hf.errors import ConfigError
from dspark_hf.training import data
from dspark_hf.training.data import Text
from dspark_hf.training.sources import is_given, parse, read_records
from dspark_hf.training.trainer import draw_anchors
from training_files import byte_tokenizer, ragged_texts, write_jsonl

ASKED = {"role": "user", "content": "hi"}
ANSWERED = {"role": "assistant", "content": "yes"}


def test_a_line_may_hold_ids_a_chat_or_text(tmp_path):
    path = write_jsonl(
        tmp_path / "texts.jsonl",
        [{"ids": [5, 6, 7, 8], "answer_start": 2}, {"messages": [ASKED, ANSWERED]},
         {"text": "abcd"}],
    )  # fmt: skip
    tokenizer = byte_tokenizer()
    ids, chat, text = data.read_texts(path, tokenizer, max_tokens=100)
    assert ids == Text((5, 6, 7, 8), 2)
    assert tokenizer.decode(chat.ids) == "<user>hi\n<assistant>yes\n"
    assert tokenizer.decode(chat.ids[chat.start :]) == "yes\n"
    assert (tokenizer.decode(text.ids), text.start) == ("abcd", 1)


def test_long_texts_are_cut_and_those_with_nothing_to_learn_left_out(tmp_path):
    records = [
        {"ids": list(range(30)), "answer_start": 3},
        {"ids": list(range(30)), "answer_start": 9},
    ]
    path = write_jsonl(tmp_path / "texts.jsonl", records)
    texts = data.read_texts(path, byte_tokenizer(), max_tokens=10)
    assert texts == [Text(tuple(range(10)), 3)]
    anywhere = data.read_texts(path, byte_tokenizer(), max_tokens=10, only_answers=False)
    assert [text.start for text in anywhere] == [1, 1]


@pytest.mark.parametrize(
    "line",
    ["{nonsense", '{"other": 1}', '{"ids": 7}', "[1, 2]", '{"messages": []}',
     json.dumps({"messages": [ANSWERED, ASKED]})],
    ids=["no_json", "no_text", "no_list", "no_object", "no_messages", "no_answer"],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"ids": [1, 2, 3]}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 3 of"):
        data.read_texts(path, byte_tokenizer(), max_tokens=10)


def test_no_file_and_no_usable_text_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be a JSONL file"):
        data.read_texts(tmp_path / "none.jsonl", byte_tokenizer(), max_tokens=10)
    path = write_jsonl(tmp_path / "short.jsonl", [{"ids": [1]}])
    with pytest.raises(ConfigError, match="at least one usable text"):
        data.read_texts(path, byte_tokenizer(), max_tokens=10)


@pytest.mark.parametrize("count", [1, 7, 40, 97])
@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_every_text_comes_once_per_epoch(count, batch_size):
    texts = ragged_texts(count)
    epoch = data.batches(texts, range(count), batch_size, seed=3)
    assert Counter(i for batch in epoch for i in batch) == Counter(range(count))
    assert all(len(batch) <= batch_size for batch in epoch)


def test_the_order_follows_from_the_seed():
    texts = ragged_texts(60)
    first = data.batches(texts, range(60), 4, seed=1)
    assert first == data.batches(texts, range(60), 4, seed=1)
    assert first != data.batches(texts, range(60), 4, seed=2)


def test_texts_of_a_batch_have_similar_lengths():
    texts = ragged_texts(64, longest=60)
    lengths = [[len(texts[i].ids) for i in b] for b in data.batches(texts, range(64), 4, seed=0)]
    padding = sum(max(batch) * len(batch) - sum(batch) for batch in lengths)
    assert padding < 0.1 * sum(map(sum, lengths))


def test_held_out_texts_are_not_trained_on():
    texts = ragged_texts(50)
    training, held = data.split(texts, 0.1, seed=0)
    assert len(held) == 5
    assert sorted([*training, *held]) == list(range(50))
    assert data.split(texts, 0.1, seed=0) == (training, held)


def test_the_draft_vocabulary_is_the_most_frequent_answer_ids():
    texts = [Text((9, 9, 9, 9, 1, 2, 2, 3, 3, 3), 4)]
    assert data.draft_vocabulary(texts, 2, 20).tolist() == [2, 3]
    # Filled up from the lowest ids where the texts hold too few.
    assert data.draft_vocabulary(texts, 5, 20).tolist() == [0, 1, 2, 3, 4]


def test_the_fingerprint_tells_texts_apart():
    texts = ragged_texts(3)
    moved = [*texts[:-1], Text(texts[-1].ids, texts[-1].start + 1)]
    assert data.fingerprint(texts) == data.fingerprint(ragged_texts(3))
    assert data.fingerprint(texts) != data.fingerprint(moved)


@pytest.mark.parametrize(("length", "start"), [(12, 4), (12, 0), (5, 3), (30, 10)])
@pytest.mark.parametrize("count", [1, 7, 20])
def test_anchors_take_turns_before_any_comes_twice(length, start, count):
    text = Text(tuple(range(length)), start)
    places = range(max(start, 1), length - 1)
    anchors = draw_anchors(text, count, torch.Generator().manual_seed(0))
    seen = Counter(anchors.tolist())
    assert anchors.tolist() == sorted(anchors.tolist())
    assert len(anchors) == count
    assert set(seen) <= set(places)
    assert max(seen.values()) - min(seen.get(p, 0) for p in places) <= 1


@pytest.mark.parametrize(
    ("record", "given"),
    [({"ids": [1, 2]}, True), ({"text": "a"}, True), ({"prompt": "a"}, False),
     ({"messages": [ASKED]}, False), ({"messages": [ASKED, ANSWERED]}, True),
     ({"chat": [ASKED, ANSWERED]}, True), ({"prompt": [ASKED]}, False)],
)  # fmt: skip
def test_whole_texts_are_told_from_prompts(record, given):
    assert is_given(record, regenerate=False) == given
    parsed = parse("line 1", record, byte_tokenizer())
    assert isinstance(parsed, Text) == given


def test_answers_can_be_dropped_to_be_written_anew():
    tokenizer = byte_tokenizer()
    prompt = parse("line 1", {"messages": [ASKED, ANSWERED]}, tokenizer, regenerate=True)
    assert tokenizer.decode(prompt) == "<user>hi\n<assistant>"


def test_without_a_chat_template_a_prompt_is_plain_text():
    tokenizer = byte_tokenizer(template=None)
    assert tokenizer.decode(parse("line 1", {"prompt": "abc"}, tokenizer)) == "abc"
    with pytest.raises(ConfigError, match=r"line 2 .*chat template"):
        parse("line 2", {"messages": [ASKED, ANSWERED, ASKED]}, tokenizer)


@pytest.mark.parametrize(
    "record", [{"other": 1}, {"messages": []}, {"messages": ["hi"]}, {"prompt": ""}]
)
def test_a_record_that_cannot_be_used_is_named(record):
    with pytest.raises(ConfigError, match="row 7 of d must hold"):
        parse("row 7 of d", record, byte_tokenizer(template=None))


def test_a_saved_dataset_is_read_by_split(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": "one"}, {"prompt": "two"}])
    rows.save_to_disk(tmp_path / "plain")
    assert [r for _, r in read_records(str(tmp_path / "plain"))] == list(rows)
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "d")
    assert [place for place, _ in read_records(f"{tmp_path / 'd'}:test")] == [
        f"row 1 of {tmp_path / 'd'}:test"
    ]
    with pytest.raises(ConfigError, match=r"loading .* failed"):
        list(read_records(f"{tmp_path / 'd'}:dev"))


def test_a_folder_of_data_files_is_a_dataset(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    folder = tmp_path / "files"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [{"messages": [ASKED]}])
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (_, record), = read_records(str(folder))  # fmt: skip
    assert is_given(record, regenerate=False) is False
    assert parse("row 1", record, byte_tokenizer()) == parse(
        "row 1", {"prompt": "hi"}, byte_tokenizer()
    )
