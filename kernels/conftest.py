"""Fixtures of the kernel tests: where they run, and in which process."""

from __future__ import annotations

import pytest
import torch

from dspark_kernels.testing.interpreter import INTERPRET, is_interpreting, patch_bfloat16_dot


def pytest_configure() -> None:
    """Use one thread: workers with a pool each fight for the cores."""
    torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keep interpreter and compiler apart: the variable decides what `triton.jit` makes."""
    if item.get_closest_marker("interpreter") and not is_interpreting():
        pytest.skip(f"runs with {INTERPRET}=1 in a process of its own (`make test-kernels`)")
    if item.get_closest_marker("aot") and is_interpreting():
        pytest.skip(f"compiles kernels, which {INTERPRET}=1 prevents (`make test-kernels`)")
    if item.get_closest_marker("interpreter") or item.get_closest_marker("aot"):
        pytest.importorskip("triton", reason="Triton is not installed (Linux only)")
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA or ROCm device")


@pytest.fixture(
    params=[
        pytest.param("cpu", id="interpreter", marks=pytest.mark.interpreter),
        pytest.param("cuda", id="gpu", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where a kernel is run against its reference: the interpreter, or a GPU with `-m gpu`."""
    if request.param == "cpu":
        patch_bfloat16_dot(monkeypatch)
    return torch.device(request.param)
