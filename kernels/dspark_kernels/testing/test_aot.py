"""Every kernel, compiled for every chip, fits in it without spilling.

Regimes are each op's own (`builds`): the widths and tiles its launcher would choose. Catches what
the interpreter cannot: code that does not compile, a tile too large for a chip's shared memory,
registers spilled to memory, a matrix product that lost its tensor core, and counts of 1, which the
launcher turns into constants.
"""

import importlib

import pytest

from dspark_kernels.testing.aot import compile_build, with_ones
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
        if "bf16" in build.name and build.has_dot and not resources.products:
            problems.append(f"{build.name}: no matrix instruction")
    assert builds
    assert not problems, "; ".join(problems)


@pytest.mark.parametrize("op", OPS)
def test_an_op_compiles_when_its_counts_are_one(op):
    builds = importlib.import_module(f"dspark_kernels.{op}.kernel").builds()
    by_kernel = {build.kernel: build for build in builds}
    for build in by_kernel.values():
        compile_build(with_ones(build), CHIPS["sm_90"])
