"""The number format, bit for bit, at ordinary and extreme values."""

import numpy as np
import pytest
import torch

import oracle
from oracle import DTYPES, assert_bitwise_equal, randint, randn, sample
from quantizing import (
    FP16_MAX,
    GROUPS,
    QUANTIZERS,
    SMALLEST,
    along_tokens,
    assert_same,
    both,
    check,
    codes_of,
    every_bits,
    every_dtype,
)

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
