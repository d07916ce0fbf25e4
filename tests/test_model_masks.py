"""Masks that are more than padding: the user's own, and those of models that compute with their mask."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import BloomConfig, Cache, DogeConfig, FalconConfig, PreTrainedModel

from kivi_kv import KiviConfig, KiviWarning, cache_for
from simulated_cache import varied_and_equal
from tiny_models import FALCON_ASKS, generate, left_padded, prompt, random_model, step, tiny_config, touched

UNPACKED = KiviConfig(residual_length=1024)
PACKED = KiviConfig(8, 8, residual_length=32)
PATTERN = "mask is more than causal"
OTHER, STORED = "the model's attention is not 'kivi'", "padding, if any, is stored too"


def mask_4d(padding: Tensor, hidden: int | None = None) -> Tensor:
    """[B, 1, T, T]: causal and padding; with hidden, that token sees itself and nobody else sees it."""
    T = padding.shape[1]
    mask = torch.ones(T, T, dtype=torch.bool).tril() & padding[:, None, None].bool()
    if hidden is not None:
        mask[..., hidden + 1 :, hidden] = False
    return mask


def prompt_and_step(config: KiviConfig, hidden: int | None) -> tuple[Tensor, Tensor, Any]:
    """The logits of a prompt with a 4D mask and of a token with a 2D one: of a dense cache, and ours; our cache."""
    model, inputs = touched("llama"), left_padded([180, 100])
    mask = inputs["attention_mask"]
    more = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], dim=1)
    logits = []
    for cache in (transformers.DynamicCache(config=model.config), cache_for(model, config)):
        first = step(model, inputs["input_ids"], mask_4d(mask, hidden), cache)[:, -1:]
        logits.append(torch.cat([first, step(model, prompt(1, batch=2), more, cache)], dim=1))
    return *logits, cache


@pytest.mark.parametrize("checked", [None, False])
def test_a_pattern_is_obeyed_warned_of_and_its_padding_not_stored(checked: bool | None) -> None:
    with pytest.warns(KiviWarning, match=PATTERN) as warned:
        expected, actual, cache = prompt_and_step(replace(UNPACKED, checked=checked), hidden=150)
    assert len(warned) == 1
    assert cache.stats()["unattended"] == 0
    assert cache.stats()["materializations"] == 2
    assert cache.packed_layers[0].cache.lengths == [181, 101]
    torch.testing.assert_close(expected, actual, atol=1e-3, rtol=1e-3)  # fp32 sums in another order


@pytest.mark.parametrize("config", [UNPACKED, PACKED], ids=["unpacked", "packed"])
@pytest.mark.filterwarnings("error::kivi_kv.KiviWarning")
def test_a_4d_mask_of_padding_alone_costs_nothing(config: KiviConfig) -> None:
    expected, actual, cache = prompt_and_step(config, hidden=None)
    assert cache.stats()["materializations"] == 0
    assert cache.packed_layers[0].cache.lengths == [181, 101]
    assert cache.stats()["pages"] == (0 if config is UNPACKED else 1)
    torch.testing.assert_close(expected, actual, atol=1e-3 if config is UNPACKED else 3e-2, rtol=1e-3)  # 8 bits


def test_a_pattern_in_the_middle_of_a_long_mask_is_seen() -> None:
    """Rows are looked at in blocks: each must be."""
    model, T = touched("llama"), 2100
    padding = torch.ones(1, T, dtype=torch.long)
    for hidden in (5, 1500, 2098):
        mask = mask_4d(padding, hidden)
        mask[..., hidden + 2 :, hidden] = True  # hidden from the next token only, at (hidden + 1, hidden)
        with pytest.warns(KiviWarning, match=PATTERN):
            step(model, prompt(T), mask, cache_for(model, KiviConfig(residual_length=2304)))


@pytest.mark.parametrize("hidden", [None, 30])
@pytest.mark.filterwarnings("ignore::kivi_kv.KiviWarning")
def test_one_mask_serves_all_rows(hidden: int | None) -> None:
    model, mask = touched("llama"), mask_4d(torch.ones(1, 40, dtype=torch.long), hidden)
    logits = []
    for cache in (transformers.DynamicCache(config=model.config), cache_for(model, UNPACKED)):
        first = step(model, prompt(40, batch=2), mask, cache)
        logits.append(torch.cat([first, step(model, prompt(1, batch=2), None, cache)], dim=1))
    torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)  # fp32 sums in another order


def test_a_mask_that_sees_the_future_is_obeyed() -> None:
    model, mask = touched("llama"), torch.ones(1, 1, 40, 40, dtype=torch.bool)
    cache = cache_for(model, UNPACKED)
    with pytest.warns(KiviWarning, match=PATTERN):
        actual = step(model, prompt(40), mask, cache)
    expected = step(model, prompt(40), mask, transformers.DynamicCache(config=model.config))
    torch.testing.assert_close(expected, actual, atol=1e-3, rtol=1e-3)  # fp32 sums in another order


@pytest.mark.parametrize("lengths", [[40, 40], [40, 25]], ids=str)
@pytest.mark.parametrize("hidden", [None, 30])
def test_a_step_with_a_4d_mask_may_hide_what_is_stored(lengths: list[int], hidden: int | None) -> None:
    """For that step only; one that hides no more than padding is attended packed."""
    model, inputs = touched("llama"), left_padded(lengths)
    padding = torch.cat([inputs["attention_mask"], torch.ones(2, 2, dtype=torch.long)], dim=1).bool()
    mask = padding[:, None, None, :41].clone()
    if hidden is not None:
        mask[..., hidden] = False
    logits, ours = [], cache_for(model, UNPACKED)
    for cache in (transformers.DynamicCache(config=model.config), ours):
        step(model, inputs["input_ids"], inputs["attention_mask"], cache)
        warned = cache is ours and hidden is not None
        with pytest.warns(KiviWarning, match=PATTERN) if warned else nullcontext():
            first = step(model, prompt(1, batch=2), mask, cache)
        logits.append(torch.cat([first, step(model, prompt(1, 1, batch=2), padding, cache)], dim=1))
    torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)  # fp32 sums in another order
    assert ours.stats()["materializations"] == (0 if hidden is None else 2)
    assert ours.packed_layers[0].cache.lengths == [42, lengths[1] + 2]


@pytest.mark.parametrize("shape", [(1, 59), (1, 1, 1, 59), (1, 1, 1, 62)], ids=str)
@pytest.mark.filterwarnings("ignore::kivi_kv.KiviWarning")
def test_a_mask_of_other_tokens_than_the_cache_has_is_refused(shape: tuple[int, ...]) -> None:
    model = touched("llama")
    cache = cache_for(model, UNPACKED)
    step(model, prompt(60), None, cache)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[..., 20] = False
    with pytest.raises(ValueError, match="attention_mask: expected "):
        step(model, prompt(1), mask, cache)


def falcon(**fields: Any) -> FalconConfig:
    return tiny_config(FalconConfig, new_decoder_architecture=True, num_kv_heads=2, **fields)


OWN = [
    pytest.param(lambda: tiny_config(BloomConfig), {OTHER, STORED}, id="bloom"),
    pytest.param(lambda: falcon(alibi=True), {PATTERN} if FALCON_ASKS else {OTHER, STORED}, id="falcon, alibi"),
    pytest.param(falcon, set() if FALCON_ASKS else {OTHER, STORED}, id="falcon"),
]
if FALCON_ASKS:  # doge chooses by the values of all tokens, which it reads; before 5.25 it fails with any padding
    OWN += [
        pytest.param(lambda: tiny_config(DogeConfig, keep_window_size=100), {OTHER}, id="doge, some"),
        pytest.param(lambda: tiny_config(DogeConfig, keep_window_size=2048), {OTHER}, id="doge, all"),
    ]


@pytest.mark.parametrize("lengths", [[150, 90], [300]], ids=str)
@pytest.mark.parametrize(("config", "said"), OWN)
def test_models_with_masks_or_attention_of_their_own_are_right(
    config: Callable[[], Any], said: set[str], lengths: list[int]
) -> None:
    def sample(model: PreTrainedModel, cache: Cache | None = None) -> Tensor:
        torch.manual_seed(3)  # greedily, these repeat themselves
        return generate(model, left_padded(lengths), cache, do_sample=True)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = random_model(config())
        cache = cache_for(model, UNPACKED)
        actual = sample(model, cache)
    messages = [str(w.message) for w in warned if issubclass(w.category, KiviWarning)]
    assert len(messages) == len(said), messages
    assert all(any(text in message for message in messages) for text in said), messages
    assert bool(cache.stats()["materializations"]) == bool(said)
    varied_and_equal(actual, sample(random_model(config())))
