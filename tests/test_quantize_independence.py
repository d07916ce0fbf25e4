"""Groups are independent: of the batch, of strides, of NaN next door; errors bounded; bad arguments refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kivi_kv import quantize_k, quantize_v
from oracle import DTYPES, assert_bitwise_equal, randint, randn, sample
from quantizing import BITS, FP16_MAX, QUANTIZERS, assert_same, both, check, codes_of, every_bits, every_dtype

# --- independence and strides ---


@every_bits
@both
def test_a_row_does_not_depend_on_its_batch(side, bits):
    quantize = QUANTIZERS[side]
    rows = sample(4, 3, 64, 64, dtype=torch.float16, seed=bits)
    rows[1] *= 100
    rows[2] = 0
    rows[3, :, ::2], rows[3, :, 1::2] = FP16_MAX, -FP16_MAX
    batch = quantize(rows, bits, 32)
    for b in range(4):
        assert_same(batch, quantize(rows[b : b + 1], bits, 32), slice(b, b + 1))
        for h in range(3):
            head = quantize(rows[b : b + 1, h : h + 1], bits, 32)
            assert_same(batch, head, (slice(b, b + 1), slice(h, h + 1)))
    order = torch.tensor([2, 0, 3, 1])
    assert_same(quantize(rows[order], bits, 32), batch, ..., order)


@every_bits
@both
def test_tokens_do_not_depend_on_later_ones(side, bits):
    x = sample(1, 2, 128, 32, dtype=torch.float16, seed=bits)
    whole = QUANTIZERS[side](x, bits, 32)
    parts = [QUANTIZERS[side](part, bits, 32) for part in x.split([96, 32], 2)]
    for name in ("code", "scale", "zero"):
        joined = torch.cat([getattr(part, name) for part in parts], 3 if side == "k" else 2)
        assert_bitwise_equal(getattr(whole, name), joined)


@every_bits
@both
def test_strided_inputs_equal_contiguous_ones(side, bits):
    projection = sample(2, 64, 4, 64, dtype=torch.bfloat16, seed=bits)  # [B, T, H, D]
    wide = sample(2, 2, 128, 128, dtype=torch.bfloat16, seed=bits)
    views = [
        projection.transpose(1, 2),
        projection[:, :, 1:3].transpose(1, 2),
        wide[:, :, ::2, ::2],
        wide.transpose(2, 3)[:, :, :64],
        wide[:, :1, :64, 64:].expand(-1, 3, -1, -1),
    ]
    for view in views:
        before = view.clone()
        out = QUANTIZERS[side](view, bits, 32)
        assert_same(out, QUANTIZERS[side](view.contiguous(), bits, 32))
        assert_bitwise_equal(view, before)


# --- NaN and infinities ---


@both
@every_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_refused(side, dtype, bad):
    x = sample(2, 2, 64, 32, dtype=dtype)
    x[1, 0, 40, 17] = bad
    for options in ({}, {"checked": True}):
        with pytest.raises(ValueError, match=rf"\b{side}\b"):
            QUANTIZERS[side](x, 2, 32, **options)


@both
@every_bits
@every_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("group_size", [8, 32])
def test_unchecked_nan_damages_only_its_own_group(side, bits, dtype, bad, group_size):
    x = sample(2, 2, 64, 32, dtype=dtype, seed=bits)
    clean = QUANTIZERS[side](x, bits, group_size)
    assert_same(QUANTIZERS[side](x, bits, group_size, checked=False), clean)
    b, h, t, d = 1, 0, 35, 17
    x[b, h, t, d] = bad
    out = QUANTIZERS[side](x, bits, group_size, checked=False)
    row, at = (d, t) if side == "k" else (t, d)
    group = at // group_size
    for after, before, width in (
        (codes_of(out), codes_of(clean), group_size),
        (out.scale, clean.scale, 1),
        (out.zero, clean.zero, 1),
    ):
        mine = torch.zeros(before.shape, dtype=torch.bool)
        mine[b, h, row, group * width : (group + 1) * width] = True
        assert_bitwise_equal(after[~mine], before[~mine])


# --- dequantize, nbytes ---


@every_bits
@every_dtype
@both
def test_dequantize_to_another_dtype(side, bits, dtype):
    out = QUANTIZERS[side](sample(1, 2, 64, 32, dtype=dtype, seed=3), bits, 32)
    scale, zero = (x.float().repeat_interleave(32, -1) for x in (out.scale, out.zero))
    exact = codes_of(out).float() * scale + zero
    exact = exact.transpose(2, 3) if side == "k" else exact
    for target in DTYPES:
        assert_bitwise_equal(out.dequantize(target), exact.to(target))
    assert out.dequantize().dtype == dtype


@both
def test_dequantize_clamps_to_the_narrower_dtype(side):
    x = sample(1, 1, 32, 32, dtype=torch.float32)
    x[..., ::2, ::2], x[..., 1::2, ::2] = 1e6, -1e6
    out = QUANTIZERS[side](x, 2, 32)
    assert out.dequantize(torch.float16).isfinite().all()
    assert out.dequantize(torch.float16).abs().max() == FP16_MAX
    assert out.dequantize().abs().max() > 9e5


@every_bits
@every_dtype
def test_nbytes_are_the_bytes_of_the_three_tensors(bits, dtype):
    element = torch.finfo(dtype).bits // 8
    k = quantize_k(sample(2, 3, 128, 80, dtype=dtype), bits, 64)
    assert k.nbytes == 2 * 3 * 80 * (128 * bits // 8 + 2 * (128 // 64) * element)
    v = quantize_v(sample(2, 3, 7, 80, dtype=dtype), bits, 32)
    assert v.nbytes == 2 * 3 * 7 * (80 * bits // 8 + 2 * 3 * element)
    for out in (k, v):
        assert out.nbytes == sum(x.numel() * x.element_size() for x in (out.code, out.scale, out.zero))


# --- properties ---


def half_ulp(scale, dtype):
    """Most that rounding a scale to dtype can have moved it; scale 0 stands for all that underflowed."""
    info = torch.finfo(dtype)
    exponent = scale.double().clamp_min(info.tiny).log2().floor()
    return info.eps * 2.0**exponent / 2


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    side=st.sampled_from(["k", "v"]),
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(DTYPES),
    group_size=st.sampled_from([16, 32, 64]),
    exponent=st.integers(-20, 12),
    offset=st.sampled_from([0.0, 1.0, -900.0, 3e4]),
    seed=st.integers(0, 2**31 - 1),
)
def test_error_bound(side, bits, dtype, group_size, exponent, offset, seed):
    x = (randn(1, 2, 64, 64, seed=seed) * 2.0**exponent + offset).to(dtype)
    out = QUANTIZERS[side](x, bits, group_size)
    codes, top = codes_of(out), 2**bits - 1
    assert codes.min() >= 0
    assert codes.max() <= top
    # Not clamped: the code is the nearest step, off by scale / 2.
    # Clamped (the stored scale is below range / top, by half an ulp at most): off by
    # range - top * scale = top * (range / top - scale) <= top * half_ulp.
    # Three fp32 roundings (subtract, divide, and the division that made the scale) and two of
    # dequantize, each relative to at most |x| or the range, both <= 2 * max|x|: 16 * 2^-24 * max|x|.
    scale = out.scale.double().repeat_interleave(group_size, -1)
    bound = torch.maximum(scale / 2, top * half_ulp(scale, dtype)) + 16 * 2.0**-24 * x.double().abs().max()
    bound = bound.transpose(2, 3) if side == "k" else bound
    error = (out.dequantize(torch.float32).double() - x.double()).abs()
    assert (error <= bound).all()


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    side=st.sampled_from(["k", "v"]),
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_any_finite_bits_match_the_loops(side, bits, dtype, data):
    size = torch.finfo(dtype).bits
    seed = data.draw(st.integers(0, 2**31 - 1))
    raw = randint(-(2 ** (size - 1)), 2 ** (size - 1), (1, 1, 32, 32), seed)
    x = raw.to(torch.int16 if size == 16 else torch.int32).view(dtype)
    x = torch.where(x.isfinite() & (x != 0), x, torch.ones_like(x))
    check(side, x[..., :16] if side == "k" else x[:, :, :8], bits, 32)


# --- errors ---


@both
@pytest.mark.parametrize("bits", [0, 1, 3, 5, 16])
def test_unsupported_bits_are_refused(side, bits):
    with pytest.raises(ValueError, match=rf"bits.*{bits}"):
        QUANTIZERS[side](sample(1, 1, 32, 32, dtype=torch.float16), bits, 32)


@both
@pytest.mark.parametrize("group_size", [0, -32, 32.0, "32", None])
def test_bad_group_sizes_are_refused(side, group_size):
    with pytest.raises(ValueError, match=rf"group_size.*{group_size}"):
        QUANTIZERS[side](sample(1, 1, 32, 32, dtype=torch.float16), 2, group_size)


@both
@pytest.mark.parametrize("name", ["float64", "int32", "int8"])
def test_other_dtypes_are_refused(side, name):
    with pytest.raises(ValueError, match=rf"\b{side}\b.*{name}"):
        QUANTIZERS[side](torch.ones(1, 1, 32, 32, dtype=getattr(torch, name)), 2, 32)


@both
@pytest.mark.parametrize("shape", [(32,), (32, 32), (1, 32, 32), (1, 1, 1, 32, 32)])
def test_other_ranks_are_refused(side, shape):
    with pytest.raises(ValueError, match=rf"\b{side}\b"):
        QUANTIZERS[side](torch.ones(shape, dtype=torch.float16), 2, 32)


@both
@pytest.mark.parametrize("D", [4, 8, 15])
def test_head_dims_below_16_are_refused(side, D):
    with pytest.raises(ValueError, match=rf"\b({side}|D|head_dim)\b.*{D}"):
        QUANTIZERS[side](torch.ones(1, 1, 32, D, dtype=torch.float16), 8, 4)


@pytest.mark.parametrize(("bits", "group_size", "T"), [(2, 32, 48), (2, 32, 1), (2, 24, 24), (4, 4, 12), (8, 3, 6)])
def test_k_whose_tokens_do_not_fill_groups_or_words_is_refused(bits, group_size, T):
    with pytest.raises(ValueError, match=rf"\b(k|T|tokens)\b.*{T}"):
        quantize_k(torch.ones(1, 1, T, 32, dtype=torch.float16), bits, group_size)


@pytest.mark.parametrize(("bits", "D"), [(2, 24), (2, 40), (4, 20), (8, 18)])
def test_v_whose_channels_do_not_fill_words_is_refused(bits, D):
    with pytest.raises(ValueError, match=rf"\b(v|D|head_dim|channels)\b.*{D}"):
        quantize_v(torch.ones(1, 1, 5, D, dtype=torch.float16), bits, 32)
