"""generate() over every kind of model and every way of generating: the packed cache must not change a token.

With a residual longer than the text nothing is packed, and tokens are those of the untouched model with its own
cache. With packed pages, they are those of the untouched model over a dense cache of the dequantized values.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from kivi_kv import KiviCache, KiviConfig
from kivi_kv.integrations.transformers.compat import cache_argument
from simulated_cache import SimulatedCache, equal_tokens, repeat_pads
from tiny_models import (
    FAMILIES,
    NEW,
    PACKABLE,
    SLIDING,
    cache_of,
    generate,
    left_padded,
    make_model,
    prompt,
    touched,
    untouched,
)

MakeCache = Callable[[list[int]], Cache]  # from the padding of each row
Mode = Callable[[PreTrainedModel, str, MakeCache], Tensor]
Outcome = Tensor | type[Exception]

UNPACKED = KiviConfig(residual_length=1024)
PACKED = KiviConfig(residual_length=32)  # the first page is packed at 161 tokens, the second at 289
SINKS = KiviConfig(k_bits=4, v_bits=8, group_size=64, residual_length=17, sink_length=4)


def prefill(model: PreTrainedModel, ids: Tensor, cache: Cache) -> None:
    with torch.no_grad():
        model(ids.to(model.device), **cache_argument(cache), use_cache=True)


def plain(length: int, **options: Any) -> Mode:
    """One prompt; options are generate()'s."""
    rows = options.get("num_beams", options.get("num_return_sequences", 1))

    def generate_plain(model: PreTrainedModel, family: str, make: MakeCache) -> Tensor:
        torch.manual_seed(11)
        return generate(model, prompt(length), make([0] * rows), **options)

    return generate_plain


def padded(lengths: list[int], **options: Any) -> Mode:
    """Prompts of different lengths in one batch."""
    pads = repeat_pads([max(lengths) - length for length in lengths], options.get("num_beams", 1))

    def generate_padded(model: PreTrainedModel, family: str, make: MakeCache) -> Tensor:
        return generate(model, left_padded(lengths), make(pads), **options)

    return generate_padded


def assistant(family: str, seed: int, like: PreTrainedModel) -> PreTrainedModel:
    model = make_model(family, seed).to(device=like.device, dtype=like.dtype)
    model.generation_config.num_assistant_tokens = 6
    model.generation_config.assistant_confidence_threshold = 0.0  # always draft that many
    return model


def assisted_by_another(model: PreTrainedModel, family: str, make: MakeCache) -> Tensor:
    return generate(model, prompt(150), make([0]), assistant_model=assistant("llama", 7, model))


def assisted_by_itself(model: PreTrainedModel, family: str, make: MakeCache) -> Tensor:
    return generate(model, prompt(150), make([0]), assistant_model=assistant(family, 0, model))


def multi_turn(model: PreTrainedModel, family: str, make: MakeCache) -> Tensor:
    """Three questions on one cache, each time passing all ids so far."""
    cache, ids = make([0]), prompt(120)
    for turn in range(3):
        ids = generate(model, torch.cat([ids, prompt(30 + turn, seed=turn)], dim=1), cache)
    return ids


def multi_turn_padded(model: PreTrainedModel, family: str, make: MakeCache) -> Tensor:
    inputs, cache = left_padded([140, 60]), make([0, 80])
    for turn in range(3):
        ids = generate(model, inputs, cache)
        ids = torch.cat([ids, prompt(20 + turn, seed=turn, batch=2)], dim=1)
        mask = inputs["attention_mask"]
        inputs = {"input_ids": ids, "attention_mask": torch.cat([mask, mask.new_ones(2, NEW + 20 + turn)], dim=1)}
    return ids


def prefix_copied(model: PreTrainedModel, family: str, make: MakeCache) -> Tensor:
    """Two continuations of a prefix that was prefilled once, each on a copy of its cache."""
    cache, prefix = make([0]), prompt(200)
    prefill(model, prefix, cache)
    ids = [torch.cat([prefix, prompt(80, seed=seed)], dim=1) for seed in (1, 2)]
    return torch.cat([generate(model, x, copy.deepcopy(cache)) for x in ids])


def prefix_cropped(model: PreTrainedModel, family: str, make: MakeCache) -> Tensor:
    """Two continuations of a prefix on one cache, cropped in between: the cut is within a packed page."""
    cache, prefix = make([0]), prompt(200)
    prefill(model, prefix, cache)
    outs = []
    for seed in (1, 2):
        outs.append(generate(model, torch.cat([prefix, prompt(80, seed=seed)], dim=1), cache))
        cache.crop(200 - cache.get_seq_length())
    return torch.cat(outs)


def inputs_embeds(model: PreTrainedModel, family: str, make: MakeCache) -> Tensor:
    embeds = model.get_input_embeddings()(prompt(150).to(model.device)).detach()
    mask = torch.ones(1, 150, dtype=torch.long)
    return generate(model, {"inputs_embeds": embeds, "attention_mask": mask}, make([0]))


