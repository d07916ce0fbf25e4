"""The compiled attention kernels: lengths that the interpreter cannot bear, odd shapes, graphs, far offsets."""

import pytest
import torch

from attending import TOLERANCE, Case, hard_cases, new_tokens, queries
from kivi_kv import KiviConfig, LayerCache
from kivi_kv.ops import attend
from oracle import assert_bitwise_equal, randn

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
FP16, BF16 = torch.float16, torch.bfloat16
KIVI2 = KiviConfig(2, 2, 32)
BALANCED = KiviConfig(4, 2, 128, sink_length=32)
DEVICE = {"device": "cuda"}
by_both = pytest.mark.parametrize("backend", ["triton", "gluon"])


# kernel variants: each is compiled once, so every other test below reuses one of these
VARIANTS = {
    "kivi2": (KIVI2, 128, FP16, 4),
    "balanced": (BALANCED, 128, BF16, 4),
    "kivi4 D64": (KiviConfig(4, 4, 32), 64, FP16, 7),
    "kivi2 D64 bf16": (KIVI2, 64, BF16, 3),
    "8 bits D80": (KiviConfig(8, 8, 64, residual_length=40, sink_length=5), 80, FP16, 1),
    "2, 8 bits D256": (KiviConfig(2, 8, 128, residual_length=0), 256, BF16, 2),
    "8, 2 bits D112": (KiviConfig(8, 2, 32, sink_length=3), 112, BF16, 8),
    "4, 2 bits D20": (KiviConfig(4, 2, 64, residual_length=7), 20, FP16, 5),
}
LENGTHS = [0, 1, 4, 129, 161, 290, 777, 3001]


@pytest.mark.parametrize("name", VARIANTS)
def test_ragged_rows(name):
    """Rows of every kind in one launch, with and without new tokens. 2 variants each."""
    config, D, dtype, ratio = VARIANTS[name]
    case = Case.random(config, len(LENGTHS), 3, max(LENGTHS), D, dtype, LENGTHS, **DEVICE)
    q = queries(len(LENGTHS), 3 * ratio, 1, D, dtype, **DEVICE)
    case.check(q)
    case.check(q, new_tokens(len(LENGTHS), 3, 1, D, dtype, **DEVICE))


@pytest.mark.parametrize("M", [2, 3, 4, 5, 16, 40, 300])
def test_query_tokens(M):
    """8, 16 and 32 columns, in tiles from 32 on. 2 variants more."""
    case = Case.random(KIVI2, 2, 3, 1500, 128, lengths=[1500, 400], **DEVICE)
    case.check(queries(2, 12, M, 128, **DEVICE), new_tokens(2, 3, M, 128, **DEVICE))


@pytest.mark.parametrize("M", [4, 16, 100])
def test_query_tokens_bf16(M):
    """2 variants more."""
    case = Case.random(BALANCED, 2, 3, 1500, 128, BF16, lengths=[1500, 400], **DEVICE)
    case.check(queries(2, 12, M, 128, BF16, **DEVICE), new_tokens(2, 3, M, 128, BF16, **DEVICE))


@pytest.mark.parametrize("window", [1, 100, 129, 1000, 100_000])
@pytest.mark.parametrize("new", [False, True])
def test_windows(window, new):
    """2 variants more."""
    case = Case.random(KIVI2, 2, 3, 3000, 128, lengths=[3000, 500], **DEVICE)
    case.check(queries(2, 12, 1, 128, **DEVICE), new_tokens(2, 3, 1, 128, **DEVICE) if new else None, window=window)


@pytest.mark.parametrize("name", ["kivi2", "balanced"])
def test_softcap_and_sink_logits(name):
    """2 variants more."""
    config, D, dtype, ratio = VARIANTS[name]
    case, q = Case.random(config, 2, 3, 3000, D, dtype, **DEVICE), 3 * queries(2, 3 * ratio, 1, D, dtype, **DEVICE)
    sinks = torch.linspace(-5, 5, 3 * ratio, device="cuda")
    for softcap in (1.0, 30.0):
        case.check(q, softcap=softcap, sink_logits=sinks)
    case.check(q, scale=0.5, sink_logits=sinks)


@by_both
@pytest.mark.parametrize(("config", "dtype"), [(KIVI2, FP16), (KIVI2, BF16), (BALANCED, BF16)])
def test_hard_values(config, dtype, backend):
    wrong = {}
    for case, q, k, v in hard_cases(dtype, 4096, 128, "cuda"):
        try:
            Case(config, k, v).check(q, backend=backend)
        except AssertionError as error:
            wrong[case] = str(error)
    assert not wrong


# --- length ---


