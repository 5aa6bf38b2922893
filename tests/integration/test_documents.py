"""What a newcomer runs first: the README's example, the example script, imports from the root."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    """Run Python in the repository root and return what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def readme_example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    return blocks[0]


def test_the_readme_shows_code_before_line_20():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert next(i for i, line in enumerate(lines, start=1) if line.startswith("```python")) < 20


@pytest.mark.slow
@pytest.mark.xdist_group("real-lookup")
def test_the_readme_example_runs(smollm2_path):
    code = readme_example().replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(smollm2_path))
    assert "one two three" in run("-c", code)


def test_the_example_drafter_gives_the_same_tokens():
    printed = run("examples/custom_drafter.py", "--tiny")
    assert "identical: True" in printed
    assert int(re.search(r"accepted (\d+)", printed)[1]) > 0


def test_both_packages_import_from_the_repository_root():
    # A folder named `kernels` with an __init__ would hide Hugging Face's package of that name.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    run("-c", "import transformers, dspark_hf, dspark_kernels; transformers.AutoModelForCausalLM")


def test_importing_the_package_does_not_import_torch():
    printed = run("-c", "import sys, dspark_hf; print('torch' in sys.modules)")
    assert printed.strip() == "False"
