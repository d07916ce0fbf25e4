"""The tutorial's functions: its layouts, and the faults that its listing had."""

import pytest
import torch

from kivi_kv import reference
from kivi_kv.tutorial import pack_tensor, quant_kcache, quant_vcache, triton_bmm_fA_qB_outer, unpack_tensor
from oracle import assert_bitwise_equal, randn


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group_size", [32, 64])
def test_keys_and_values_come_in_the_tutorials_layouts(bits, group_size):
    B, nh, T, D = 2, 3, 128, 64
    feat = 32 // bits
    x = randn(B, nh, T, D, dtype=torch.float16)
    code, scale, mn = quant_kcache(x, group_size, bits)
    assert code.shape == (B, nh, T // feat, D)
    assert scale.shape == mn.shape == (B, nh, T // group_size, 1, D)
    codes = unpack_tensor(code, bits, 2)
    expected = reference.encode(x.transpose(2, 3), bits, group_size)
    assert_bitwise_equal(codes.transpose(2, 3), expected[0])
    assert_bitwise_equal(scale.squeeze(3).transpose(2, 3), expected[1])
    assert_bitwise_equal(mn.squeeze(3).transpose(2, 3), expected[2])

    code, scale, mn = quant_vcache(x, group_size, bits)
    assert code.shape == (B, nh, T, D // feat)
    assert scale.shape == mn.shape == (B, nh, T, D // group_size, 1)
    expected = reference.encode(x, bits, group_size)
    assert_bitwise_equal(unpack_tensor(code, bits, 3), expected[0])
    assert_bitwise_equal(scale.squeeze(-1), expected[1])


@pytest.mark.parametrize("pack_dim", [0, 1, 2, -1])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packing_along_any_dimension(bits, pack_dim):
    data = torch.randint(0, 2**bits, (32, 16, 48))
    code = pack_tensor(data, bits, pack_dim)
    assert code.shape[pack_dim] == data.shape[pack_dim] * bits // 32
    assert_bitwise_equal(unpack_tensor(code, bits, pack_dim), data.int())


@pytest.mark.parametrize("M", [1, 3])
@pytest.mark.parametrize("heads", [2, 8])
def test_every_batch_head_and_row_of_the_product(M, heads):
    """The listing computed batch and head 0 only, row 0 only, and refused grouped heads."""
    B, nh, T, D, bits, group_size = 2, 2, 160, 64, 2, 32
    k, v = randn(2, B, nh, T, D, dtype=torch.float16)
    q = randn(B, heads, M, D, dtype=torch.float16, seed=1)
    code, scale, mn = quant_kcache(k, group_size, bits)
    scales, zeros = (x.squeeze(3).transpose(2, 3) for x in (scale, mn))
    scores = triton_bmm_fA_qB_outer(group_size, q, code.transpose(2, 3), scales, zeros, bits)
    keys = reference.roundtrip(k.transpose(2, 3), bits, group_size).double().repeat_interleave(heads // nh, 1)
    expected = q.double() @ keys
    assert (scores - expected).norm() / expected.norm() < 2e-3

    p = torch.softmax(scores.float() * D**-0.5, -1).half()
    code, scale, mn = quant_vcache(v, group_size, bits)
    out = triton_bmm_fA_qB_outer(group_size, p, code, scale.squeeze(-1), mn.squeeze(-1), bits)
    expected = p.double() @ reference.roundtrip(v, bits, group_size).double().repeat_interleave(heads // nh, 1)
    assert (out - expected).norm() / expected.norm() < 2e-3


def test_constant_groups_are_exact():
    """The listing divided by their scale, 0, and the NaN's bits fell on other codes."""
    k = randn(1, 1, 64, 16, dtype=torch.float16)
    k[..., 3] = 7.0
    code, scale, mn = quant_kcache(k, 32, 2)
    assert not unpack_tensor(code, 2, 2)[..., 3].any()
    assert (scale[..., 3] == 0).all()
    assert (mn[..., 3] == 7).all()


def test_logits_beyond_fp16_are_held_at_its_ends():
    q = torch.full((1, 1, 1, 16), 100.0).half()
    k = torch.linspace(-1000, 1000, 32)[None, None, :, None].expand(1, 1, 32, 16).half()
    code, scale, mn = quant_kcache(k, 32, 8)
    scales, zeros = (x.squeeze(3).transpose(2, 3) for x in (scale, mn))
    scores = triton_bmm_fA_qB_outer(32, q, code.transpose(2, 3), scales, zeros, 8)
    assert scores.isfinite().all()
    assert scores.max() == 65504


def test_codes_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"codes: expected values from 0 to 3, got 0 to 4"):
        pack_tensor(torch.tensor([0, 4] * 8), 2, 0)
