"""Texts of the target's own writing: conversations in rows, and files that survive a kill."""

from __future__ import annotations

import json

import pytest
import torch

import tiny
from dspark_hf.errors import ConfigError
from dspark_hf.targets.flat import FlatTarget
from dspark_hf.targets.rowwise import RowwiseTarget
from dspark_hf.training import texts as texts_module
from dspark_hf.training.data import read_texts
from dspark_hf.training.synthesis import Job, Lengths, Template, converse, sample
from dspark_hf.training.texts import TextRequest, is_ready_made, write_texts
from training_files import byte_llama, byte_tokenizer, write_jsonl

EOS = 257
NO_ENDS = Template((), (), frozenset())
SHORT = {"question_tokens": 6, "answer_tokens": 10, "rows": 4}


class KilledError(Exception):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def model():
    return byte_llama()


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def test_a_template_is_cut_around_the_users_words(tokenizer):
    template = Template.of(tokenizer, [EOS])
    assert tokenizer.decode(template.before) == "<user>"
    assert tokenizer.decode(template.after) == "\n<assistant>"
    assert template.ends == {EOS}


def test_a_template_that_cannot_be_cut_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="has none"):
        Template.of(byte_tokenizer(template=None), [EOS])
    twice = byte_tokenizer("{{ messages[0].content }}{{ messages[0].content }}")
    with pytest.raises(ConfigError, match="exactly once"):
        Template.of(twice, [EOS])


@pytest.mark.parametrize("make", [lambda m: FlatTarget(m, 8), RowwiseTarget])
@pytest.mark.parametrize("num_rows", [1, 3, 16])
def test_greedy_answers_are_those_of_each_prompt_alone(make, num_rows):
    model = tiny.llama()
    prompts = [tiny.prompt(3 + i % 5, seed=i) for i in range(7)]
    jobs = [Job(tuple(ids), False, 0.0, index=i) for i, ids in enumerate(prompts)]
    lengths = Lengths(answer=12)
    with torch.inference_mode():
        done = list(converse(make(model), NO_ENDS, jobs, num_rows=num_rows, lengths=lengths))
    assert sorted(text.index for text in done) == list(range(7))
    for text in done:
        alone = tiny.plain_generate(model, [prompts[text.index]], max_new_tokens=12)
        assert list(text.ids) == alone[0].tolist()
        assert text.answer_start == len(prompts[text.index])


def test_a_row_that_ends_makes_room_for_the_next():
    model = tiny.llama()
    prompts = [tiny.prompt(4, seed=i) for i in range(6)]
    plain = [tiny.plain_generate(model, [ids], max_new_tokens=9)[0].tolist() for ids in prompts]
    # An end token that stops some rows early and leaves others running.
    ends = frozenset({plain[0][6], plain[3][8]})
    jobs = [Job(tuple(ids), False, 0.0, index=i) for i, ids in enumerate(prompts)]
    target = FlatTarget(model, 8)
    with torch.inference_mode():
        done = list(
            converse(target, Template((), (), ends), jobs, num_rows=2, lengths=Lengths(answer=9))
        )
    assert len(done) == 6
    for text in done:
        new = plain[text.index][4:]
        stops = [k + 1 for k, token in enumerate(new) if token in ends]
        assert list(text.ids[4:]) == new[: stops[0] if stops else 9]
    assert all(target.length(row) == 0 for row in range(2))


def test_a_question_is_finished_and_then_answered(model):
    template = Template((1, 2), (3, 4, 5), frozenset({EOS}))
    job = Job((1, 2, 60), asks=True, temperature=0.0, seed=0)
    with torch.inference_mode():
        (text,) = converse(FlatTarget(model, 8), template, [job], num_rows=1, lengths=Lengths(4, 7))
    assert text.ids[:3] == (1, 2, 60)
    # Four tokens of question, the template's second half, seven of answer.
    assert text.ids[7:10] == (3, 4, 5)
    assert text.answer_start == 10
    assert len(text.ids) == 17
    alone = tiny.plain_generate(model, [list(text.ids[:10])], max_new_tokens=7)
    assert list(text.ids) == alone[0].tolist()


def test_what_a_seeded_job_says_does_not_depend_on_its_neighbours(model):
    jobs = [Job(tuple(tiny.prompt(4, seed=i)), False, 1.0, index=i, seed=5) for i in range(6)]

    def write(order, num_rows):
        with torch.inference_mode():
            done = converse(
                FlatTarget(model, 8), NO_ENDS, order, num_rows=num_rows, lengths=Lengths(answer=8)
            )
            return {text.index: text.ids for text in done}

    assert write(jobs, 6) == write(jobs[::-1], 2)


def test_samples_have_the_models_distribution():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).repeat(20_000, 1)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor(sample(logits, [1.0] * len(logits), [generator] * len(logits)))
    share = torch.bincount(drawn, minlength=3) / len(drawn)
    # Four standard deviations of 20,000 draws.
    assert torch.allclose(share, torch.tensor([0.5, 0.3, 0.2]), atol=0.015)
    assert sample(logits[:4], [0.0] * 4) == [0] * 4


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def by_job(path):
    return {record["job"]: record["ids"] for record in lines(path)}


