"""The Gluon attention kernel on a GPU: what it takes, its shares of ragged rows, graphs, hard values."""

import pytest
import torch

from attending import Case, new_tokens, queries
from kivi_kv import KiviConfig, LayerCache
from kivi_kv.ops import attend
from oracle import assert_bitwise_equal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
FP16, BF16 = torch.float16, torch.bfloat16
KIVI2 = KiviConfig(2, 2, 32)
BALANCED = KiviConfig(4, 2, 128, sink_length=32)
DEVICE, GLUON = {"device": "cuda"}, {"backend": "gluon"}


# (config, D, dtype, query heads per kv head): each is a kernel of its own, with new tokens another
VARIANTS = {
    "kivi2": (KIVI2, 128, FP16, 4),
    "balanced": (BALANCED, 128, BF16, 4),
    "kivi2 bf16": (KIVI2, 128, BF16, 4),
    "kivi4": (KiviConfig(4, 4, 32, sink_length=5), 128, FP16, 1),
    "kivi4 D64, 7 heads": (KiviConfig(4, 4, 32), 64, FP16, 7),
    "kivi2 D64 bf16": (KIVI2, 64, BF16, 3),
    "2 bits, groups of 64": (KiviConfig(2, 2, 64, residual_length=40), 128, FP16, 8),
    "2 bits D64, groups of 128": (KiviConfig(2, 2, 128, residual_length=0), 64, FP16, 5),
    "4, 2 bits D64, groups of 64": (KiviConfig(4, 2, 64, residual_length=7), 64, BF16, 2),
    "2, 4 bits, 16 heads": (KiviConfig(2, 4, 32, sink_length=3), 128, BF16, 16),
}
LENGTHS = [0, 1, 4, 129, 161, 290, 777, 3001]


@pytest.mark.parametrize("name", VARIANTS)
def test_ragged_rows(name):
    """Rows of every kind in one launch."""
    config, D, dtype, ratio = VARIANTS[name]
    case = Case.random(config, len(LENGTHS), 3, max(LENGTHS), D, dtype, LENGTHS, **DEVICE)
    case.check(queries(len(LENGTHS), 3 * ratio, 1, D, dtype, **DEVICE), **GLUON)


@pytest.mark.parametrize(
    ("name", "M"), [("kivi2", 1), ("kivi2", 3), ("kivi2", 4), ("kivi2 D64 bf16", 5), ("balanced", 2)]
)
def test_new_tokens(name, M):
    """Causal among themselves, behind rows of every kind; with few and with many columns."""
    config, D, dtype, ratio = VARIANTS[name]
    case = Case.random(config, len(LENGTHS), 3, max(LENGTHS), D, dtype, LENGTHS, **DEVICE)
    q, new = (
        queries(len(LENGTHS), 3 * ratio, M, D, dtype, **DEVICE),
        new_tokens(len(LENGTHS), 3, M, D, dtype, **DEVICE),
    )
    case.check(q, new, **GLUON)
    strided = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in new)
    apart = tuple(torch.cat([x, x], dim=-1)[..., :D] for x in new)  # rows of 2 D, then of D + 8
    odd = tuple(torch.cat([x, x[..., :8]], dim=-1)[..., :D] for x in new)
    shifted = tuple(torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in new)
    first = attend(q, case.cache.storage, *new, **GLUON)
    for other in (strided, apart, odd, shifted):
        assert_bitwise_equal(attend(q, case.cache.storage, *other, **GLUON), first)


@pytest.mark.parametrize(("B", "T"), [(1, 40_000), (3, 9000), (60, 1100), (130, 700), (700, 500)])
def test_shares_of_many_rows_and_of_few(B, T):
    """From one row for hundreds of programs to many rows for each, every length different."""
    lengths = [max(0, T - 37 * b % T) for b in range(B)]
    config = KiviConfig(2, 2, 32, residual_length=64, sink_length=20)
    case = Case.random(config, B, 3, T, 128, lengths=lengths, **DEVICE)
    case.check(queries(B, 12, 1, 128, **DEVICE), **GLUON)


