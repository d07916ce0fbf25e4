"""SmolLM2-135M on 4,096 tokens of a novel: the accuracy that the number format promises."""

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from kivi_kv import KiviConfig, cache_for, kivi_cache_bytes
from kivi_kv.analysis import read_text, teacher_forced
from kivi_kv.integrations.transformers import cache_argument, load

NOVEL = Path(__file__).parents[1] / "examples" / "data" / "persuasion.txt"
TOKENS = 4096


@pytest.fixture(scope="module")
def model_and_ids(smollm2: Path) -> tuple[object, torch.Tensor]:
    # in fp32: many CPUs lack bf16, and packed weights are computed with in fp32
    model, tokenizer = load(smollm2, dtype=torch.float32, progress=False)
    return model, tokenizer(read_text(NOVEL), return_tensors="pt").input_ids[:, :TOKENS]


def test_perplexity_stays_near_dense(model_and_ids) -> None:
    """One test, so that one process reads the novel with a dense cache."""
    model, ids = model_and_ids
    model.set_attn_implementation("sdpa")
    dense = teacher_forced(model, ids, DynamicCache(config=model.config))
    for preset, most in (("kivi4", 1.01), ("kivi2", 1.16)):
        cache = cache_for(model, preset, max_tokens=TOKENS)
        scores = teacher_forced(model, ids, cache, cache.config)
        ratio = scores.perplexity / dense.perplexity
        print(f"{preset}: perplexity {scores.perplexity:.2f}, dense {dense.perplexity:.2f}, ratio {ratio:.4f}")
        assert 1.0 - 2e-3 < ratio <= most, preset  # it cannot be better than dense by more than chance
        assert cache.stats()["pages"] == KiviConfig.preset(preset).pages(TOKENS)
        assert cache.nbytes == kivi_cache_bytes(preset, 30, 1, TOKENS, 3, 64, torch.float32)


def test_within_the_residual_the_tokens_are_the_same(model_and_ids) -> None:
    model, ids = model_and_ids
    prompt = ids[:, :96]
    model.set_attn_implementation("sdpa")
    expected = model.generate(prompt, max_new_tokens=32, do_sample=False)
    cache = cache_for(model, "kivi2")
    got = model.generate(prompt, max_new_tokens=32, do_sample=False, **cache_argument(cache))
    assert cache.stats()["pages"] == 0
    assert torch.equal(got, expected)
