"""LayerCache.append: what is stored does not depend on chunks or neighbours."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from caching import (
    SEEDS,
    assert_holds,
    assert_same_row,
    configs,
    every_dtype,
    filled,
    quick,
    tokens,
)
from kivi_kv import KiviConfig, LayerCache, kivi_cache_bytes
from kivi_kv.config import PAGE
from oracle import DTYPES, assert_bitwise_equal, randn

# --- chunks ---


@quick
@given(
    config=configs,
    chunks=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    D=st.sampled_from([16, 20, 80]),
    dtype=st.sampled_from(DTYPES),
    seed=SEEDS,
)
def test_chunks_do_not_matter(config, chunks, D, dtype, seed):
    """Any chunks give the page words, scales, zeros and dense tokens of one append."""
    k, v = tokens(2, sum(chunks), D, dtype=dtype, seed=seed)
    whole = filled(config, k, v)
    parts = filled(config, k, v, chunks, max_tokens=sum(chunks))
    for row in range(2):
        assert_same_row(parts, row, whole, row)
    assert_holds(whole, k, v)


@pytest.mark.parametrize(("residual", "sinks"), [(0, 0), (1, 3), (128, 4), (200, 8)])
def test_token_by_token_equals_one_append(residual, sinks):
    """Besides, each page is written once: its words are the same after every later token."""
    config = KiviConfig(k_bits=2, v_bits=4, residual_length=residual, sink_length=sinks)
    T = residual + sinks + 3 * PAGE + 5
    k, v = tokens(1, T)
    cache, pages = LayerCache(config, 1, 2, 16), []
    for t in range(T):
        cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        assert cache.packed == [config.pages(t + 1)]
        words = cache.storage.pool[cache.storage.table[0, : cache.packed[0]]]
        pages += list(words[len(pages) :].clone())
        if pages:
            assert torch.equal(words, torch.stack(pages)), f"a page changed at token {t}"
    assert len(pages) == 3
    assert_same_row(cache, 0, filled(config, k, v), 0)


@every_dtype
@pytest.mark.parametrize("T", [1, 39, 40, 41, 127, 128, 129, 120, 168, 169, 255, 257, 297, 511, 1001])
@pytest.mark.parametrize("sinks", [0, 5])
def test_prompts_of_every_awkward_length(T, sinks, dtype):
    """Around the residual of 40, around a page, three residuals, odd: the state after each."""
    config = KiviConfig(k_bits=4, v_bits=2, residual_length=40, sink_length=sinks)
    k, v = tokens(2, T, 80, dtype=dtype, seed=T)
    assert_holds(filled(config, k, v), k, v)


@every_dtype
def test_up_to_the_residual_everything_is_exact(dtype):
    for T in (1, 64, 127, 128, 256):
        k, v = tokens(2, T, 80, dtype=dtype, seed=T)
        cache = filled(KiviConfig(), k, v)
        assert cache.packed == [0, 0]
        assert_bitwise_equal(cache.dequantize()[0], k)
        assert_bitwise_equal(cache.dequantize()[1], v)


def test_decoded_tokens_are_quantized_and_billed_as_such():
    """32 prompt tokens and 400 decoded ones: decoded keys carry a quantization error, and bytes are as promised."""
    config, T = KiviConfig(residual_length=32), 432
    k, v = tokens(1, T, 64)
    cache = filled(config, k, v, [32] + [1] * 400, max_tokens=T)
    assert cache.packed == [3]
    for stored, x in zip(cache.dequantize(), (k, v), strict=True):
        error = (stored.float() - x.float()).abs().amax((0, 1, 3))
        assert (error[32 : 3 * PAGE] > 0).all(), "a packed token without any error was not quantized"
        assert not error[3 * PAGE :].any()
    assert cache.nbytes == kivi_cache_bytes(config, 1, 1, T, 2, 64)
    # 3 pages of 2-bit codes at 3 bits per element, and 48 dense tokens
    assert cache.storage.used_nbytes == 2 * 2 * 64 * (3 * PAGE * 3 + 48 * 16) // 8


# --- rows ---


@quick
@given(data=st.data(), config=configs, D=st.sampled_from([16, 20]), seed=SEEDS)
def test_a_row_stores_what_it_would_store_alone(data, config, D, seed):
    """Bit for bit, whatever its neighbours hold: left and right padding, holes, rows of padding only."""
    chunks = data.draw(st.lists(st.integers(1, 250), min_size=1, max_size=4), "chunks")
    cache, alone = LayerCache(config, 3, 2, D), [LayerCache(config, 1, 2, D) for _ in range(3)]
    for i, M in enumerate(chunks):
        k, v = tokens(3, M, D, seed=seed + i)
        k[1] *= 100
        valid = torch.ones(3, M, dtype=torch.bool)
        for row in range(3):
            kind = data.draw(st.sampled_from(["all", "left", "right", "holes", "none"]), "padding")
            pad = data.draw(st.integers(0, M), "padded")
            valid[row, {"left": slice(0, pad), "right": slice(M - pad, M)}.get(kind, slice(0))] = False
            if kind == "holes":
                valid[row] = randn(M, seed=seed + row) > 0
            if kind == "none":
                valid[row] = False
        cache.append(k, v, valid)
        for row, one in enumerate(alone):
            keep = valid[row]
            one.append(k[row : row + 1, :, keep], v[row : row + 1, :, keep])
    for row, one in enumerate(alone):
        assert_same_row(cache, row, one, 0)


def test_rows_of_one_length_equal_rows_alone():
    config = KiviConfig(residual_length=0)
    k, v = tokens(3, 300)
    k[0], v[0] = 60_000, -60_000
    cache = filled(config, k, v)
    for row in range(3):
        assert_same_row(cache, row, filled(config, k[row : row + 1], v[row : row + 1]), 0)


def test_dequantize_is_zero_behind_shorter_rows():
    k, v = tokens(3, 200)
    valid = torch.arange(200) < torch.tensor([[200], [0], [150]])
    cache = LayerCache(KiviConfig(residual_length=0), 3, 2, 16)
    cache.append(k, v, valid)
    assert cache.lengths == [200, 0, 150]
    for x in cache.dequantize():
        assert not x[1].any()
        assert not x[2, :, 150:].any()
        assert x[2, :, 149].any()


# --- values ---


@every_dtype
def test_constant_channels_and_rows_are_exact(dtype):
    """A constant key channel, a constant value token and zeros come back bit for bit, and harm no neighbour."""
    k, v = tokens(1, 300, 64, dtype=dtype)
    k[..., 5], v[:, :, 7] = 900, -31.25
    k[..., 6], v[:, :, 8] = 0, 0
    cache = filled(KiviConfig(residual_length=0), k, v)
    got_k, got_v = cache.dequantize()
    assert_bitwise_equal(got_k[..., 5:7], k[..., 5:7])
    assert_bitwise_equal(got_v[:, :, 7:9], v[:, :, 7:9])
    assert_holds(cache, k, v)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_unchecked_bad_values_stay_in_their_group(bad):
    k, v = tokens(1, 300, 64)
    clean = filled(KiviConfig(residual_length=0), k, v).dequantize()
    k[0, 0, 40, 3] = v[0, 1, 50, 40] = bad
    got_k, got_v = filled(KiviConfig(residual_length=0, checked=False), k, v).dequantize()
    inside_k, inside_v = (torch.zeros(1, 2, 300, 64, dtype=torch.bool) for _ in range(2))
    inside_k[0, 0, 32:64, 3] = inside_v[0, 1, 50, 32:64] = True
    for got, expected, inside in ((got_k, clean[0], inside_k), (got_v, clean[1], inside_v)):
        assert_bitwise_equal(got[~inside], expected[~inside])
        assert not got[inside].isfinite().all() or not torch.equal(got[inside], expected[inside])
