"""KiviConfig: what it refuses, what it names, and which pages it says are packed."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi_kv import KiviConfig, kivi_cache_bytes
from kivi_kv.config import PAGE

NOT_INTS = (2.0, "2", None, True, [2])
SINKS = (0, 1, 4, 127, 128, 129, 1024)
RESIDUALS = (0, 1, 31, 32, 127, 128, 129, 200, 512)


def packed_by_hand(sinks: int, residual: int):
    """Yield the packed pages after 0, 1, 2 ... tokens, by moving tokens about one at a time.

    A new token goes to the sinks while they have room, else to the dense part. When that holds a page more than
    the residual even without the new token, its oldest 128 tokens become a page.
    """
    in_sinks = dense = pages = 0
    while True:
        yield pages
        if in_sinks < sinks:
            in_sinks += 1
            continue
        dense += 1
        if dense - 1 == residual + PAGE:
            dense -= PAGE
            pages += 1


def refused(**fields) -> str:
    with pytest.raises(ValueError, match=f"^{next(iter(fields))}: ") as error:
        KiviConfig(**fields)
    return str(error.value)


# --- fields ---


def test_defaults_are_the_papers_two_bits():
    config = KiviConfig()
    assert (config.k_bits, config.v_bits, config.group_size) == (2, 2, 32)
    assert (config.residual_length, config.sink_length, config.checked) == (128, 0, None)


@pytest.mark.parametrize("name", ["k_bits", "v_bits"])
@pytest.mark.parametrize("bits", [-2, 0, 1, 3, 5, 6, 7, 16, *NOT_INTS])
def test_other_bit_widths_are_refused(name, bits):
    assert refused(**{name: bits}) == f"{name}: expected one of 2, 4, 8, got {bits!r}"


@pytest.mark.parametrize("size", [-32, 0, 1, 16, 33, 48, 256, 32.0, "32", None, True])
def test_other_group_sizes_are_refused(size):
    assert refused(group_size=size) == f"group_size: expected one of 32, 64, 128, got {size!r}"


@pytest.mark.parametrize("length", [-1, -128, *NOT_INTS])
def test_a_bad_residual_length_is_refused(length):
    assert refused(residual_length=length) == f"residual_length: expected an int at least 0, got {length!r}"


@pytest.mark.parametrize("length", [-1, 1025, *NOT_INTS])
def test_a_bad_sink_length_is_refused(length):
    assert refused(sink_length=length) == f"sink_length: expected an int from 0 to 1024, got {length!r}"


@pytest.mark.parametrize("checked", ["yes", 2, [True]])
def test_a_bad_checked_is_refused(checked):
    assert refused(checked=checked) == f"checked: expected True, False or None, got {checked!r}"


@pytest.mark.parametrize("k_bits", [2, 4, 8])
@pytest.mark.parametrize("v_bits", [2, 4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_every_documented_combination_is_accepted(k_bits, v_bits, group_size):
    for residual, sinks, checked in [(0, 0, None), (1, 1024, True), (4096, 3, False)]:
        KiviConfig(k_bits, v_bits, group_size, residual, sinks, checked)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(KiviConfig)])
def test_frozen(name):
    config = KiviConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, getattr(config, name))


def test_a_changed_copy_is_checked_too():
    assert dataclasses.replace(KiviConfig(), k_bits=4) == KiviConfig(k_bits=4)
    with pytest.raises(ValueError, match=r"^v_bits: expected one of 2, 4, 8, got 3$"):
        dataclasses.replace(KiviConfig(), v_bits=3)


def test_equal_fields_make_equal_keys():
    assert KiviConfig(k_bits=4) == KiviConfig(k_bits=4) != KiviConfig()
    assert len({KiviConfig(), KiviConfig(k_bits=2), KiviConfig(sink_length=4)}) == 2


# --- presets ---


@pytest.mark.parametrize(("name", "bits"), [("kivi2", 2), ("kivi4", 4)])
def test_presets(name, bits):
    assert KiviConfig.preset(name) == KiviConfig.of(name) == KiviConfig(k_bits=bits, v_bits=bits)


@pytest.mark.parametrize("name", ["kivi3", "", "KIVI2", "kivi2 "])
def test_an_unknown_preset_lists_those_that_exist(name):
    for find in (KiviConfig.preset, KiviConfig.of):
        with pytest.raises(
            ValueError,
            match=rf"^preset: expected one of kivi2, kivi4, lean, balanced, near-lossless, got '{name}'$",
        ):
            find(name)


def test_of_returns_a_config_as_it_is():
    config = KiviConfig(sink_length=4)
    assert KiviConfig.of(config) is config


@pytest.mark.parametrize(("value", "kind"), [(None, "NoneType"), (2, "int"), ({"k_bits": 2}, "dict")])
def test_of_refuses_anything_else(value, kind):
    with pytest.raises(ValueError, match=rf"^config: expected a KiviConfig or a preset's name, got {kind}$"):
        KiviConfig.of(value)


# --- pages ---


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("sinks", SINKS)
def test_pages_are_those_packed_by_hand(sinks, residual):
    config = KiviConfig(residual_length=residual, sink_length=sinks)
    for tokens, pages in zip(range(sinks + residual + 5 * PAGE), packed_by_hand(sinks, residual), strict=False):
        assert config.pages(tokens) == pages, tokens


@given(sinks=st.integers(0, 1024), residual=st.integers(0, 10_000), tokens=st.integers(0, 2**40))
def test_the_dense_part_holds_the_residual_and_at_most_a_page_more(sinks, residual, tokens):
    """What is not packed fits the ring, and nothing is packed before the sinks and the ring are full."""
    config = KiviConfig(residual_length=residual, sink_length=sinks)
    pages = config.pages(tokens)
    dense = tokens - sinks - pages * PAGE
    assert config.ring_length == residual + PAGE
    assert dense <= config.ring_length
    assert (dense > residual) if pages else (tokens <= sinks + config.ring_length)


@pytest.mark.parametrize(("sinks", "residual"), [(0, 0), (0, 128), (4, 128), (8, 33)])
def test_pages_at_the_boundaries(sinks, residual):
    config = KiviConfig(residual_length=residual, sink_length=sinks)
    for page in (1, 2, 1000):
        full = sinks + residual + page * PAGE
        assert [config.pages(n) for n in (full, full + 1)] == [page - 1, page]
    assert config.pages(0) == 0


def test_layers_may_have_bits_of_their_own():
    config = KiviConfig(layer_bits=((0, 4, 8), (3, 8, 2)), sink_length=5)
    assert config.for_layer(0) == KiviConfig(4, 8, sink_length=5)
    assert config.for_layer(1) == KiviConfig(2, 2, sink_length=5)
    assert config.for_layer(3) == KiviConfig(8, 2, sink_length=5)


@pytest.mark.parametrize(
    ("layer_bits", "message"),
    [
        ([(0, 4, 4)], r"^layer_bits: expected a tuple"),
        (((0, 4),), r"^layer_bits: expected entries"),
        (((-1, 4, 4),), r"^layer_bits: layer: expected an int at least 0, got -1"),
        (((0, 3, 4),), r"^layer_bits: k_bits: expected one of 2, 4, 8, got 3"),
        (((0, 4, 1),), r"^layer_bits: v_bits: expected one of 2, 4, 8, got 1"),
        (((0, 4, 4), (0, 2, 2)), r"^layer_bits: expected each layer once"),
    ],
)
def test_bad_layer_bits_are_refused(layer_bits, message):
    with pytest.raises(ValueError, match=message):
        KiviConfig(layer_bits=layer_bits)


@pytest.mark.parametrize(("name", "budget"), [("lean", 2.6), ("balanced", 3.3), ("near-lossless", 5.1)])
def test_presets_keep_their_budget(name, budget):
    """Bits per element of a 128-wide head, everything included, once the context is long enough to show it."""
    bits = 8 * kivi_cache_bytes(name, 32, 1, 131072, 8, 128) / (2 * 32 * 131072 * 8 * 128)
    assert bits <= budget
