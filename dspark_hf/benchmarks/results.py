"""The result file: one machine, one model, one entry per section and dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_hf.errors import ConfigError
from dspark_hf.files import written_whole

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = 1
DEFAULT_PATH = Path("benchmarks/results/generate.json")


def run_key(section: str, dtype: str) -> str:
    """Return the key of a section's entry, such as "prompts-bfloat16"."""
    return f"{section}-{dtype}"


def load_results(path: Path) -> dict[str, Any]:
    """Read a result file.

    Args:
        path: The file; a missing one raises FileNotFoundError.

    Returns:
        dict[str, Any]: Its contents.

    Raises:
        ConfigError: If it is not a result file of this format.
    """
    return require_format(path, read_json(path))


def read_json(path: Path) -> Any:
    """Return what a file holds as JSON, whatever its format.

    Args:
        path: The file; a missing one raises FileNotFoundError.

    Raises:
        ConfigError: If it is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} must be a result file of `bench generate`; got no JSON: {error}. Remove it or "
            "name another."
        ) from error


def require_format(path: Path, results: Any) -> dict[str, Any]:
    """Return what a file holds if that is results of this format, or refuse it.

    Args:
        path: The file, for the message.
        results: What it holds.

    Raises:
        ConfigError: If they are not.
    """
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise ConfigError(
            f"{path} must be a result file of format {FORMAT}; got another. Remove it or name "
            "another."
        )
    return results


def open_results(
    path: Path, machine: Mapping[str, Any], model: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the results to add to: the file's, or empty ones.

    Args:
        path: Where they will be saved.
        machine: This machine, from `environment.machine`.
        model: The target, from `environment.describe_model`.

    Returns:
        dict[str, Any]: Results of this machine and model.

    Raises:
        ConfigError: If the file holds results of another machine or model.
    """
    if not path.exists():
        return new_results(machine, model)
    results = load_results(path)
    if results["machine"] != machine:
        _refuse(path, "machine", results["machine"], machine)
    if results["model"]["fingerprint"] != model["fingerprint"]:
        _refuse(path, "model", results["model"], model)
    return results


def new_results(machine: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Return results of a machine and model with no entry yet."""
    return {"format": FORMAT, "machine": dict(machine), "model": dict(model), "runs": {}}


def merge(results: Mapping[str, Any], key: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return results with one entry added or replaced, the others as they were."""
    return {**results, "runs": {**results["runs"], key: dict(run)}}


def save_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write a result file; one that is there is replaced only by a complete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as partial:
        partial.write_text(_dumped(results), encoding="utf-8")


def _dumped(results: Mapping[str, Any]) -> str:
    """Write JSON with one line per timed call, so that files stay short and diffs readable."""
    marks: dict[str, str] = {}

    def marked(row: Any) -> str:
        mark = f"@row-{len(marks)}@"
        marks[f'"{mark}"'] = json.dumps(row)
        return mark

    runs = {
        key: {**run, "rows": [marked(row) for row in run["rows"]]}
        for key, run in results["runs"].items()
    }
    lines = json.dumps({**results, "runs": runs}, indent=1).split("\n")
    for i, line in enumerate(lines):
        text = line.strip().rstrip(",")
        if text in marks:
            lines[i] = line.replace(text, marks[text])
    return "\n".join(lines) + "\n"


def _refuse(path: Path, what: str, held: Any, got: Any) -> None:
    raise ConfigError(
        f"{path} must hold results of this {what} to add to them; it holds {held}, this is {got}. "
        "Name another file with --output."
    )
