"""The fused kernel, and the window and log-sum-exp of the reference, against fp64 over what a cache represents."""

import pytest
import torch

from attending import TOLERANCE, Case, hard_cases, new_tokens, queries
from interpreting import interpreted
from kivi_kv import KiviConfig, LayerCache
from kivi_kv.ops import attend
from oracle import assert_bitwise_equal, randn

FP16, BF16 = torch.float16, torch.bfloat16

both_dtypes = pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
both_backends = pytest.mark.parametrize("backend", ["reference", "triton"])

# --- shapes, in the interpreter ---

BITS = [(2, 2), (4, 2), (4, 4), (8, 8), (2, 8)]
HEAD_DIMS = (16, 64, 80, 128, 256)
COMBINATIONS = [
    (*bits, group, HEAD_DIMS[(i + 2 * j) % 5], (FP16, BF16)[(i + j) % 2])
    for i, bits in enumerate(BITS)
    for j, group in enumerate((32, 64, 128))
]
SMALL = KiviConfig(residual_length=0, sink_length=5)  # of 150 tokens, one page is packed


@interpreted
@pytest.mark.parametrize(("k_bits", "v_bits", "group_size", "D", "dtype"), COMBINATIONS, ids=str)
def test_bits_groups_head_dims(k_bits, v_bits, group_size, D, dtype):
    config = KiviConfig(k_bits, v_bits, group_size, residual_length=20, sink_length=3)
    Case.random(config, 1, 2, 300, D, dtype).check(queries(1, 4, 1, D, dtype))


@interpreted
@both_dtypes
@pytest.mark.parametrize("k_bits", [2, 8])
def test_head_dims_that_fill_no_block(k_bits, dtype):
    for D in (20, 48, 112):
        config = KiviConfig(k_bits, 10 - k_bits, residual_length=0)
        Case.random(config, 1, 1, 140, D, dtype).check(queries(1, 2, 1, D, dtype), new_tokens(1, 1, 1, D, dtype))


@interpreted
@pytest.mark.parametrize(
    ("ratio", "M"),
    [(1, 1), (3, 1), (4, 2), (8, 1), (16, 1), (1, 16), (3, 5), (8, 2), (16, 2), (4, 5), (1, 17), (3, 17), (1, 40)],
)
def test_query_heads_and_tokens(ratio, M):
    """One tile of columns, several, and a last one that is not full."""
    case, q = Case.random(SMALL, 1, 1, 150, 16), queries(1, ratio, M, 16, seed=M)
    case.check(q)
    case.check(q, new_tokens(1, 1, M, 16))


@interpreted
@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize(("sinks", "residual"), [(0, 0), (5, 0), (0, 40), (5, 40)])
def test_ragged_rows(sinks, residual, new):
    """Empty rows, rows within the sinks, rows around a page's end."""
    config = KiviConfig(residual_length=residual, sink_length=sinks)
    lengths = [0, 1, 4, 129, sinks + residual + 129, 400]
    case = Case.random(config, 6, 1, 400, 16, lengths=lengths)
    kv = new_tokens(6, 1, new, 16) if new else None
    for options in ({}, {"sink_logits": torch.tensor([0.0, 5.0]), "window": 3}):
        case.check(queries(6, 2, max(new, 1), 16), kv, **options)


@interpreted
def test_nothing_stored_and_nothing_packed():
    for T in (1, 5, 100):
        Case.random(KiviConfig(sink_length=5), 1, 2, T, 64).check(queries(1, 4, 1, 64))
    storage = LayerCache(KiviConfig(), 2, 1, 16).storage
    out, lse = attend(queries(2, 2, 3, 16), storage, return_lse=True, backend="triton")
    assert not out.any()
    assert (lse == -torch.inf).all()
    out, lse = attend(
        queries(2, 2, 3, 16), storage, sink_logits=torch.tensor([1.0, -2.0]), return_lse=True, backend="triton"
    )
    assert not out.any()
    torch.testing.assert_close(lse, torch.tensor([1.0, -2.0])[None, :, None].expand(2, 2, 3), rtol=0, atol=1e-6)


# --- options ---


@interpreted
@both_backends
@pytest.mark.parametrize("M", [1, 6])
@pytest.mark.parametrize("window", [1, 3, 30, 129, 200, 299, 10_000])
def test_windows(window, M, backend):
    """Within the new tokens, within the residual, across pages, across the sinks, beyond everything."""
    case = Case.random(KiviConfig(residual_length=40, sink_length=5), 2, 1, 440, 16, lengths=[440, 200])
    q = queries(2, 2, M, 16)
    case.check(q, new_tokens(2, 1, M, 16), backend, window=window)
    case.check(q, None, backend, window=window, sink_logits=torch.tensor([0.0, 3.0]))


