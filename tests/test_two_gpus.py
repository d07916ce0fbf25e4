"""A model split over two GPUs, or two processes, generates the tokens of one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kivi_kv import KiviConfig, cache_for
from tiny_models import generate, left_padded, random_model, tiny_config

two_gpus = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = KiviConfig(4, 4, 32, residual_length=32)
PROMPTS, NEW = [290, 158, 40], 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model(tiny_config(LlamaConfig, vocab_size=100)).save_pretrained(tmp_path)  # a vocabulary of two halves
    return tmp_path


def by_one(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(DEVICE)
    return generate(
        model,
        left_padded(PROMPTS),
        cache_for(model, CONFIG, max_tokens=400),
        max_new_tokens=NEW,
        disable_compile=True,
    )


@pytest.mark.parametrize("max_tokens", [None, 400])
@pytest.mark.parametrize("dtype", [pytest.param(x, marks=two_gpus) for x in (torch.float16, torch.float32)])
def test_layers_on_two_gpus(folder, dtype, max_tokens):
    where = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    where["model.rotary_emb"] = 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=where).eval()
    cache = cache_for(model, CONFIG, max_tokens)
    assert not cache.is_compileable
    assert torch.equal(generate(model, left_padded(PROMPTS), cache, max_new_tokens=NEW), by_one(folder, dtype))
    assert [layer.cache.storage.pool.device.index for layer in cache.packed_layers] == [0, 1]
    assert cache.stats()["materializations"] == cache.stats()["unattended"] == 0


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float16", marks=two_gpus),
        pytest.param("float32", marks=two_gpus, id="float32-gpus"),
        pytest.param(
            "float32", marks=pytest.mark.skipif(DEVICE == "cuda", reason="by GPUs here"), id="float32-cpu"
        ),
    ],
)
def test_heads_in_two_processes(folder, dtype):
    """In fp16 the sum of two parts rounds otherwise than one, which decides a token sooner or later."""
    script = Path(__file__).with_name("two_gpus.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(script), str(folder), dtype]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = dict(line.split(" ", 1) for line in run.stdout.splitlines() if line.startswith(("heads", "tokens")))
    assert lines["heads"].startswith("1 "), "each process holds one of the two kv heads"
    tokens = torch.tensor(json.loads(lines["tokens"]))
    expected = by_one(folder, getattr(torch, dtype))
    new = tokens[:, -NEW:] == expected[:, -NEW:]
    if dtype == "float32":
        assert new.all()
    else:
        assert "gluon" in lines["heads"] or "triton" in lines["heads"]
        assert new[:, :3].all()
        assert new.float().mean() > 0.5
