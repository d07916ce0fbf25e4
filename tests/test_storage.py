"""Bytes promised equal bytes allocated, growth is gradual, and pages hold what the plain quantizers give."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kivi_kv import KiviConfig, LayerCache, fake_quantize, kivi_cache_bytes, kv_cache_bytes, reference, unpack
from kivi_kv.config import PAGE
from kivi_kv.format import PageLayout, decode_pages, from_pages, quantize, to_pages
from oracle import DTYPES, assert_bitwise_equal, sample

BITS = st.sampled_from([2, 4, 8])
GROUPS = (32, 64, 128)
GIB = 2**30

configs = st.builds(
    KiviConfig,
    k_bits=BITS,
    v_bits=BITS,
    group_size=st.sampled_from(GROUPS),
    residual_length=st.integers(0, 300),
    sink_length=st.integers(0, 40),
)


def tensor_bytes(cache: LayerCache) -> int:
    s = cache.storage
    parts = (s.pool, s.table, s.lengths, s.packed, s.dense_k, s.dense_v)
    assert set(map(id, parts)) == set(map(id, s.tensors().values()))
    return sum(x.numel() * x.element_size() for x in parts)


def new_tokens(cache: LayerCache, tokens: int) -> torch.Tensor:
    B, H, _, D = cache.storage.dense_k.shape
    return torch.randn(B, H, tokens, D).to(cache.storage.dense_k.dtype)


def bytes_by_hand(config: KiviConfig, B: int, T: int, H: int, D: int, dtype: torch.dtype) -> int:
    """Codes, scales and zeros of D padded to 16; sinks, residual and a page dense, or T if fewer; two lengths."""
    padded, groups, width = -(-D // 16) * 16, -(-D // config.group_size), dtype.itemsize
    codes = PAGE * padded * (config.k_bits + config.v_bits) // 8
    params = 2 * width * PAGE * padded // config.group_size + 2 * width * PAGE * groups
    dense = 2 * width * D * min(T, config.sink_length + config.residual_length + PAGE)
    return B * (H * (config.pages(T) * (codes + params) + dense) + 4 * config.pages(T) + 2 * 4)


# --- byte formulas ---


@settings(deadline=None)
@given(
    config=configs,
    B=st.integers(1, 3),
    T=st.integers(1, 900),
    H=st.integers(1, 3),
    D=st.sampled_from([16, 20, 33, 64, 80, 96, 112, 128, 256]),
    dtype=st.sampled_from(DTYPES),
)
def test_promised_bytes_are_allocated_bytes(config, B, T, H, D, dtype):
    cache = LayerCache(config, B, H, D, dtype, max_tokens=T)
    assert cache.nbytes == tensor_bytes(cache) == kivi_cache_bytes(config, 1, B, T, H, D, dtype)
    assert cache.nbytes == bytes_by_hand(config, B, T, H, D, dtype)
    assert kivi_cache_bytes(config, 7, B, T, H, D, dtype) == 7 * cache.nbytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [20, 80, 96, 112, 256])
def test_a_full_cache_still_has_the_promised_bytes(D, dtype):
    config, T = KiviConfig(k_bits=4, v_bits=2, residual_length=40, sink_length=3), 700
    cache = LayerCache(config, 2, 2, D, dtype, max_tokens=T)
    before = {name: x.data_ptr() for name, x in cache.storage.tensors().items()}
    for chunk in (1, 300, 57, 1, T - 359):
        x = new_tokens(cache, chunk)
        cache.append(x, x)
    assert cache.lengths == [T, T]
    assert cache.nbytes == kivi_cache_bytes(config, 1, 2, T, 2, D, dtype)
    assert {name: x.data_ptr() for name, x in cache.storage.tensors().items()} == before
    held = cache.packed[0] * cache.storage.layout.words * 4
    dense = (T - cache.packed[0] * PAGE) * 2 * D * dtype.itemsize
    assert cache.storage.used_nbytes == 2 * 2 * (held + dense) <= cache.nbytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize(("k_bits", "v_bits"), [(2, 2), (4, 4), (8, 8), (4, 2), (2, 8)])
def test_a_page_costs_its_bits_and_a_scale_and_zero_per_group(k_bits, v_bits, group_size, dtype):
    """128 more tokens add b + 2 x (bits of the dtype) / G bits per element, and one table entry."""
    config = KiviConfig(k_bits, v_bits, group_size)
    more, fewer = (kivi_cache_bytes(config, 1, 1, n, 8, 128, dtype) for n in (2**20 + PAGE, 2**20))
    bits = (k_bits + v_bits) / 2 + 16 * dtype.itemsize / group_size
    assert more - fewer == 2 * PAGE * 8 * 128 * bits / 8 + 4


@pytest.mark.parametrize(("preset", "bits"), [("kivi2", 3.0), ("kivi4", 5.0)])
@pytest.mark.parametrize("tokens", [32_768, 131_072, 1_048_576])
def test_effective_bits_at_long_context(preset, bits, tokens):
    total = kivi_cache_bytes(preset, 32, 1, tokens, 8, 128)
    actual = 8 * total / (kv_cache_bytes(32, 1, tokens, 8, 128) // 2)
    # at most 256 rows are dense, 16 - bits more each; a table entry of 4 bytes per page is below 0.001
    assert bits < actual < bits + 256 / tokens * (16 - bits) + 0.001
    assert actual < 1.04 * bits


def test_dense_bytes_of_published_examples():
    assert kv_cache_bytes(118, 512, 2048, 48, 128) == 3_040_836_845_568
    assert kv_cache_bytes(32, 1, 131_072, 8, 128) == 16 * GIB
    assert kv_cache_bytes(32, 1, 1, 8, 128) == 128 * 1024
    assert kv_cache_bytes(32, 1, 131_072, 8, 128, 4) == 32 * GIB
    assert kv_cache_bytes(32, 1, 131_072, 8, 128, 0.5) == 4 * GIB


@pytest.mark.parametrize("name", ["layers", "batch", "tokens", "kv_heads", "head_dim", "bytes_per_element"])
def test_negative_sizes_are_refused(name):
    sizes = {"layers": 1, "batch": 1, "tokens": 1, "kv_heads": 1, "head_dim": 64, "bytes_per_element": 2}
    with pytest.raises(ValueError, match=rf"^{name}: expected a number of at least 0, got -1$"):
        kv_cache_bytes(**{**sizes, name: -1})
    if name != "bytes_per_element":
        del sizes["bytes_per_element"]
        with pytest.raises(ValueError, match=rf"^{name}: "):
            kivi_cache_bytes("kivi2", **{**sizes, name: -1})


def test_bytes_of_a_preset_are_those_of_its_config():
    sizes = (2, 3, 1000, 4, 64)
    assert kivi_cache_bytes("kivi4", *sizes) == kivi_cache_bytes(KiviConfig(4, 4), *sizes)
    with pytest.raises(
        ValueError, match=r"^preset: expected one of kivi2, kivi4, lean, balanced, near-lossless, got 'kivi5'$"
    ):
        kivi_cache_bytes("kivi5", *sizes)


# --- growth ---


@pytest.mark.parametrize("chunk", [1, 64, 129])
def test_growth_is_at_most_an_eighth_at_a_time(chunk):
    """Also reserved bytes are those of the tensors, and used bytes never exceed them."""
    cache = LayerCache(KiviConfig(residual_length=0), 2, 1, 16)
    pages = [0]
    for _ in range(40 * PAGE // chunk if chunk > 1 else 6 * PAGE):
        x = new_tokens(cache, chunk)
        cache.append(x, x)
        reserved = cache.storage.table.shape[1]
        assert cache.storage.pool.shape[0] == reserved * cache.storage.batch
        if reserved != pages[-1]:
            pages.append(reserved)
            assert cache.nbytes == tensor_bytes(cache)
        assert cache.storage.used_nbytes <= cache.nbytes
    assert pages[-1] >= max(cache.packed)
    for before, after in pairwise(pages):
        assert after - before <= max(before / 8, -(-chunk // PAGE)), pages
    if chunk > 1:
        assert len(pages) < 30, "pages are added one by one for ever"


def test_a_long_append_reserves_exactly_what_it_needs():
    cache = LayerCache(KiviConfig(residual_length=0), 1, 1, 16)
    x = new_tokens(cache, 30 * PAGE + 1)
    cache.append(x, x)
    assert cache.storage.table.shape[1] == cache.packed[0] == 30


# --- pages ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [16, 20, 33, 80, 96, 112, 128])
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize(("k_bits", "v_bits"), [(2, 8), (4, 2), (8, 4)])
def test_pages_hold_what_the_plain_quantizers_give(k_bits, v_bits, group_size, D, dtype):
    layout = PageLayout.of(KiviConfig(k_bits, v_bits, group_size), D, dtype)
    k, v = (sample(2, 2, 2 * PAGE, D, dtype=dtype, seed=seed) for seed in torch.randint(10**6, (2,)).tolist())
    pages = to_pages(k, v, layout)
    assert pages.shape == (2, 2, 2, layout.words)
    assert pages.dtype == torch.int32
    got_k, got_v = from_pages(pages, layout)
    expected_k = quantize(k, k_bits, group_size, "tokens")
    code, scale, zero = reference.encode(v, v_bits, group_size)
    for name in ("code", "scale", "zero"):
        assert_bitwise_equal(getattr(got_k, name), getattr(expected_k, name))
    got_code = unpack(got_v.code, v_bits, -1)
    assert_bitwise_equal(got_code[..., :D], code)
    assert not got_code[..., D:].any(), "the padding's codes are zero"
    assert_bitwise_equal(got_v.scale, scale)
    assert_bitwise_equal(got_v.zero, zero)
    if D % 16 == 0:
        assert_bitwise_equal(got_v.code, quantize(v, v_bits, group_size, "channels").code)
    values = decode_pages(pages, layout, dtype)
    assert_bitwise_equal(values[0], fake_quantize(k, k_bits, group_size, "channel"))
    assert_bitwise_equal(values[1], fake_quantize(v, v_bits, group_size, "token"))


def test_a_page_depends_on_its_own_tokens_and_head_only():
    layout = PageLayout.of(KiviConfig(4, 2), 48, torch.float16)
    k, v = sample(3, 2, 3 * PAGE, 48, dtype=torch.float16), torch.randn(3, 2, 3 * PAGE, 48).half()
    pages = to_pages(k, v, layout)
    b, h, p = 1, 1, 2
    alone = (x[b : b + 1, h : h + 1, p * PAGE : (p + 1) * PAGE] for x in (k, v))
    assert_bitwise_equal(pages[b, p, h], to_pages(*alone, layout).flatten())


@pytest.mark.parametrize("D", [16, 20, 100])
def test_page_words_count_every_part(D):
    """Codes, scales and zeros of the padded head dimension, in int32 words: nothing else, nothing missing."""
    config = KiviConfig(k_bits=2, v_bits=4, group_size=32)
    padded = -(-D // 16) * 16
    k_words, v_words = padded * PAGE * 2 // 32, PAGE * padded * 4 // 32
    params = 2 * (padded * PAGE // 32 + PAGE * -(-D // 32))
    for dtype in DTYPES:
        layout = PageLayout.of(config, D, dtype)
        assert layout.words == k_words + v_words + params * dtype.itemsize // 4
    assert PageLayout.of(replace(config, k_bits=8), D, torch.float16).words > layout.words


def test_stored_scales_keep_the_bits_of_the_cache_dtype():
    """bf16 scales are bf16 numbers, not fp16 bits read as bf16: a range of 1e30 survives."""
    layout = PageLayout.of(KiviConfig(), 16, torch.bfloat16)
    k = torch.zeros(1, 1, PAGE, 16, dtype=torch.bfloat16)
    k[:, :, ::2] = 3e30
    got, _ = from_pages(to_pages(k, k, layout), layout)
    assert got.scale.dtype == torch.bfloat16
    assert_bitwise_equal(got.scale, (k[:, :, 0].float() / 3).bfloat16().unsqueeze(-1).expand_as(got.scale))