@interpreted
@both_backends
@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
@pytest.mark.parametrize("sink", [None, -20.0, 0.0, 6.0])
def test_scale_softcap_and_sink_logits(softcap, sink, backend):
    """Sink logits of any strides and any dtype."""
    case = Case.random(SMALL, 1, 2, 150, 32)
    sinks = None
    if sink is not None:  # every second element of a tensor
        sinks = torch.stack([sink + torch.tensor([0.0, 1.0, -2.0, 3.0]), torch.full((4,), 9.0)], 1).half()[:, 0]
    for scale in (None, 0.0) if softcap is None else (0.5,):
        options = {"scale": scale, "softcap": softcap, "sink_logits": sinks}
        case.check(3 * queries(1, 4, 3, 32), new_tokens(1, 2, 3, 32), backend, **options)


# --- storage ---


@interpreted
def test_rows_that_share_pages():
    """Rows reordered and repeated: the table is no longer in order, and two rows read the same slots."""
    case = Case.random(SMALL, 3, 2, 420, 16, lengths=[420, 150, 300])
    order = [2, 0, 0]
    case.cache.select(torch.tensor(order))
    case.rows = [case.rows[row] for row in order]
    table = case.cache.storage.table
    assert torch.equal(table[1], table[2])
    case.check(queries(3, 4, 2, 16), new_tokens(3, 2, 2, 16))
    k, v = (randn(3, 2, 300, 16, dtype=FP16, seed=seed) for seed in (7, 8))
    case.cache.append(k, v)  # the copies go their own ways
    case.rows = [
        [x[b : b + 1, :, :n].float() for x in case.cache.dequantize()] for b, n in enumerate(case.cache.lengths)
    ]
    case.check(queries(3, 4, 2, 16))


@interpreted
@pytest.mark.parametrize("max_tokens", [100, 150, 300])
def test_max_tokens(max_tokens):
    """Fewer dense rows than the ring has, and a table with pages that are not there yet."""
    config = KiviConfig(residual_length=40, sink_length=5)
    for T in (60, max_tokens):
        Case.random(config, 1, 2, T, 16, max_tokens=max_tokens).check(queries(1, 4, 1, 16))


@interpreted
def test_strides():
    """A projection's views, channels apart, and gaps: every stride is its own argument."""
    case = Case.random(SMALL, 2, 3, 150, 32)
    q = queries(2, 5, 6, 32).transpose(1, 2)  # [B, M, HQ, D] in memory
    k = queries(2, 5, 3, 32).transpose(1, 2)
    v = queries(2, 3, 10, 64)[:, :, ::2, 16:48]
    case.check(q, (k, v))
    case.check(q, (queries(2, 3, 32, 5).mT, k))
    case.check(queries(2, 6, 32, 5).mT, (v, k))
    case.check(queries(1, 6, 5, 32).expand(2, -1, -1, -1), (k[:1].expand(2, -1, -1, -1), v))
    out = attend(q, case.cache.storage, backend="triton")
    assert out.is_contiguous()


@interpreted
@both_dtypes
def test_a_layer_by_both_backends(dtype):
    """The same bytes stored, the same output but for rounding, token by token and in chunks."""
    config = KiviConfig(4, 2, 32, residual_length=10, sink_length=3)
    layers = {name: LayerCache(config, 2, 1, 16, dtype, backend=name) for name in ("reference", "triton")}
    for step, M in enumerate([20, 1, 150, 1, 2, 120, 1]):
        q = queries(2, 2, M, 16, dtype, step)
        k, v = (randn(2, 1, M, 16, dtype=dtype, seed=10 * step + i) for i in (1, 2))
        valid = torch.arange(M) >= torch.tensor([[0], [M // 3]])
        if M > 100:  # many queries take the interpreter long
            out, expected = (layers[name].append(k, v, valid) for name in ("triton", "reference"))
        else:
            out, expected = (layers[name].step(q, k, v, valid) for name in ("triton", "reference"))
            assert (out - expected).float().norm() <= TOLERANCE[dtype] * expected.float().norm()
        for name, x in layers["triton"].storage.tensors().items():
            assert_bitwise_equal(x, layers["reference"].storage.tensors()[name])
    assert layers["triton"].packed == [2, 1]


# --- hard values ---


CONFIGS = [KiviConfig(2, 2, 32, 16, 4), KiviConfig(4, 2, 128, 16, 4), KiviConfig(8, 8, 32, 16, 4)]
NAMES = [name for name, *_ in hard_cases(BF16, 32, 64, "cpu")]


@interpreted
@both_dtypes
@pytest.mark.parametrize("config", CONFIGS[:2], ids=["kivi2", "balanced"])
@pytest.mark.parametrize("name", NAMES)
def test_hard_values(name, config, dtype):
    for q, k, v in (values for case, *values in hard_cases(dtype, 300, 64, "cpu") if case == name):
        Case(config, k, v).check(q)


@interpreted
@both_dtypes
def test_zero_values(dtype):
    """Pages of constant groups alone have no scale to divide by."""
    k = randn(1, 1, 150, 16, dtype=dtype)
    assert not attend(queries(1, 2, 1, 16, dtype), Case(SMALL, k, 0 * k).cache.storage, backend="triton").any()
