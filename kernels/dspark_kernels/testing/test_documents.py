"""Tables, benchmarks and the exported package: what is written about the kernels stays true.

Regimes: generated tables against their source; every benchmark at a tiny shape; the constants the
cost formulas repeat against the kernels' own; the export, loaded under another name, without the
package it came from.
"""

import importlib
import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from dspark_kernels.costs import COSTS, SPLIT_DENSE, Shape
from dspark_kernels.ragged_attention.tiling import SPLIT_TOKENS
from dspark_kernels.testing.bounds import relative_rms
from dspark_kernels.testing.ops import OPS
from dspark_kernels.testing.tables import KERNELS, README, RESOURCES, render


def run_python(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)  # noqa: S603


def test_the_tables_are_as_generated():
    assert render(README.read_text()) == README.read_text()


def test_no_recorded_variant_spills():
    records = json.loads(RESOURCES.read_text())
    assert {record["op"] for record in records} == set(OPS)
    assert not [record for record in records if record["spilled"] or record["stack_bytes"]]


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_its_files(op):
    folder = KERNELS / "dspark_kernels" / op
    for name in ("reference.py", "op.py", "kernel.py", f"test_{op}.py", f"bench_{op}.py"):
        assert (folder / name).is_file()
    assert (folder / "README.md").is_file()


@pytest.mark.parametrize("op", OPS)
def test_every_benchmark_builds_runs_and_agrees(op):
    for case in importlib.import_module(f"dspark_kernels.{op}.bench_{op}").cases("cpu"):
        case.run()
        case.baseline()
        assert case.check() <= case.bound
        assert case.floor_us > 0


def test_costs_grow_with_the_rows():
    for op, cost in COSTS.items():
        assert cost(Shape(rows=2)).bytes_moved > cost(Shape()).bytes_moved, op


def test_the_cost_formulas_use_the_kernels_own_splits():
    assert SPLIT_DENSE == SPLIT_TOKENS


def test_an_op_imports_no_triton():
    code = "import sys, importlib\n"
    code += "".join(f"importlib.import_module('dspark_kernels.{op}.op')\n" for op in OPS)
    code += "sys.exit('triton' in sys.modules)"
    assert run_python(code).returncode == 0


def test_the_exported_package_stands_alone(tmp_path):
    path = KERNELS / "export.py"
    spec = importlib.util.spec_from_file_location("dspark_kernels_export", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.export(tmp_path)
    package = tmp_path / "torch-ext" / "dspark_kernels"
    for file in package.rglob("*.py"):
        assert "from dspark_kernels" not in file.read_text(), file
    code = f"""
import importlib.util, sys, torch
sys.modules["dspark_kernels"] = None
spec = importlib.util.spec_from_file_location("from_the_hub", {str(package / "__init__.py")!r})
module = importlib.util.module_from_spec(spec)
sys.modules["from_the_hub"] = module
spec.loader.exec_module(module)
assert module.merge_lse(torch.ones(2, 3, 4), torch.zeros(2, 3))[0].shape == (3, 4)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_a_nan_fits_no_bound():
    assert not relative_rms(torch.tensor([torch.nan]), torch.ones(1)) <= 1e9
