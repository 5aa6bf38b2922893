"""Every kernel, compiled for every chip, fits in it without spilling.

Regimes are each op's own (`builds`): the widths and tiles its launcher would choose. Catches what
the interpreter cannot: code that does not compile, a tile too large for a chip's shared memory,
registers spilled to memory, and a matrix product that lost its tensor core.
"""

import importlib

import pytest

from dspark_kernels.testing.aot import compile_build
from dspark_kernels.testing.chips import CHIPS
from dspark_kernels.testing.ops import OPS

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("op", OPS)
def test_an_op_fits_the_chip(op, chip):
    builds = importlib.import_module(f"dspark_kernels.{op}.kernel").builds()
    problems = []
    for build in builds:
        resources = compile_build(build, chip)
        problems += [f"{build.name}: {problem}" for problem in resources.problems(chip)]
        if "BLOCK_DOT" in build.constants or "bf16" in build.name:
            print(op, build.name, chip.name, resources)
    assert builds
    assert not problems, "; ".join(problems)
