"""Caches to test, and what they should hold."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from kivi_kv import KiviConfig, LayerCache, fake_quantize
from kivi_kv.config import PAGE
from oracle import DTYPES, assert_bitwise_equal, sample

BITS = st.sampled_from([2, 4, 8])
SEEDS = st.integers(0, 2**31)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

configs = st.builds(
    KiviConfig,
    k_bits=BITS,
    v_bits=BITS,
    group_size=st.sampled_from([32, 64, 128]),
    residual_length=st.integers(0, 200),
    sink_length=st.integers(0, 8),
)
quick = settings(deadline=None, max_examples=40)


def tokens(B: int, T: int, D: int = 16, H: int = 2, dtype: torch.dtype = torch.float16, seed: int = 0):
    """Keys and values whose channels differ in range and offset."""
    return sample(B, H, T, D, dtype=dtype, seed=seed), sample(B, H, T, D, dtype=dtype, seed=seed + 1)


def filled(config: KiviConfig, k: Tensor, v: Tensor, chunks: list[int] | None = None, **options) -> LayerCache:
    B, H, T, D = k.shape
    cache = LayerCache(config, B, H, D, k.dtype, **options)
    for part_k, part_v in zip(k.split(chunks or T, dim=2), v.split(chunks or T, dim=2), strict=True):
        cache.append(part_k, part_v)
    return cache


def state(cache: LayerCache, row: int) -> tuple[int, Tensor, Tensor, Tensor]:
    """Everything that a row stores: length, page words, and the dense K and V oldest first."""
    s, S = cache.storage, cache.config.sink_length
    length, packed = cache.lengths[row], cache.packed[row]
    index = torch.cat([s.dense_index(0, min(S, length)), s.dense_index(min(S + packed * PAGE, length), length)])
    return length, s.pool[s.table[row, :packed]], s.dense_k[row, :, index], s.dense_v[row, :, index]


def assert_same_row(a: LayerCache, row_a: int, b: LayerCache, row_b: int) -> None:
    (length_a, *parts_a), (length_b, *parts_b) = state(a, row_a), state(b, row_b)
    assert length_a == length_b
    for x, y in zip(parts_a, parts_b, strict=True):
        assert_bitwise_equal(x, y)


def as_attended(config: KiviConfig, k: Tensor, v: Tensor, pages: int) -> tuple[Tensor, Tensor]:
    """K and V [B, H, T, D] with `pages` pages behind the sinks quantized and dequantized, the rest as it is."""
    k, v = k.clone(), v.clone()
    part = slice(config.sink_length, config.sink_length + pages * PAGE)
    if pages:
        k[:, :, part] = fake_quantize(k[:, :, part], config.k_bits, config.group_size, "channel")
        v[:, :, part] = fake_quantize(v[:, :, part], config.v_bits, config.group_size, "token")
    return k, v


def assert_holds(cache: LayerCache, k: Tensor, v: Tensor) -> None:
    """The cache holds k and v as the rule says: so many pages, their values, every other token bit-exact."""
    B, _, T, _ = k.shape
    pages = cache.config.pages(T)
    assert cache.lengths == [T] * B
    assert cache.packed == [pages] * B
    for actual, expected in zip(cache.dequantize(), as_attended(cache.config, k, v, pages), strict=True):
        assert_bitwise_equal(actual, expected)


def snapshot(cache: LayerCache) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in cache.storage.tensors().items()}


def assert_unchanged(cache: LayerCache, before: dict[str, Tensor]) -> None:
    for name, x in cache.storage.tensors().items():
        assert_bitwise_equal(x, before[name])


def inputs(M: int) -> dict[str, Tensor]:
    shapes = {"q": (2, 4, M, 16), "k": (2, 2, M, 16), "v": (2, 2, M, 16)}
    return {**{name: torch.zeros(shape).half() for name, shape in shapes.items()}, "valid": torch.ones(2, M) > 0}