def test_sink_logits_and_scale():
    case, q = Case.random(KIVI2, 2, 3, 3000, 128, lengths=[3000, 0], **DEVICE), queries(2, 12, 1, 128, **DEVICE)
    sinks = torch.linspace(-5, 5, 12, device="cuda")
    case.check(3 * q, sink_logits=sinks, **GLUON)
    case.check(q, sink_logits=sinks, scale=0.5, **GLUON)


def test_queries_of_any_strides():
    case, q = Case.random(KIVI2, 2, 3, 3000, 128, **DEVICE), queries(2, 12, 1, 128, **DEVICE)
    expected = attend(q, case.cache.storage, **GLUON)
    for other in (q.transpose(1, 2).contiguous().transpose(1, 2), q.mT.contiguous().mT, torch.cat([q, q])[2:]):
        assert_bitwise_equal(attend(other, case.cache.storage, **GLUON), expected)


def test_launches_that_overlap():
    """Kernels start before their predecessors end: what these write must be seen, and results not overwritten."""
    case = Case.random(KIVI2, 2, 3, 3000, 128, **DEVICE)
    qs = [queries(2, 12, 1, 128, seed=seed, **DEVICE) for seed in range(50)]
    expected = []
    for q in qs:
        expected.append(attend(q, case.cache.storage, **GLUON))
        torch.cuda.synchronize()
    out, q = [], torch.empty_like(qs[0])
    for other in qs:
        q.copy_(other)
        out.append(attend(q, case.cache.storage, **GLUON))
        q.fill_(torch.nan)
    for a, b in zip(out, expected, strict=True):
        assert_bitwise_equal(a, b)


def test_what_it_does_not_take_goes_to_the_portable_kernel_and_is_counted():
    """A decode step is attended by Gluon, a chunk of more than 16 columns by Triton."""
    layer = LayerCache(KIVI2, 1, 2, 128, FP16, "cuda")
    for M in (500, 1, 1, 40, 1):
        q = queries(1, 8, M, 128, **DEVICE)
        layer.step(q, *new_tokens(1, 2, M, 128, **DEVICE))
    assert layer.backends["attend"] == "gluon"
    assert layer.attend_calls == {"gluon": 3, "triton": 1}
    q = queries(1, 8, 1, 128, **DEVICE)
    for options in ({"softcap": 30.0}, {"window": 100}, {"scale": -0.1}, {"scale": 0.0}):
        assert_bitwise_equal(
            attend(q, layer.storage, **options), attend(q, layer.storage, **options, backend="triton")
        )
        with pytest.raises(ValueError, match=r"gluon cannot run here, (softcap, window|scale)"):
            attend(q, layer.storage, **options, **GLUON)
    with pytest.raises(ValueError, match="gluon cannot run here, head_dim: expected 64 or 128, got 80"):
        LayerCache(KIVI2, 1, 2, 80, FP16, "cuda", backend="gluon")
    assert LayerCache(KIVI2, 1, 2, 80, FP16, "cuda").backends["attend"] == "triton"
    forced = LayerCache(KIVI2, 1, 2, 128, FP16, "cuda", backend="gluon")
    for M in (500, 1, 40):
        forced.step(queries(1, 8, M, 128, **DEVICE), *new_tokens(1, 2, M, 128, **DEVICE))
    assert forced.attend_calls == {"gluon": 1, "triton": 1}
    with pytest.raises(ValueError, match="expected a dtype of float16, bfloat16"):
        attend(q, layer.storage, *new_tokens(1, 2, 1, 128, BF16, **DEVICE), **GLUON)
    with pytest.raises(ValueError, match="at most 16"):
        attend(queries(1, 34, 1, 128, **DEVICE), layer.storage, **GLUON)
