import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from kivi_kv import fake_quantize, quantize_k, quantize_v
from oracle import DTYPES, assert_bitwise_equal, randint, randn, sample

AXES = ("tensor", "token", "channel")

every_axis = pytest.mark.parametrize("axis", AXES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def check(x, bits, group_size, axis):
    out = fake_quantize(x, bits, group_size, axis)
    assert_bitwise_equal(out, oracle.fake_quantize(x, bits, group_size, axis))
    return out


def test_by_hand():
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 10.0, 20.0, 30.0]])
    # one range 0..30, scale 10: 1, 2 and 3 are below half a step
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 10.0, 20.0, 30.0]])
    assert_bitwise_equal(fake_quantize(x, 2, None, "tensor"), expected)
    # each token has its own range: exact
    assert_bitwise_equal(fake_quantize(x, 2, 4, "token"), x)
    # each channel has two values, its range's ends: exact at one bit
    assert_bitwise_equal(fake_quantize(x, 1, 2, "channel"), x)
    # one bit per token: 1 / 3 -> 0, 2 / 3 -> 1
    expected = torch.tensor([[0.0, 0.0, 3.0, 3.0], [0.0, 0.0, 30.0, 30.0]])
    assert_bitwise_equal(fake_quantize(x, 1, 4, "token"), expected)


@pytest.mark.parametrize("bits", range(1, 9))
@every_dtype
@every_axis
def test_matches_the_loops(bits, dtype, axis):
    # 20 tokens and 24 channels in groups of 16: both last groups are ragged
    check(sample(2, 20, 24, dtype=dtype, seed=bits), bits, 16, axis)


@every_axis
@pytest.mark.parametrize("shape", [(5, 12), (3, 5, 12), (2, 3, 5, 12), (2, 1, 3, 5, 12)])
@pytest.mark.parametrize("group_size", [1, 5, 7, 12, 100])
def test_any_rank_and_any_group_size(axis, shape, group_size):
    out = check(sample(*shape, dtype=torch.float16, seed=group_size), 3, group_size, axis)
    assert out.shape == shape


@pytest.mark.parametrize("bits", [2, 4, 8])
@every_dtype
@pytest.mark.parametrize("group_size", [32, 64])
def test_equals_the_packed_quantizers(bits, dtype, group_size):
    x = sample(2, 2, 64, 80, dtype=dtype, seed=group_size)
    assert_bitwise_equal(
        fake_quantize(x, bits, group_size, "channel"), quantize_k(x, bits, group_size).dequantize()
    )
    assert_bitwise_equal(fake_quantize(x, bits, group_size, "token"), quantize_v(x, bits, group_size).dequantize())


@pytest.mark.parametrize("group_size", [None, 1, 32])
def test_the_tensor_axis_ignores_the_group_size(group_size):
    x = sample(2, 2, 10, 20, dtype=torch.float16)
    assert_bitwise_equal(fake_quantize(x, 4, group_size, "tensor"), fake_quantize(x, 4, None, "tensor"))


@every_axis
@every_dtype
@pytest.mark.parametrize("bits", [1, 2, 8])
@pytest.mark.parametrize("value", [0.0, -3.140625, 65280.0])
def test_constant_input_is_exact(axis, dtype, bits, value):
    x = torch.full((2, 20, 24), value, dtype=dtype)
    assert_bitwise_equal(fake_quantize(x, bits, 16, axis), x)


@every_axis
def test_ties_go_to_the_even_code(axis):
    values = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.0])
    x = values[None, :] if axis == "token" else values[:, None]
    expected = torch.tensor([0.0, 0.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 7.0]).reshape(x.shape)
    assert_bitwise_equal(fake_quantize(x, 3, 9, axis), expected)


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_groups_are_independent(axis):
    x = sample(2, 3, 40, 40, dtype=torch.float16)
    before = fake_quantize(x, 2, 16, axis)
    row = (1, 2, 17) if axis == "token" else (1, 2, slice(None), 17)
    x[row] = 60000 * (randint(0, 2, (40,)) * 2 - 1).half()
    after = fake_quantize(x, 2, 16, axis)
    rest = torch.ones(x.shape, dtype=torch.bool)
    rest[row] = False
    assert_bitwise_equal(after[rest], before[rest])
    assert after.isfinite().all()


@every_axis
@every_dtype
@pytest.mark.parametrize("bits", range(2, 9))
def test_the_whole_range_stays_finite(axis, dtype, bits):
    peak = torch.finfo(dtype).max
    x = ((2 * torch.rand(20, 24, generator=torch.Generator().manual_seed(bits)) - 1) * peak).to(dtype)
    x[::2, ::2], x[1::2, ::2], x[::2, 1::2] = peak, -peak, -peak
    assert check(x, bits, 16, axis).isfinite().all()


@every_axis
@every_dtype
def test_one_bit_over_the_whole_range_stays_finite(axis, dtype):
    # the range itself is the scale here, and no dtype holds twice its own maximum
    peak = torch.finfo(dtype).max
    x = torch.full((4, 16), peak, dtype=dtype)
    x[::2, ::2], x[1::2, 1::2] = -peak, -peak
    assert fake_quantize(x, 1, 16, axis).isfinite().all()


@every_axis
def test_strided_input(axis):
    x = sample(2, 20, 3, 48, dtype=torch.bfloat16)
    for view in (
        x.transpose(1, 2),
        x.transpose(1, 2)[..., ::2],
        x.transpose(1, 3),
        x[:, :, :1].expand(-1, -1, 4, -1),
    ):
        before = view.clone()
        out = fake_quantize(view, 3, 16, axis)
        assert_bitwise_equal(out, fake_quantize(view.contiguous(), 3, 16, axis))
        assert_bitwise_equal(view, before)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    bits=st.integers(1, 8),
    axis=st.sampled_from(AXES),
    group_size=st.integers(1, 40),
    T=st.integers(1, 40),
    D=st.integers(1, 40),
    seed=st.integers(0, 2**31 - 1),
)
def test_error_and_number_of_levels(bits, axis, group_size, T, D, seed):
    x = randn(T, D, seed=seed)
    out = fake_quantize(x, bits, group_size, axis)
    groups = {"tensor": 1, "token": T * -(-D // group_size), "channel": D * -(-T // group_size)}[axis]
    assert out.unique().numel() <= groups * 2**bits
    # half a step of a group's range, which is never wider than the tensor's, and fp32 rounding
    spread = (x.max() - x.min()).item()
    bound = spread / (2**bits - 1) / 2 + 16 * 2.0**-24 * x.abs().max().item()
    assert (out - x).abs().max().item() <= bound


@pytest.mark.parametrize("bits", [0, 9, 16, -1, 2.5])
@every_axis
def test_unsupported_bits_are_refused(bits, axis):
    with pytest.raises(ValueError, match=rf"bits.*{bits}"):
        fake_quantize(torch.ones(4, 16), bits, 16, axis)


@pytest.mark.parametrize("axis", ["row", "", "Token", None, 0])
def test_unknown_axes_are_refused(axis):
    with pytest.raises(ValueError, match="axis"):
        fake_quantize(torch.ones(4, 16), 2, 16, axis)


@pytest.mark.parametrize("group_size", [0, -1, 16.0, None])
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_bad_group_sizes_are_refused(group_size, axis):
    with pytest.raises(ValueError, match=rf"group_size.*{group_size}"):
        fake_quantize(torch.ones(4, 16), 2, group_size, axis)
