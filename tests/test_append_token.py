"""One token at a time, stored by the device alone: bytes as of LayerCache.step, whatever each row holds."""

import pytest
import torch

from attending import TOLERANCE
from interpreting import interpreted
from kivi_kv import KiviConfig, LayerCache
from kivi_kv.ops import append_token
from oracle import assert_bitwise_equal, randn

FP16, BF16 = torch.float16, torch.bfloat16
CONFIGS = {
    "kivi2": (KiviConfig(2, 2, 32, residual_length=0), 64, FP16),
    "sinks, odd residual": (KiviConfig(4, 2, 64, residual_length=37, sink_length=5), 80, BF16),
    "8 bits": (KiviConfig(8, 8, 128, residual_length=128), 16, FP16),
}
LENGTHS = [0, 3, 127, 160, 258]  # tokens that the rows start with
ON_CPU = [("reference", "cpu"), pytest.param("triton", "cpu", marks=interpreted)]
PLACES = [*ON_CPU, pytest.param(None, "cuda", marks=pytest.mark.gpu)]


def filled(config, D, dtype, backend, device, max_tokens=700) -> LayerCache:
    """Rows of LENGTHS tokens; the pages are packed by the reference."""
    layer = LayerCache(config, len(LENGTHS), 2, D, dtype, device, max_tokens, backend=backend)
    k, v = (randn(len(LENGTHS), 2, max(LENGTHS), D, dtype=dtype, seed=seed).to(device) for seed in (1, 2))
    layer.append(k, v, (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).to(device))
    return layer


def token(step: int, D: int, dtype, device, heads: int = 2):
    return tuple(randn(len(LENGTHS), n, 1, D, dtype=dtype, seed=100 * step + n).to(device) for n in (4, heads, 3))


def assert_same(a: LayerCache, b: LayerCache) -> None:
    """Equal counts, pages and full-precision tokens."""
    assert (a.lengths, a.packed) == (b.lengths, b.packed)
    for x, y in zip(a.dequantize(), b.dequantize(), strict=True):
        assert_bitwise_equal(x, y)
    for row, pages in enumerate(a.packed):
        for p in range(pages):
            one, other = (s.pool[s.table[row, p].long()] for s in (a.storage, b.storage))
            assert_bitwise_equal(one, other)


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("name", CONFIGS)
def test_decode_stores_and_attends_what_step_does(name, backend, device):
    config, D, dtype = CONFIGS[name]
    usual, other = (filled(config, D, dtype, b, device) for b in ("reference", backend))
    other.prepare()
    steps = 4 if backend == "triton" else 140
    for step in range(steps):
        q, k, v = token(step, D, dtype, device)
        v = v[:, :2]
        expected = usual.step(q, k, v)
        out = other.decode(q, k, v)
        assert (out - expected).float().norm() <= TOLERANCE[dtype] * expected.float().norm()
    assert usual.lengths == [n + steps for n in LENGTHS]
    assert_same(usual, other)


@pytest.mark.parametrize(("backend", "device"), ON_CPU)
def test_a_page_is_packed_when_the_ring_is_full(backend, device):
    """Rows 2 and 4 are one token before that; the strided token of a projection is stored as any other."""
    config = KiviConfig(2, 2, 32, residual_length=1, sink_length=1)
    start = [0, 100, 129, 130, 257]
    layers = []
    for b in ("reference", backend):
        layer = LayerCache(config, 5, 2, 32, FP16, device, 600, backend=b)
        k, v = (randn(5, 2, 257, 32, dtype=FP16, seed=seed) for seed in (1, 2))
        layer.append(k, v, torch.arange(257) < torch.tensor(start)[:, None])
        layers.append(layer)
    packed = layers[0].packed
    layers[1].prepare()
    for step in range(2):
        k, v = (randn(5, 1, 2, 32, dtype=FP16, seed=10 * step + i).transpose(1, 2) for i in (1, 2))
        q = randn(5, 4, 1, 32, dtype=FP16, seed=step)
        layers[0].step(q, k, v)
        layers[1].decode(q, k, v)
    assert layers[0].packed == [0, 0, 1, 1, 2] != packed
    assert_same(*layers)


