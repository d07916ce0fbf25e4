"""Attention over a cache against fp64 over the values that it represents."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kivi_kv import KiviConfig, LayerCache, reference
from kivi_kv.config import PAGE
from kivi_kv.ops import attend
from kivi_kv.ops.dense_attention import dense_attention
from oracle import DTYPES, randn

ULP = 2.0**-24  # half a unit in the last place of fp32, relative: the error of one rounding


def represented(x: Tensor, config: KiviConfig, bits: int, axis: str) -> Tensor:
    """x [B, H, T, D] as stored: pages quantized and dequantized in fp32, sinks and residual as they are."""
    out, pages = x.float(), config.pages(x.shape[2])
    if pages:
        part = out[:, :, config.sink_length : config.sink_length + pages * PAGE]
        lines = part.to(x.dtype).transpose(-1, -2) if axis == "tokens" else part.to(x.dtype)
        encoded = reference.encode(lines, bits, config.group_size)
        values = reference.decode(*encoded, config.group_size, torch.float32)
        part.copy_(values.transpose(-1, -2) if axis == "tokens" else values)
    return out


class Case:
    """A cache of one length or of ragged rows, and for every row the K and V that it represents."""

    def __init__(self, config: KiviConfig, k: Tensor, v: Tensor, lengths: list[int] | None = None) -> None:
        B, H, T, D = k.shape
        self.lengths = [T] * B if lengths is None else lengths
        self.cache = LayerCache(config, B, H, D, k.dtype)
        self.cache.append(k, v, torch.arange(T) < torch.tensor(self.lengths)[:, None])
        self.rows = [
            (
                represented(k[row : row + 1, :, :n], config, config.k_bits, "tokens"),
                represented(v[row : row + 1, :, :n], config, config.v_bits, "channels"),
            )
            for row, n in enumerate(self.lengths)
        ]

    def check(self, q: Tensor, new: tuple[Tensor, Tensor] | None = None, **options) -> float:
        """Compare attend with fp64; -> the largest error relative to the largest value."""
        out = attend(q, self.cache.storage, *(new or ()), **options)
        assert out.dtype == q.dtype
        assert out.shape == q.shape
        worst = 0.0
        for row, (k, v) in enumerate(self.rows):
            at, stored = slice(row, row + 1), k.shape[2]
            if new is not None:
                k, v = (torch.cat([x, y[at].float()], dim=2) for x, y in zip((k, v), new, strict=True))
            if not k.shape[2]:
                assert not out[at].any(), "a query that sees nothing gives zeros"
                continue
            seen = torch.arange(k.shape[2]) < stored + 1 + torch.arange(q.shape[2])[:, None]
            expected = exact(q[at], k, v, seen, **options)
            error = ((out[at].double() - expected).abs().max() / v.abs().max()).item()
            assert error <= tolerance(q[at], k, **options) + torch.finfo(q.dtype).eps / 2, f"row {row}: {error}"
            worst = max(worst, error)
        return worst


def exact(q, k, v, seen, scale=None, softcap=None, sink_logits=None) -> Tensor:
    """softmax over the logits seen, and over one more logit per head, times v: fp64, one row of the batch."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    logits = q.double() @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen, -torch.inf)
    if sink_logits is not None:
        extra = sink_logits.double()[None, :, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, extra], dim=-1)
    return logits.softmax(-1)[..., : k.shape[2]] @ v


def tolerance(q, k, scale=None, softcap=None, sink_logits=None) -> float:
    """Relative to the largest value, what fp32 may cost.

    A logit is a sum of D products, whose D roundings, of at most sum(|q| |k|) * scale each, add up like a random
    walk. It moves each weight by as much, relative, and the sum of weights again. softcap adds the error of tanh,
    4 roundings. The weights' sums are blocked, which keeps their error within 16 roundings at any length.
    """
    group, D = q.shape[1] // k.shape[1], q.shape[-1]
    size = q.double().abs() @ k.double().abs().repeat_interleave(group, dim=1).transpose(-1, -2)
    logit = D**0.5 * size.max().item() * (D**-0.5 if scale is None else scale) + 4 * (softcap or 0)
    return ULP * (2 * logit + 16)


