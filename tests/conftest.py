"""Settings and fixtures for every test."""

from __future__ import annotations

import os

# Read when huggingface_hub is imported, so it must be set before anything else: tests never fetch.
os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path

import pytest
import torch

from dspark_hf.demo_model import prepare_smollm2


def pytest_configure() -> None:
    """Use one thread: workers with a pool each fight for the cores; tiny models need none."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Local checkpoint of SmolLM2-135M-Instruct; written on first use (about 30 s)."""
    return prepare_smollm2()


@pytest.fixture(autouse=True)
def _profiles_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep throughput profiles of tests apart from the user's, and from each other."""
    monkeypatch.setattr("dspark_hf.handle.profile_folder", lambda: tmp_path / "profiles")