@pytest.mark.parametrize(("backend", "device"), ON_CPU)
def test_a_full_row_keeps_what_it_has(backend, device):
    layer = LayerCache(KiviConfig(2, 2, 32, residual_length=0), 2, 1, 16, FP16, device, 300, backend=backend)
    k, v = (randn(2, 1, 300, 16, dtype=FP16, seed=seed) for seed in (1, 2))
    layer.append(k, v, torch.arange(300) < torch.tensor([[298], [300]]))
    layer.prepare()
    before = [x.clone() for x in layer.dequantize()]
    room = layer.storage.table.shape[1] * 128 + 128  # pages, and the ring behind them
    for step in range(room - 298 + 3):
        append_token(
            *(randn(2, 1, 1, 16, dtype=FP16, seed=10 * step + i) for i in range(2)), layer.storage, backend
        )
    assert layer.storage.lengths.tolist() == [room, room]
    layer.prepare()
    layer.decode(*(randn(2, 1, 1, 16, dtype=FP16, seed=i) for i in range(3)))  # full, too
    assert layer.lengths == [room, room]
    for x, y in zip(before, layer.dequantize(), strict=True):
        assert_bitwise_equal(x[:1, :, :256], y[:1, :, :256])  # what was packed


def test_what_decode_refuses():
    layer = LayerCache("kivi2", 2, 2, 32, FP16, max_tokens=400)
    q, k, v = (randn(2, n, 1, 32, dtype=FP16, seed=n) for n in (4, 2, 2))
    with pytest.raises(ValueError, match=r"^decode: expected prepare\(\) before"):
        layer.decode(q, k, v)
    for change in (
        lambda: layer.append(k, v),
        lambda: layer.crop(0),
        lambda: layer.select(torch.tensor([1, 0])),
        layer.reset,
    ):
        layer.prepare()
        layer.decode(q, k, v)
        change()
        with pytest.raises(ValueError, match=r"^decode: expected prepare"):
            layer.decode(q, k, v)
    layer.prepare()
    with pytest.raises(ValueError, match=r"^k: expected one token a row, got 2$"):
        layer.decode(q, k.repeat(1, 1, 2, 1), v)
    with pytest.raises(ValueError, match=r"^q: expected torch.float16, got torch.float32$"):
        layer.decode(q.float(), k, v)
    with pytest.raises(ValueError, match=r"^max_tokens: expected a number"):
        LayerCache("kivi2", 2, 2, 32, FP16).prepare()


def test_rows_that_were_reordered_get_slots_of_their_own():
    """After a selection that doubles a row, both copies pack their next page: into different slots."""
    config = KiviConfig(2, 2, 32, residual_length=0)
    layer = filled(config, 64, FP16, "reference", "cpu")
    usual = filled(config, 64, FP16, "reference", "cpu")
    for x in (layer, usual):
        x.select(torch.tensor([4, 4, 0, 3, 3]))
    layer.prepare()
    for step in range(200):
        q, k, v = token(step, 64, FP16, "cpu")
        usual.step(q, k, v[:, :2])
        layer.decode(q, k, v[:, :2])
    assert_same(usual, layer)


@pytest.mark.gpu
def test_a_graph_of_decode_serves_every_step():
    """Captured once; replays store, pack and attend as steps do, and wait for nothing."""
    config, D, dtype = KiviConfig(2, 2, 32, residual_length=0), 128, FP16
    usual, other = (filled(config, D, dtype, b, "cuda") for b in ("reference", None))
    other.prepare()
    inputs = [x.clone() for x in token(0, D, dtype, "cuda")]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # compile
        other.decode(inputs[0], inputs[1], inputs[2][:, :2])
    torch.cuda.synchronize()
    usual.step(inputs[0], inputs[1], inputs[2][:, :2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = other.decode(inputs[0], inputs[1], inputs[2][:, :2])
    for step in range(1, 300):
        for x, new in zip(inputs, token(step, D, dtype, "cuda"), strict=True):
            x.copy_(new)
        graph.replay()
        expected = usual.step(inputs[0], inputs[1], inputs[2][:, :2])
        assert (out - expected).float().norm() <= TOLERANCE[dtype] * expected.float().norm()
    assert_same(usual, other)


@pytest.mark.gpu
def test_a_step_is_four_launches():
    """Counting and storing the token, attention, and merging its parts."""
    layer = filled(KiviConfig(2, 2, 32), 128, FP16, None, "cuda")
    layer.prepare()
    q, k, v = token(0, 128, FP16, "cuda")
    layer.decode(q, k, v[:, :2])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        layer.decode(q, k, v[:, :2])
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) == 4, names