def random_case(config, B, H, T, D, dtype=torch.float16, seed=0, lengths=None) -> Case:
    k, v = (randn(B, H, T, D, dtype=dtype, seed=seed + i) for i in (1, 2))
    return Case(config, k, v, lengths)


# --- shapes ---


@pytest.mark.parametrize("ratio", [1, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("M", [1, 2, 5])
def test_query_groups(ratio, M):
    H = 1 if ratio > 4 else 2
    case = random_case(KiviConfig(residual_length=16, sink_length=2), 2, H, 300, 64, seed=ratio)
    case.check(randn(2, H * ratio, M, 64, seed=ratio))


@pytest.mark.parametrize("D", [16, 20, 33, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize(("k_bits", "v_bits"), [(2, 2), (4, 8), (8, 4)])
def test_head_dims(D, group_size, k_bits, v_bits):
    config = KiviConfig(k_bits, v_bits, group_size, residual_length=3, sink_length=1)
    random_case(config, 1, 2, 280, D, seed=D).check(randn(1, 4, 2, D, seed=D))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_dtype", DTYPES, ids=str)
def test_dtypes(dtype, q_dtype):
    """The output has q's dtype, whatever the cache stores."""
    random_case(KiviConfig(residual_length=0), 2, 2, 300, 64, dtype).check(randn(2, 4, 1, 64, dtype=q_dtype))


@pytest.mark.parametrize("M", [1, 2, 3, 8, 16, 17, 33])
def test_numbers_of_queries(M):
    """Without new tokens every query sees all that is stored; with them, those up to itself as well."""
    case = random_case(KiviConfig(residual_length=0, sink_length=4), 2, 2, 270, 80, seed=M)
    q = randn(2, 6, M, 80, seed=M)
    case.check(q)
    case.check(q, tuple(randn(2, 2, M, 80, dtype=torch.float16, seed=seed) for seed in (5, 6)))


def test_more_new_tokens_than_one_block_takes():
    case = random_case(KiviConfig(residual_length=0), 1, 1, 150, 16)
    case.check(randn(1, 2, 1100, 16), tuple(randn(1, 1, 1100, 16, dtype=torch.float16, seed=s) for s in (5, 6)))


@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("sinks", [0, 6])
def test_ragged_rows(sinks, new):
    """Rows of any lengths, one of them empty: it gives zeros, or its own new tokens, and never a NaN."""
    lengths = [0, 1, 4, 7, 128, 129, 300, 700]
    case = random_case(KiviConfig(residual_length=20, sink_length=sinks), 8, 2, 700, 64, lengths=lengths)
    kv = tuple(randn(8, 2, new, 64, dtype=torch.float16, seed=s) for s in (5, 6)) if new else None
    case.check(randn(8, 4, max(new, 1), 64, seed=9), kv)
    case.check(randn(8, 4, max(new, 1), 64, seed=9), kv, sink_logits=torch.tensor([0.0, 2.0, -3.0, 30.0]))


def test_an_empty_cache_gives_zeros():
    cache = LayerCache(KiviConfig(), 2, 1, 16)
    assert not attend(randn(2, 2, 3, 16), cache.storage).any()
    assert not attend(randn(2, 2, 3, 16), cache.storage, sink_logits=torch.zeros(2)).any()


@pytest.mark.parametrize("shape", [(2, 4, 1, 20), (1, 4, 1, 16), (2, 3, 1, 16)])
def test_wrong_queries_are_refused(shape):
    case = random_case(KiviConfig(), 2, 2, 10, 16)
    with pytest.raises(ValueError, match=r"^q: expected .*, got "):
        attend(torch.zeros(shape), case.cache.storage)


# --- options ---


@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
@pytest.mark.parametrize("sink_logits", [None, -20.0, 0.0, 5.0, 80.0])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_scale_softcap_and_sink_logits(softcap, sink_logits, scale):
    case = random_case(KiviConfig(residual_length=5), 2, 2, 290, 32)
    sinks = None if sink_logits is None else sink_logits + torch.tensor([0.0, 1.0, -2.0, 3.0])
    new = tuple(randn(2, 2, 4, 32, dtype=torch.float16, seed=s) for s in (5, 6))
    case.check(3 * randn(2, 4, 4, 32), new, scale=scale, softcap=softcap, sink_logits=sinks)


# --- hard values ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("bias", [300, 900, 60_000])
@pytest.mark.parametrize("bits", [2, 8])
def test_biased_key_channels(bias, bits, rotary, dtype):
    """A few channels far from zero, as some models' first layers have, constant or turning with the position."""
    k, v = randn(1, 2, 400, 64, seed=1), randn(1, 2, 400, 64, dtype=dtype, seed=2)
    k[..., 3] += bias * (torch.arange(400).cos() if rotary else 1)
    k[..., 40] -= bias * (torch.arange(400).sin() if rotary else 1)
    Case(KiviConfig(bits, bits, residual_length=16), k.to(dtype), v).check(randn(1, 4, 2, 64, seed=3))


def test_keys_over_the_whole_fp16_range():
    """+-60,000 in one group: no inf, no NaN, and the neighbouring channels keep their say."""
    k, v = randn(1, 2, 400, 64, seed=1), randn(1, 2, 400, 64, dtype=torch.float16, seed=2)
    k[..., 7] = 60_000 * randn(1, 2, 400, seed=4).sign()
    q = randn(1, 4, 2, 64, seed=3)
    q[..., 7] *= 1e-4  # logits of a few units, so that every token counts
    Case(KiviConfig(residual_length=16), k.half(), v).check(q)
    Case(KiviConfig(residual_length=16), k.half(), v).check(randn(1, 4, 2, 64, seed=3))


@pytest.mark.parametrize("size", [1e-3, 2000.0])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_small_and_large_values(size, bits):
    k, v = randn(1, 2, 400, 64, dtype=torch.float16, seed=1), size * randn(1, 2, 400, 64, seed=2)
    Case(KiviConfig(bits, bits, residual_length=16), k, v.half()).check(randn(1, 4, 2, 64, seed=3))


def test_value_groups_whose_range_overflows_fp32():
    """Finite values of +-3e38 in an fp32 cache come out finite, as dequantize gives them."""
    k, v = randn(1, 1, 300, 16, seed=1), randn(1, 1, 300, 16, seed=2)
    v[0, 0, 3] = 3e38 * randn(16, seed=3).sign()
    Case(KiviConfig(residual_length=0), k, v).check(randn(1, 1, 1, 16, seed=4))


# --- rows do not meet ---


def ragged_pair(config: KiviConfig, dtype: torch.dtype, poison) -> tuple[LayerCache, LayerCache]:
    """A row of 100 clean tokens beside one of 300 tokens that poison has changed; and the clean row alone."""
    k, v = (randn(2, 1, 300, 32, dtype=dtype, seed=seed) for seed in (1, 2))
    poison(k[0], v[0])
    both, alone = (LayerCache(config, B, 1, 32, dtype) for B in (2, 1))
    both.append(k, v, torch.arange(300) < torch.tensor([[300], [100]]))
    alone.append(k[1:, :, :100], v[1:, :, :100])
    return both, alone


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [5, 299])
def test_unchecked_bad_values_stay_in_their_row(where, bad):
    def poison(k: Tensor, v: Tensor) -> None:
        k[:, where, 3] = v[:, where, 4] = bad

    both, alone = ragged_pair(KiviConfig(residual_length=0, checked=False), torch.float16, poison)
    q = randn(2, 2, 1, 32, seed=3)
    # the same fp32 sums, but maybe in another order
    torch.testing.assert_close(attend(q, both.storage)[1:], attend(q[1:], alone.storage), rtol=0, atol=1e-5)


def test_huge_values_stay_in_their_row():
    """Finite, so accepted: a value group of +-3e38 in one row leaves a row without pages as it is."""

    def poison(k: Tensor, v: Tensor) -> None:
        v[:, 3] = 3e38 * randn(32, seed=7).sign()

    both, alone = ragged_pair(KiviConfig(residual_length=0), torch.float32, poison)
    q = randn(2, 2, 1, 32, seed=3)
    torch.testing.assert_close(attend(q, both.storage)[1:], attend(q[1:], alone.storage), rtol=0, atol=1e-5)


@pytest.mark.parametrize("edit", ["crop", "reset"])
def test_unchecked_bad_values_leave_with_their_token(edit):
    k, v = (randn(1, 1, 40, 32, dtype=torch.float16, seed=seed) for seed in (1, 2))
    bad = v.clone()
    bad[:, :, 30] = torch.nan
    cache = LayerCache(KiviConfig(checked=False), 1, 1, 32)
    cache.append(k, bad)
    if edit == "crop":
        cache.crop(10)
    else:
        cache.reset()
        cache.append(k[:, :, :10], v[:, :, :10])
    clean = LayerCache(KiviConfig(), 1, 1, 32)
    clean.append(k[:, :, :10], v[:, :, :10])
    q = randn(1, 2, 1, 32, seed=3)
    assert torch.equal(attend(q, cache.storage), attend(q, clean.storage))


# --- length ---


def test_error_does_not_grow_with_length():
    """Sums over 16,384 tokens are as exact as those over 512: accumulation does not lose what is small."""
    errors = {}
    for T in (512, 16_384):
        case = random_case(KiviConfig(), 1, 1, T, 64, seed=T)
        errors[T] = case.check(randn(1, 4, 8, 64, seed=T))
    # relative to the largest value; sums of random signs shrink with T, so their errors may only fall
    assert errors[16_384] <= 2 * errors[512] + 2 * ULP


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that an operation returns, views and in-place operations aside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        in_place = func.__name__.partition(".")[0].endswith("_")
        if not in_place and not getattr(func, "is_view", False):
            sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
            self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("M", [1, 16])
def test_scratch_does_not_grow_with_context(M):
    """The largest tensor made while attending is the same at 4,096 and 16,384 tokens, far from the whole cache."""
    B, H, D = 2, 8, 64
    largest, q, config = {}, randn(B, H, M, D, dtype=torch.float16), KiviConfig(residual_length=0)
    new = tuple(randn(B, H, M, D, dtype=torch.float16, seed=seed) for seed in (1, 2))
    for T in (4096, 16_384):
        cache = LayerCache(config, B, H, D)
        for _ in range(T // 2048):
            x = randn(B, H, 2048, D, dtype=torch.float16)
            cache.append(x, x)
        with LargestTensor() as record:
            attend(q, cache.storage, *new)
        largest[T] = record.elements
    assert largest[4096] == largest[16_384]
    assert largest[16_384] <= B * H * 16_384 * D // 4


def test_scratch_of_packing_does_not_grow_with_the_prompt():
    """A long prompt is packed a block of pages at a time, checked for NaN without a copy."""
    largest = {}
    for T in (4096, 16_384):
        x = randn(1, 4, T, 64, dtype=torch.float16)
        cache = LayerCache(KiviConfig(), 1, 4, 64, max_tokens=T)
        with LargestTensor() as record:
            cache.append(x, x)
        largest[T] = record.elements
    assert largest[4096] == largest[16_384]


# --- dense attention ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"scale": 0.3}, {"sink_logits": True}], ids=str)
@pytest.mark.parametrize("M", [1, 7, 50])
def test_dense_attention(M, options, dtype):
    """Causal over the newest tokens by default; a mask says otherwise."""
    if "sink_logits" in options:
        options = {"sink_logits": torch.tensor([0.0, 3.0, -3.0, 50.0])}
    q = randn(1, 4, M, 32, dtype=dtype, seed=1)
    k, v = (randn(1, 2, 50, 32, dtype=dtype, seed=seed) for seed in (2, 3))
    causal = torch.arange(50) <= 50 - M + torch.arange(M)[:, None]
    mask = randn(M, 50, seed=4) > 0
    mask[:, 0] = True
    # eps / 2 for the output, and as much for weights that torch's own attention narrows
    allowed = (tolerance(q, k, **options) + torch.finfo(dtype).eps) * v.abs().max().item()
    for given, seen in ((None, causal), (mask, mask), (mask[None, None], mask)):
        out = dense_attention(q, k, v, given, **options)
        assert out.dtype == dtype
        assert (out.double() - exact(q, k, v, seen, **options)).abs().max().item() <= allowed


def test_the_two_oracles_agree():
    q, k, v = randn(1, 4, 5, 32), randn(1, 2, 9, 32, seed=1), randn(1, 2, 9, 32, seed=2)
    seen = torch.arange(9) <= 4 + torch.arange(5)[:, None]
    # both in fp64
    torch.testing.assert_close(exact(q, k, v, seen), reference.attend(q, k, v, 32**-0.5), rtol=0, atol=1e-12)