@by_both
@pytest.mark.parametrize("name", ["kivi2", "balanced"])
@pytest.mark.parametrize("peaked", [False, True])
def test_error_does_not_grow_with_length(backend, peaked, name):
    """Spread evenly, the output is small and the sum long; peaked, one token outweighs 131,071 others."""
    config, D, dtype, ratio = VARIANTS[name]
    errors = {}
    for T in (4096, 32_768, 131_072):
        k, v = (randn(1, 3, T, D, dtype=dtype, seed=seed).cuda() for seed in (1, 2))
        q = queries(1, 3 * ratio, 1, D, dtype, **DEVICE)
        if peaked:
            k[:, :, T // 3] = 2 * q[0, ::ratio, 0]
        errors[T] = Case(config, k, v).check(q, backend=backend)
    assert errors[131_072] <= 1.5 * errors[4096] + TOLERANCE[dtype] / 20, errors


# --- launches ---


@by_both
def test_runs_are_equal_bit_for_bit(backend):
    for T in (300, 20_000):
        case, q = Case.random(KIVI2, 2, 3, T, 128, **DEVICE), queries(2, 12, 1, 128, **DEVICE)
        first = attend(q, case.cache.storage, return_lse=True, backend=backend)
        for _ in range(20):
            for a, b in zip(attend(q, case.cache.storage, return_lse=True, backend=backend), first, strict=True):
                assert_bitwise_equal(a, b)


@by_both
def test_one_graph_serves_growing_lengths(backend):
    """Captured once; lengths, packed and table change on the device, and each replay is as a launch of its own."""
    T, cuts = 5000, [5000, 100, 129, 257, 600, 2999, 4999]
    k, v = (randn(2, 3, T, 128, dtype=FP16, seed=seed).cuda() for seed in (1, 2))
    layer = LayerCache(KIVI2, 2, 3, 128, FP16, "cuda", max_tokens=T, backend=backend)
    q = queries(2, 12, 1, 128, **DEVICE)
    attend(q, layer.storage, backend=backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(q, layer.storage, return_lse=True, backend=backend)
    for length in cuts:
        layer.reset()
        layer.append(k[:, :, :length], v[:, :, :length])
        out.fill_(torch.nan)
        graph.replay()
        case = Case(KIVI2, k[:, :, :length], v[:, :, :length], max_tokens=T)
        expected = attend(q, case.cache.storage, return_lse=True, backend=backend)
        for a, b in zip((out, lse), expected, strict=True):
            assert_bitwise_equal(a, b)
        case.check(q)


@by_both
def test_an_attend_waits_for_nothing(backend):
    case = Case.random(KIVI2, 2, 3, 3000, 128, **DEVICE)
    q, new = queries(2, 12, 1, 128, **DEVICE), new_tokens(2, 3, 1, 128, **DEVICE)
    attend(q, case.cache.storage, *new, backend=backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(q, case.cache.storage, *new, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@by_both
def test_offsets_beyond_two_billion_words(backend):
    """Pages at the far end of a pool of more than 2^31 words, whose other words are NaN."""
    case, q = Case.random(KIVI2, 2, 3, 3000, 128, **DEVICE), queries(2, 12, 1, 128, **DEVICE)
    storage = case.cache.storage
    expected = attend(q, storage, backend=backend)
    near = storage.pool
    far = 2**31 // near[0].numel() + 1
    storage.pool = torch.full((far + len(near), *near.shape[1:]), -1, dtype=torch.int32, device="cuda")
    storage.pool[far:] = near
    storage.table = torch.where(storage.table >= 0, storage.table + far, -1)
    assert_bitwise_equal(attend(q, storage, backend=backend), expected)


@pytest.mark.parametrize(
    ("name", "backend"), [("4, 2 bits D20", "triton"), ("kivi2", "gluon"), ("balanced", "gluon")]
)
def test_padding_and_what_lies_behind_the_end_do_not_matter(name, backend):
    """Channels that pad D, dense rows and pages that hold no token: NaN there changes nothing."""
    config, D, dtype, ratio = VARIANTS[name]
    case = Case.random(config, 2, 3, 300, D, dtype, [300, 40], max_tokens=600, **DEVICE)
    storage, q = case.cache.storage, queries(2, 3 * ratio, 1, D, dtype, **DEVICE)
    expected = attend(q, storage, backend=backend)
    empty = storage.dense_tokens() >= storage.lengths[:, None]
    for x in (storage.dense_k, storage.dense_v):
        x.masked_fill_(empty[:, None, :, None], torch.nan)
    used = torch.zeros(len(storage.pool), dtype=torch.bool, device="cuda")
    used[storage.table[storage.table >= 0].long()] = True
    storage.pool[~used] = -1
    assert_bitwise_equal(attend(q, storage, backend=backend), expected)


def test_a_layer_by_both_backends():
    """The same bytes stored and outputs as near as rounding allows, in steps and chunks."""
    layers = {name: LayerCache(BALANCED, 2, 3, 128, BF16, "cuda", backend=name) for name in ("reference", "triton")}
    for step, M in enumerate([700, 1, 129, 1, 16, 500, 1, 1]):
        q = queries(2, 12, M, 128, BF16, step, **DEVICE)
        k, v = (queries(2, 3, M, 128, BF16, 10 * step + i, **DEVICE) for i in (1, 2))
        out, expected = (layers[name].step(q, k, v) for name in ("triton", "reference"))
        assert (out - expected).float().norm() <= TOLERANCE[BF16] * expected.float().norm()
    for name, x in layers["triton"].storage.tensors().items():
        assert_bitwise_equal(x, layers["reference"].storage.tensors()[name])
