"""The model card of a trained drafter: every number in it from the run's own files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from dspark_hf.benchmarks.markers import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIBRARY = "dspark-hf"
TAGS = ["speculative-decoding", "draft-model", "dspark"]
MOST_LOG_ROWS = 10
"""Validations shown; those between are in train_log.jsonl."""


def render_card(
    facts: Mapping[str, Any],
    log: Sequence[Mapping[str, Any]],
    calibration: Mapping[str, Any] | None,
) -> str:
    """Write a card.

    Args:
        facts: Content of training.json.
        log: Records of train_log.jsonl, at least one.
        calibration: Content of calibration.json; None where it was not fitted.

    Returns:
        str: README.md with its YAML front matter.
    """
    last = log[-1]
    base, spec = facts["base_model"], facts["run"]["spec"]
    front = yaml.safe_dump(
        {
            "base_model": base,
            "license": facts["license"],
            "library_name": LIBRARY,
            "pipeline_tag": "text-generation",
            "tags": TAGS,
        },
        sort_keys=False,
    )
    drafts = spec["block_size"] - (0 if spec["reads_anchor"] else 1)
    parts = [
        f"---\n{front}---\n",
        f"# A DSpark drafter for {base}\n",
        _promise(base, drafts, last),
        _use(base),
        "## What it is\n",
        _shape(facts, spec),
        "## How well it guesses\n",
        _positions(last),
        "## Confidence\n",
        _calibration(calibration),
        "## How it was made\n",
        _texts(facts),
        _settings(facts, log),
        _earlier(facts),
        f"Reproduced by:\n\n```\n{facts['command']}\n```\n",
        "## The run\n",
        _log(log),
        _resources(facts, log),
        "## Limits\n",
        _limits(facts, spec),
    ]
    return "\n".join(parts)


def _promise(base: str, drafts: int, last: Mapping[str, Any]) -> str:
    return (
        f"Drafts {drafts} tokens a round for {base}, which decides which of them stand: the text "
        f"stays the target's. On held-out texts {last['expected_length_sampled']:.2f} tokens per "
        "target forward are expected when sampling at temperature 1 and "
        f"{last['expected_length_greedy']:.2f} when decoding greedily, the target's own token "
        "included.\n"
    )


def _use(base: str) -> str:
    return (
        "```python\nfrom dspark_hf import DSparkForCausalLM\n\n"
        "model = DSparkForCausalLM.from_pretrained(\n"
        f'    "{base}", drafter="PATH_OF_THIS_FOLDER"\n)\n```\n'
    )


def _shape(facts: Mapping[str, Any], spec: Mapping[str, Any]) -> str:
    pruned = spec["draft_vocab_size"] != spec["vocab_size"]
    vocabulary = f"{spec['draft_vocab_size']:,}"
    if pruned:
        vocabulary += f" of the target's {spec['vocab_size']:,} ids"
    head = f"{spec['head']}, rank {spec['markov_rank']}" if spec["markov_rank"] else "none"
    taps = ", ".join(str(layer) for layer in spec["target_layers"])
    rows = [
        ("own parameters", f"{facts['run']['parameters']:,}"),
        ("layers", str(spec["num_layers"])),
        ("block size", str(spec["block_size"])),
        ("readout", "anchor (DSpark)" if spec["reads_anchor"] else "mask filling (DFlash)"),
        ("reads target blocks", f"{taps} of {spec['num_target_layers']}"),
        ("sequential head", head),
        ("confidence head", "yes" if spec["has_confidence"] else "no"),
        ("can propose", vocabulary),
        ("embedding and output head", "the target's"),
    ]
    return _table(("property", "value"), rows)


def _positions(last: Mapping[str, Any]) -> str:
    sampled, greedy = last["acceptance_sampled"], last["acceptance_greedy"]
    rows = []
    alive = [1.0, 1.0]
    for k, (by_draw, by_best) in enumerate(zip(sampled, greedy, strict=True), start=1):
        alive = [alive[0] * by_draw, alive[1] * by_best]
        rows.append((str(k), _share(by_draw), _share(by_best), _share(alive[0]), _share(alive[1])))
    rows.append(
        (
            "expected length",
            "",
            "",
            f"{last['expected_length_sampled']:.2f}",
            f"{last['expected_length_greedy']:.2f}",
        )
    )
    header = ("position", "accepted, sampled", "greedy", "reached and accepted, sampled", "greedy")
    return _table(header, rows) + (
        "\nMeasured on texts held out from training, with the text itself before each position: "
        "the second and third column tell how often a draft stands if those before it did.\n"
    )


def _calibration(calibration: Mapping[str, Any] | None) -> str:
    if calibration is None:
        return "Not calibrated.\n"
    rows = []
    for name in ("greedy", "sampled"):
        mode = calibration[name]
        lists = ("temperatures", "shifts", "ece_before", "ece_after", "auc")
        columns = zip(*(mode[key] for key in lists), strict=True)
        rows += [
            (
                name,
                str(k),
                f"{heat:.2f}",
                f"{shift:+.2f}",
                _percent(before),
                _percent(after),
                "" if auc is None else f"{auc:.2f}",
            )
            for k, (heat, shift, before, after, auc) in enumerate(columns, start=1)
        ]
    header = (
        "decoding", "position", "temperature", "shift", "calibration error before", "after", "AUC",
    )  # fmt: skip
    counts = " and ".join(
        f"{calibration[name]['num_rounds']:,} {name}" for name in ("greedy", "sampled")
    )
    return _table(header, rows) + (
        f"\nFrom {counts} rounds of {calibration['num_prompts']} prompts decoded at temperatures "
        f"{', '.join(f'{t:g}' for t in calibration['sampling'])}; errors are those of prompts that "
        "were not fitted on.\n"
    )


def _texts(facts: Mapping[str, Any]) -> str:
    texts = facts["texts"]
    written = texts.get("written")
    source = texts["source"]
    if written is not None:
        source = written["request"]["data"] or "questions and answers by the target itself"
    rows = [
        ("source", source),
        ("texts used", f"{texts['texts']:,}"),
        ("tokens", f"{texts['tokens']:,}"),
        ("of answers", f"{texts['answer_tokens']:,}" if texts["answer_tokens"] else ""),
        ("texts by domain", _counts(texts["by_domain"])),
        ("texts by temperature", _counts(texts["by_temperature"])),
    ]
    if written is not None:
        rows.append(("answer tokens per second", f"{written['answer_tokens_per_s']:g}"))
        rows.append(("left out, too long", f"{written['skipped']:,}"))
    return _table(("texts", "value"), [row for row in rows if row[1]])


def _settings(facts: Mapping[str, Any], log: Sequence[Mapping[str, Any]]) -> str:
    seen, held = log[-1]["tokens"], facts["texts"]["tokens"]
    settings, defaults = facts["settings"], facts["defaults"]
    rows = [
        ("steps", f"{settings['steps']:,}"),
        ("text tokens seen", f"{seen:,}"),
        ("passes over the texts", f"{seen / held:.2f}"),
    ]
    rows += [
        (name, str(value))
        for name, value in settings.items()
        if name != "steps" and (value != defaults[name] or name in ("batch_size", "anchors"))
    ]
    return _table(("training", "value"), rows)


def _earlier(facts: Mapping[str, Any]) -> str:
    """Say what drafter the run went on from; nothing where it began anew."""
    if facts["settings"].get("from_drafter") is None:
        return ""
    runs = [
        f"* {run['steps']:,} steps on {run['texts']:,} texts, {run['tokens']:,} tokens:\n\n"
        f"```\n{run['command']}\n```\n"
        for run in facts.get("earlier", [])
    ]
    if not runs:
        return f"The run went on from the drafter {facts['settings']['from_drafter']}.\n"
    return "The run went on from a drafter that was trained before, by:\n\n" + "\n".join(runs)


def _log(log: Sequence[Mapping[str, Any]]) -> str:
    every = -(-len(log) // MOST_LOG_ROWS)
    shown = [record for i, record in enumerate(log) if (len(log) - 1 - i) % every == 0]
    rows = [
        (
            f"{record['step']:,}",
            f"{record['tokens']:,}",
            f"{record['loss']:.3f}",
            f"{record['expected_length_sampled']:.2f}",
            f"{record['expected_length_greedy']:.2f}",
        )
        for record in shown
    ]
    header = ("step", "tokens", "loss", "expected length, sampled", "greedy")
    return _table(header, rows)


def _resources(facts: Mapping[str, Any], log: Sequence[Mapping[str, Any]]) -> str:
    peak = max(record["peak_memory_bytes"] for record in log)
    where = facts["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    rows = [
        ("tokens per second, training", f"{log[-1]['tokens_per_s']:g}"),
        ("peak memory of the process", f"{peak / 2**30:.2f} GiB"),
        ("processes", str(facts["processes"])),
        ("device", facts["device"]),
        ("CPU", f"{where['cpu']}, {where['cores']} cores"),
        ("target computed in", facts["target_dtype"]),
        ("finished", facts["date"]),
        ("versions", versions),
    ]
    return _table(("resources", "value"), rows)


def _limits(facts: Mapping[str, Any], spec: Mapping[str, Any]) -> str:
    longest = facts["settings"]["max_tokens"]
    lines = [
        f"Made for {facts['base_model']} alone; target.json tells that target from others.",
        "Learned from texts like those above; on others it guesses worse, in the target's words.",
        f"Its texts had at most {longest:,} tokens; nothing is known of longer ones.",
    ]
    if spec["draft_vocab_size"] != spec["vocab_size"]:
        lines.append("Ids outside its vocabulary are never proposed; the target still says them.")
    return "\n".join(f"* {line}" for line in lines) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return Table("", header, rows).markdown()


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count:,}" for name, count in counts.items())


def _share(value: float) -> str:
    return f"{value:.3f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
