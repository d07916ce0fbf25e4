"""Every kind of model and every way of generating on a GPU, in fp16, through the kernels.

Kernels and the reference round differently, and in fp16 that decides some tokens of a random model. So logits are
compared over the same tokens, and whole texts only as far as they must agree.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kivi_kv import KiviCache, KiviConfig, cache_for
from kivi_kv.integrations.transformers.compat import cache_argument
from test_generation import MAY_RAISE, MODES
from tiny_models import NEW, PACKABLE, generate, left_padded, make_model

pytestmark = pytest.mark.gpu
CONFIG = KiviConfig(4, 4, 32, residual_length=32)
LENGTHS = [290, 158, 40]
ROUTED = ("qwen3_moe", "mixtral", "gpt_oss")


@cache
def on_gpu(family: str) -> PreTrainedModel:
    return make_model(family).half().cuda()


def logits(family: str, tokens: Tensor, backend: str, max_tokens: int | None) -> tuple[Tensor, KiviCache]:
    """Those of NEW steps after a padded batch of prompts, the tokens [B, NEW] being given."""
    model, inputs = on_gpu(family), {name: x.cuda() for name, x in left_padded(LENGTHS).items()}
    store = cache_for(model, CONFIG, max_tokens, backend)
    mask = torch.cat([inputs["attention_mask"], inputs["attention_mask"].new_ones(len(LENGTHS), NEW)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found, n = [], max(LENGTHS)
    with torch.no_grad():
        for i in range(NEW):
            ids = inputs["input_ids"] if i == 0 else tokens[:, i - 1 : i]
            now = slice(0, n) if i == 0 else slice(n + i - 1, n + i)
            options: dict[str, Any] = {"attention_mask": mask[:, : n + i], "position_ids": positions[:, now]}
            found.append(model(ids, **options, **cache_argument(store)).logits[:, -1].double())
    return torch.stack(found, dim=1), store


@pytest.mark.parametrize("max_tokens", [None, 320], ids=["growing", "fixed"])
@pytest.mark.parametrize("family", PACKABLE)
def test_logits_are_those_of_the_reference(family: str, max_tokens: int | None) -> None:
    """With storage of a fixed size steps are counted on the device, by other code: the reference has none of it."""
    tokens = torch.randint(1, 99, (len(LENGTHS), NEW)).cuda()
    expected, _ = logits(family, tokens, "reference", None)
    actual, store = logits(family, tokens, "triton", max_tokens)
    # fp16 through a few layers of weights that amplify
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() < 1e-2, error
    assert family in ROUTED or error.max() < 2e-2, error  # there rounding may choose another expert for a token
    stats = store.stats()
    assert stats["backends"] == {"quantize": "triton", "attend": "triton"}
    assert stats["attend_calls"]["triton"] >= (NEW - 1) * stats["packed_layers"]
    assert (stats["materializations"], stats["unattended"]) == (0, 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", PACKABLE)
def test_every_way_of_generating(family: str, mode: str) -> None:
    model, caches = on_gpu(family), []

    def run(backend: str | None) -> Tensor:
        def make(pads: list[int]) -> KiviCache:
            caches.append(cache_for(model, CONFIG, backend=backend))
            return caches[-1]

        return MODES[mode](model, family, make)

    try:
        actual = run(None)
    except RuntimeError:
        assert (family, mode) in MAY_RAISE
        return
    expected = run("reference")
    assert actual.shape == expected.shape
    if not mode.startswith("multi_turn"):  # where one token that differs changes the next turn
        new = actual[:, -NEW:] == expected[:, -NEW:]
        assert new[:, 0].all()
        assert new.float().mean() > 0.25, "a text that differs does so from one token on"
    for store in caches:
        stats = store.stats()
        assert (stats["materializations"], stats["unattended"]) == (0, 0)
        assert mode == "prefix_copied" or stats["attend_calls"], "a copy of the cache attends there"


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "olmo2"])
def test_generate_compiles_and_captures(family: str) -> None:
    """Without a graph break, with CUDA graphs, and with the tokens of the same steps one by one."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model, inputs, n = on_gpu(family), left_padded([200, 40]), 200
    plain, compiled, again = (cache_for(model, CONFIG, max_tokens=600) for _ in range(3))
    expected = generate(model, inputs, plain, max_new_tokens=150, disable_compile=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    for store in (compiled, again):
        actual = generate(model, inputs, store, max_new_tokens=150)
        assert (actual == expected)[:, : n + 30].float().mean() > 0.9
        assert store.get_seq_length() == n + 149
        assert store.stats()["attend_calls"] == plain.stats()["attend_calls"]
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not counters["inductor"]["cudagraph_skips"]