MODES: dict[str, Mode] = {
    "greedy": plain(280),
    "greedy_short": plain(150),
    "sampling": plain(280, do_sample=True, temperature=0.9, top_k=20),
    "sampling_returns": plain(150, do_sample=True, num_return_sequences=2),
    "beam": plain(280, num_beams=3),
    "beam_returns": plain(150, num_beams=3, num_return_sequences=3),
    "padded": padded([290, 158, 40]),
    "padded_beam": padded([290, 150], num_beams=3),
    "assisted_by_another": assisted_by_another,
    "assisted_by_itself": assisted_by_itself,
    "prompt_lookup": plain(280, prompt_lookup_num_tokens=5, max_matching_ngram_size=1),
    "chunked": plain(280, prefill_chunk_size=77),
    "chunked_padded": padded([290, 158, 40], prefill_chunk_size=77),
    "multi_turn": multi_turn,
    "multi_turn_padded": multi_turn_padded,
    "prefix_copied": prefix_copied,
    "prefix_cropped": prefix_cropped,
    "inputs_embeds": inputs_embeds,
}
QUICK = ("greedy", "padded", "beam", "assisted_by_another")
# what some versions of transformers cannot do with sliding layers, whatever the cache
MAY_RAISE = {(family, mode) for family in SLIDING for mode in ("prefix_cropped", "assisted_by_itself")}
CASES = [
    pytest.param(family, mode, id=f"{family}-{mode}", marks=[pytest.mark.quick] if mode in QUICK else [])
    for family in FAMILIES
    for mode in MODES
]


def run(mode: str, model: PreTrainedModel, family: str, make: MakeCache) -> Outcome:
    """Tokens, or the type of the error where transformers itself may raise one."""
    if (family, mode) not in MAY_RAISE:
        return MODES[mode](model, family, make)
    try:
        return MODES[mode](model, family, make)
    except RuntimeError as error:
        return type(error)


def check_equal(actual: Outcome, expected: Outcome) -> None:
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        equal_tokens(actual, expected)
    else:
        assert actual is expected


class KiviRun:
    """Makes the packed cache of one run and keeps it for questions."""

    def __init__(self, family: str, config: KiviConfig) -> None:
        self.family, self.config = family, config
        self.cache: KiviCache

    def make(self, pads: list[int]) -> KiviCache:
        self.cache = cache_of(self.family, self.config)
        return self.cache

    def outcome(self, mode: str) -> Outcome:
        outcome = run(mode, touched(self.family), self.family, self.make)
        stats = self.cache.stats()
        assert (stats["materializations"], stats["unattended"]) == (0, 0)
        return outcome


class SimulatedRun:
    """The same over the simulated cache, with the model that never met cache_for."""

    def __init__(self, family: str, config: KiviConfig) -> None:
        self.family, self.config = family, config
        self.cache: SimulatedCache

    def make(self, pads: list[int]) -> SimulatedCache:
        self.cache = SimulatedCache(untouched(self.family).config, self.config, pads)
        return self.cache

    def outcome(self, mode: str) -> Outcome:
        return run(mode, untouched(self.family), self.family, self.make)


def check_packed(family: str, mode: str, config: KiviConfig) -> None:
    simulated, kivi = SimulatedRun(family, config), KiviRun(family, config)
    expected, actual = simulated.outcome(mode), kivi.outcome(mode)
    pages = kivi.cache.stats()["pages"]
    assert pages == simulated.cache.pages
    if isinstance(actual, Tensor):
        assert (pages > 0) == (family in PACKABLE)
    check_equal(actual, expected)


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_nothing_packed_gives_the_tokens_of_the_models_own_cache(family: str, mode: str) -> None:
    model = untouched(family)
    expected = run(mode, model, family, lambda pads: DynamicCache(config=model.config))
    kivi = KiviRun(family, UNPACKED)
    check_equal(kivi.outcome(mode), expected)
    assert kivi.cache.stats()["pages"] == 0


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_packed_pages_give_the_tokens_of_their_dequantized_values(family: str, mode: str) -> None:
    check_packed(family, mode, PACKED)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in QUICK])
def test_sinks_and_other_widths_give_the_tokens_of_their_dequantized_values(mode: str) -> None:
    check_packed("qwen2", mode, SINKS)


@pytest.mark.quick
@pytest.mark.parametrize("family", PACKABLE)
@pytest.mark.parametrize("mode", QUICK)
def test_sinks_on_every_model(family: str, mode: str) -> None:
    check_packed(family, mode, SINKS)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_say_varied_things(family: str) -> None:
    """Equal tokens mean little when a model repeats one of them."""
    model = untouched(family)
    ids = generate(model, prompt(280), DynamicCache(config=model.config), max_new_tokens=40)
    assert len(set(ids[0, 280:].tolist())) >= 8


@pytest.mark.parametrize("family", PACKABLE)
def test_two_bits_change_the_tokens_of_a_random_model(family: str) -> None:
    """So the reference of dequantized values, not the dense one, is what packed runs agree with."""
    model = untouched(family)
    dense = generate(model, prompt(280), DynamicCache(config=model.config))
    packed = KiviRun(family, PACKED).outcome("greedy")
    assert isinstance(packed, Tensor)
    assert not torch.equal(packed, dense)