def test_a_target_makes_up_texts_of_the_wanted_size(model, tokenizer, tmp_path):
    path = write_texts(TextRequest(tokens=150, **SHORT), model, tokenizer, tmp_path)
    records = lines(path)
    answers = sum(len(r["ids"]) - r["answer_start"] for r in records)
    # Rows in flight when enough is written are finished.
    assert 150 <= answers <= 150 + 4 * 10
    assert {r["domain"] for r in records} <= {"chat", "code", "maths"}
    facts = json.loads((tmp_path / "texts.json").read_text())
    assert facts["complete"]
    assert (facts["texts"], facts["answer_tokens"]) == (len(records), answers)
    assert len(read_texts(path, tokenizer, max_tokens=512)) == len(records)


def test_texts_that_were_broken_off_are_continued_without_loss_or_repetition(
    model, tokenizer, tmp_path, monkeypatch
):
    request = TextRequest(tokens=200, **SHORT)
    whole = write_texts(request, model, tokenizer, tmp_path / "whole")
    out = tmp_path / "broken"
    add = texts_module._Writer.add

    def dying_add(self, record):
        if self.texts == 5:
            self.file.write(json.dumps(record)[:20])
            self.file.flush()
            raise KilledError
        add(self, record)

    monkeypatch.setattr(texts_module._Writer, "add", dying_add)
    with pytest.raises(KilledError):
        write_texts(request, model, tokenizer, out)
    first = by_job_of_whole_lines(out / "texts.jsonl")
    assert len(first) == 5
    monkeypatch.setattr(texts_module._Writer, "add", add)
    path = write_texts(request, model, tokenizer, out)
    again = by_job(path)
    assert len(again) == len(lines(path))
    assert first.items() <= again.items()
    common = by_job(whole).keys() & again.keys()
    assert len(common) >= 20
    assert all(by_job(whole)[job] == again[job] for job in common)
    before = path.read_bytes()
    assert write_texts(request, model, tokenizer, out).read_bytes() == before


def by_job_of_whole_lines(path):
    text = path.read_text(encoding="utf-8")
    records = [json.loads(line) for line in text[: text.rfind("\n")].splitlines()]
    return {record["job"]: record["ids"] for record in records}


def test_texts_of_another_request_are_not_continued(model, tokenizer, tmp_path):
    write_texts(TextRequest(tokens=20, **SHORT), model, tokenizer, tmp_path)
    with pytest.raises(ConfigError, match="'seed': 0"):
        write_texts(TextRequest(tokens=20, seed=1, **SHORT), model, tokenizer, tmp_path)
    other_rows = {**SHORT, "rows": 9}
    write_texts(TextRequest(tokens=20, **other_rows), model, tokenizer, tmp_path)


def test_prompts_are_answered_and_whole_texts_kept(model, tokenizer, tmp_path):
    data = write_jsonl(
        tmp_path / "mixed.jsonl",
        [{"prompt": "abc"}, {"ids": [9, 8, 7, 6], "answer_start": 1},
         {"messages": [{"role": "user", "content": "d"}]}, {"prompt": "x" * 600}],
    )  # fmt: skip
    assert not is_ready_made(str(data))
    request = TextRequest(data=str(data), temperatures=(0.0,), **SHORT)
    records = {r["job"]: r for r in lines(write_texts(request, model, tokenizer, tmp_path / "o"))}
    assert sorted(records) == [0, 1, 2]
    assert records[1]["ids"] == [9, 8, 7, 6]
    for job, text in ((0, "abc"), (2, "d")):
        prompt = tokenizer(f"<user>{text}\n<assistant>")["input_ids"]
        alone = tiny.plain_generate(model, [prompt], max_new_tokens=10)
        assert records[job]["ids"] == alone[0].tolist()
        assert records[job]["answer_start"] == len(prompt)
    assert json.loads((tmp_path / "o" / "texts.json").read_text())["skipped"] == 1


def test_a_target_without_a_chat_template_answers_plain_prompts(model, tmp_path):
    tokenizer = byte_tokenizer(template=None)
    data = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "abc"}, {"prompt": "once upon"}])
    request = TextRequest(data=str(data), temperatures=(0.0,), **SHORT)
    records = {r["job"]: r for r in lines(write_texts(request, model, tokenizer, tmp_path / "o"))}
    for job, prompt in enumerate(("abc", "once upon")):
        ids = tokenizer(prompt)["input_ids"]
        alone = tiny.plain_generate(model, [ids], max_new_tokens=10)
        assert records[job]["ids"] == alone[0].tolist()
    with pytest.raises(ConfigError, match="chat template"):
        write_texts(TextRequest(tokens=20), model, tokenizer, tmp_path / "none")


def test_whole_texts_of_a_file_are_used_as_they_are(tmp_path):
    ask, answer = ({"role": role, "content": "a"} for role in ("user", "assistant"))
    data = write_jsonl(tmp_path / "a.jsonl", [{"ids": [1, 2, 3]}, {"messages": [ask, answer]}])
    assert is_ready_made(str(data))
    assert not is_ready_made(str(data), regenerate=True)
    assert not is_ready_made(None)
    assert not is_ready_made("owner/name:train")


@pytest.mark.parametrize(
    ("values", "name"),
    [({"rows": 0}, "rows"), ({"temperatures": ()}, "temperatures"), ({"tokens": 0}, "tokens"),
     ({"tokens": None}, "tokens"), ({"temperatures": (-1.0,)}, "temperatures")],
)  # fmt: skip
def test_a_request_that_cannot_be_met_is_refused(values, name):
    with pytest.raises(ConfigError, match=name):
        TextRequest(**{"tokens": 10, **values})
