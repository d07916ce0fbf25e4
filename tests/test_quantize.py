import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from kivi_kv import quantize_k, quantize_v, unpack
from oracle import DTYPES, assert_bitwise_equal, randint, randn, sample

BITS = (2, 4, 8)
GROUPS = (32, 64, 128)
FP16_MAX = 65504.0
SMALLEST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133, torch.float32: 2.0**-149}
QUANTIZERS = {"k": quantize_k, "v": quantize_v}
EXPECTED = {"k": oracle.quantize_k, "v": oracle.quantize_v}

every_bits = pytest.mark.parametrize("bits", BITS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
both = pytest.mark.parametrize("side", ["k", "v"])


def codes_of(out):
    return unpack(out.code, out.bits, -1)


def assert_same(actual, expected, at=..., expected_at=...):
    """Equal stored bits, or equal bits of the parts picked by at and expected_at."""
    for name in ("code", "scale", "zero"):
        assert_bitwise_equal(getattr(actual, name)[at], getattr(expected, name)[expected_at])


def check(side, x, bits, group_size):
    """Compare every stored bit and every dequantized bit with the oracle's; -> the package's result."""
    out = QUANTIZERS[side](x, bits, group_size)
    expected = EXPECTED[side](x, bits, group_size)
    assert_same(out, expected)
    assert_bitwise_equal(out.dequantize(), expected.values)
    return out


def along_tokens(rows, dtype):
    """rows of values, one per channel, as a K [1, 1, T, D] of 16 or more channels."""
    k = torch.as_tensor(rows, dtype=torch.float64).T.to(dtype)
    return k.repeat(1, -(-16 // k.shape[1]))[None, None]


# --- the oracle itself ---


def test_oracle_on_a_group_worked_by_hand():
    # fp16, 2 bits: range 1 -> scale 1/3 = 0.33325195 in fp16; (0.5 - 0) / 0.33325 = 1.5004 -> 2
    xs = [np.float32(x) for x in (0.0, 0.125, 0.5, 1.0)]
    codes, scale, zero = oracle.quantize_group(xs, 2, torch.float16)
    assert (codes, float(scale), float(zero)) == ([0, 0, 2, 3], 0.333251953125, 0.0)
    # 3 * 0.333251953125 = 1 - 2^-12, half-way between two fp16 numbers: 1 is the even one
    assert float(oracle.dequantize_value(3, scale, zero, torch.float32)) == 0.999755859375
    assert float(oracle.dequantize_value(3, scale, zero, torch.float16)) == 1.0
    # bf16, 8 bits: range 10 -> 10 / 255 = 0.0392157 -> 0.039306640625; (2 - -3) / that = 127.2
    xs = [np.float32(x) for x in (-3.0, 2.0, 7.0)]
    codes, scale, zero = oracle.quantize_group(xs, 8, torch.bfloat16)
    assert (codes, float(scale), float(zero)) == ([0, 127, 254], 0.039306640625, -3.0)


def test_oracle_casts_agree_with_torch():
    wide = randn(300, seed=3) * 10.0 ** randint(-9, 9, (300,), 4)
    ends = torch.tensor([0.0, 65519, 65520, 7e4, 3.38e38, 3.39e38, 3.4e38])
    ties = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 2**-25, 3 * 2**-25, 2.0**-134])
    for dtype in DTYPES:
        for x in torch.cat([wide, ends, -ends, ties, -ties]):
            assert float(oracle.round_to(np.float32(x), dtype)) == x.to(dtype).item()


# --- bit for bit ---


@every_bits
@every_dtype
@both
@pytest.mark.parametrize("group_size", GROUPS)
def test_matches_the_loops(side, bits, dtype, group_size):
    x = sample(2, 2, 128, 128, dtype=dtype, seed=bits + group_size)
    x = x[..., :16] if side == "k" else x[:, :, :9]
    out = check(side, x, bits, group_size)
    B, H, T, D = x.shape
    rows, length = (D, T) if side == "k" else (T, D)
    assert out.code.shape == (B, H, rows, length * bits // 32)
    assert out.scale.shape == out.zero.shape == (B, H, rows, length // group_size)
    assert (out.bits, out.group_size) == (bits, group_size)


@both
@pytest.mark.parametrize("D", [16, 64, 80, 96, 112, 256])
def test_head_dims(side, D):
    check(side, sample(1, 1, 32, D, dtype=torch.bfloat16, seed=D), 2, 32)


@every_bits
@pytest.mark.parametrize(
    ("D", "group_size", "groups"),
    [(16, 32, 1), (48, 32, 2), (80, 32, 3), (96, 64, 2), (112, 32, 4), (112, 64, 2), (112, 128, 1)],
)
def test_v_with_a_ragged_last_group(bits, D, group_size, groups):
    out = check("v", sample(1, 2, 5, D, dtype=torch.float16, seed=D), bits, group_size)
    assert out.scale.shape == out.zero.shape == (1, 2, 5, groups)
    assert out.code.shape == (1, 2, 5, D * bits // 32)


@every_bits
@both
@pytest.mark.parametrize("group_size", [8, 16, 48])
def test_groups_that_share_or_straddle_words(side, bits, group_size):
    x = sample(1, 2, 96, 48, dtype=torch.float16, seed=group_size)
    check(side, x[:, :, :, :16] if side == "k" else x[:, :, :7], bits, group_size)


@pytest.mark.parametrize("T", [1, 2, 33])
def test_v_takes_any_number_of_tokens(T):
    check("v", sample(1, 1, T, 64, dtype=torch.bfloat16, seed=T), 2, 32)


@every_bits
@every_dtype
@both
def test_ties_go_to_the_even_code(side, bits, dtype):
    top = min(2**bits - 1, 127)  # 127.5 is bf16's last half
    row = [i / 2 for i in range(2 * top)] + [2**bits - 1]  # scale 1
    row = torch.tensor(row + (-len(row) % 128) * [0.0])
    x = along_tokens(row[None], dtype)
    out = check(side, x if side == "k" else x.transpose(2, 3), bits, len(row))
    assert out.scale.eq(1).all()
    halves = codes_of(out)[0, 0, 0, 1 : 2 * top : 2]
    assert halves.tolist() == [2 * ((i + 1) // 2) for i in range(top)]


@every_bits
@every_dtype
def test_ties_survive_scales_without_an_exact_reciprocal(bits, dtype):
    # x = (i + 1/2) * s is exact, so x / s is a tie; x * (1 / s) often is not
    digits = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}[dtype]
    top = 2**bits - 1
    odd = [s for s in range(1, 100, 2) if s * top < 2**digits]
    halves = [i + 0.5 for i in range(top) if (2 * i + 1) * odd[-1] < 2**digits]
    steps = torch.tensor([0.0, top, *halves], dtype=torch.float64)
    steps = torch.cat([steps, steps.new_zeros(-len(steps) % 32)])
    k = along_tokens([(steps * s).tolist() for s in odd], dtype)
    out = check("k", k, bits, len(steps))
    even = [int(half + 0.5) // 2 * 2 for half in halves]
    assert codes_of(out)[0, 0, :, 2 : 2 + len(even)].eq(torch.tensor(even)).all()


# --- constant and tiny groups ---


@every_bits
@every_dtype
@both
@pytest.mark.parametrize("value", [0.0, 1.0, -3.140625, 65280.0, 2.0**-24])
def test_constant_groups_are_exact(side, bits, dtype, value):
    x = torch.full((1, 1, 32, 32), value, dtype=dtype)
    out = check(side, x, bits, 32)
    assert out.scale.eq(0).all()
    assert out.code.eq(0).all()
    assert_bitwise_equal(out.dequantize(), x)


@every_bits
@both
def test_a_constant_group_leaves_its_neighbours_alone(side, bits):
    x = sample(1, 2, 64, 64, dtype=torch.float16)
    if side == "k":
        x[0, 0, :, 5] = 7.25
        x[0, 1, 32:, 9] = 0
    else:
        x[0, 0, 5] = 7.25
        x[0, 1, 9, 32:] = 0
    values = check(side, x, bits, 32).dequantize()
    assert values[x == 7.25].eq(7.25).all()
    assert values[x == 0].eq(0).all()


@every_bits
@both
def test_ranges_whose_scale_underflows_count_as_constant(side, bits):
    step = SMALLEST[torch.float16]
    x = (randint(0, 2, (1, 1, 64, 32), 1) * step + 2.0**-14).half()
    out = check(side, x, bits, 32)
    assert out.scale.eq(0).all()
    assert out.code.eq(0).all()
    assert (out.dequantize().double() - x.double()).abs().max() <= step


@every_bits
@every_dtype
@both
def test_subnormal_values(side, bits, dtype):
    step = SMALLEST[dtype]
    x = (randint(-300, 300, (1, 2, 64, 32), bits).double() * step).to(dtype)
    x[:, :, :32] = (randint(-3, 4, (1, 2, 32, 32), bits).double() * step).to(dtype)
    check(side, x, bits, 32)


# --- large values ---


@every_bits
@both
def test_fp16_near_sixty_thousand(side, bits):
    x = sample(1, 2, 64, 64, dtype=torch.float16)
    alone = QUANTIZERS[side](x, bits, 32)
    signs = randint(0, 2, (2, 64), 5) * 2 - 1
    row = x[0, :, :, 3] if side == "k" else x[0, :, 3, :]
    row[:] = (signs * (60000 + 300 * randn(2, 64, seed=6))).half()
    out = check(side, x, bits, 32)
    assert out.scale.isfinite().all()
    assert out.dequantize().isfinite().all()
    quiet = (slice(None), slice(None), torch.arange(64) != 3)
    assert_same(out, alone, quiet, quiet)


@every_bits
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_keys_with_large_biases_on_some_channels(bits, dtype):
    k = randn(1, 2, 64, 32, dtype=torch.float32, seed=8)
    k[..., [1, 7, 30]] += torch.tensor([600.0, -750.0, 900.0])
    k = k.to(dtype)
    values = check("k", k, bits, 32).dequantize()
    assert values.isfinite().all()
    # a code is off by half a step of the channel's own range, whatever the bias; the cast adds its ulp
    spread = k.double().amax(2, keepdim=True) - k.double().amin(2, keepdim=True)
    ulps = 2 * k.double().abs().amax(2, keepdim=True) * torch.finfo(dtype).eps
    assert ((values.double() - k.double()).abs() <= 0.51 * spread / (2**bits - 1) + ulps).all()


@every_bits
@both
def test_the_whole_fp16_range_dequantizes_to_finite_values(side, bits):
    x = (randn(1, 1, 64, 32, seed=2) * 20000).half()
    x[..., ::2, ::2] = FP16_MAX
    x[..., 1::2, ::2] = -FP16_MAX
    x[..., ::2, 1::2] = -FP16_MAX
    out = check(side, x, bits, 32)
    values = out.dequantize()
    assert values.isfinite().all()
    assert values.max() <= FP16_MAX
    # the stored scales 43680, 8736 and 514 are rounded up: only a wider type may show the overshoot
    assert out.dequantize(torch.float32).max() == {2: 65536, 4: 65536, 8: 65566}[bits]


@every_bits
@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("peak", [1.75e38, 3e38, "max"])
def test_ranges_that_overflow_fp32(side, bits, dtype, peak):
    peak = torch.finfo(dtype).max if peak == "max" else peak
    x = sample(1, 2, 64, 32, dtype=dtype, seed=4)
    uniform = 2 * torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) - 1
    wide = x[0, 0, :32]  # one group per row, and one per column: each gets both ends
    wide[:] = (uniform * peak).to(dtype)
    i = torch.arange(32)
    wide[i, i], wide[i, (i + 1) % 32] = peak, -peak
    # halving the whole tensor instead of the one group would lose the last bit of these
    x[0, 1] = (randint(0, 900, (64, 32), 1).double() * SMALLEST[dtype]).to(dtype)
    out = check(side, x, bits, 32)
    values = out.dequantize()
    assert out.scale.isfinite().all()
    assert values.isfinite().all()
    error = (values.double() - x.double())[0, 0, :32].abs().max()
    assert error <= peak / (2**bits - 1) + 2 * peak * torch.finfo(dtype).eps  # half a step and roundings


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
