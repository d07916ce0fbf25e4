"""packed_matmul's kernel against fp64 over the values that the packed matrix represents."""

import pytest
import torch
from torch import Tensor

from kivi_kv import Packed, packed_matmul, quantize_k, quantize_v
from oracle import randn

LIMIT = {torch.float16: 2e-3, torch.bfloat16: 5e-3}


def values(packed: Packed) -> Tensor:
    """The packed matrix [B, H, K, N] in fp64."""
    x = packed.dequantize(torch.float64)
    return x.transpose(-1, -2) if packed.axis == "tokens" else x


def check(a: Tensor, packed: Packed, **options) -> Tensor:
    fields = (packed.code, packed.scale, packed.zero)
    out = packed_matmul(packed.group_size, a, *fields, packed.bits, backend="triton", **options)
    B, HQ, M, _ = a.shape
    matrix = values(packed)
    assert out.shape == (B, HQ, M, matrix.shape[-1])
    expected = a.double() @ matrix.repeat_interleave(HQ // matrix.shape[1], 1)
    error = ((out.double() - expected).norm() / expected.norm()).item()
    assert error <= LIMIT[a.dtype], error
    return out


def matrices(B, H, T, D, bits, group_size, dtype, device="cpu", bias=0.0) -> tuple[Packed, Packed]:
    k, v = (randn(B, H, T, D, seed=seed).to(device, dtype) for seed in (1, 2))
    k[..., 1::7] += bias
    return quantize_k(k, bits, group_size), quantize_v(v, bits, group_size)


@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128, 20])
def test_both_sides(dtype, bits, group_size):
    B, H, T, D = (1, 2, 640, 80) if group_size == 20 else (2, 2, 384, 80)
    keys, vals = matrices(B, H, T, D, bits, group_size, dtype)
    check(randn(B, 4, 1, D, dtype=dtype), keys)
    check(randn(B, 4, 1, T, seed=3).abs().to(dtype), vals)


@pytest.mark.parametrize("heads", [1, 3, 4, 8])
@pytest.mark.parametrize("M", [1, 2, 5, 16, 17, 33])
def test_rows(heads, M):
    keys, vals = matrices(1, 2, 96, 64, 2, 32, torch.float16)
    check(randn(1, 2 * heads, M, 64, dtype=torch.float16), keys)
    check(randn(1, 2 * heads, M, 96, dtype=torch.float16), vals)


@pytest.mark.parametrize("T", [32, 96, 160, 1056])
@pytest.mark.parametrize("D", [16, 48, 128, 256])
def test_ragged_edges(T, D):
    keys, vals = matrices(1, 1, T, D, 2, 32, torch.float16)
    check(randn(1, 2, 1, D, dtype=torch.float16), keys)
    check(randn(1, 2, 1, T, dtype=torch.float16), vals)


@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize("bias", [300.0, 30000.0])
def test_large_biases(dtype, bias):
    """The logits leave fp16, so they come in fp32."""
    keys, _ = matrices(1, 2, 128, 64, 2, 32, dtype, bias=bias)
    check(randn(1, 4, 1, 64, dtype=dtype), keys, out_dtype=torch.float32)


def test_the_whole_range_of_fp16():
    """code * scale alone exceeds fp16 here."""
    k = (torch.rand(1, 1, 128, 64) * 2 - 1).mul(65504).half()
    out = check(randn(1, 1, 1, 64, dtype=torch.float16), quantize_k(k, 2, 32), out_dtype=torch.float32)
    assert out.isfinite().all()


def test_any_strides():
    keys, _ = matrices(2, 2, 128, 64, 4, 32, torch.float16)
    q = randn(2, 3, 64, 8, dtype=torch.float16).permute(0, 3, 1, 2)  # heads innermost
    transposed = (keys.code, keys.scale, keys.zero)
    transposed = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in transposed)
    check(q, Packed(*transposed, 4, 32, "tokens"))


def test_other_dtypes_take_the_reference():
    keys, _ = matrices(1, 1, 64, 64, 2, 32, torch.float32)
    fields = (keys.code, keys.scale, keys.zero)
    with pytest.raises(
        ValueError, match=r"^backend: triton cannot run here, expected a dtype of float16, bfloat16"
    ):
        packed_matmul(32, torch.randn(1, 1, 1, 64), *fields, 2, backend="triton")
    with pytest.raises(ValueError, match=r"got float32$"):  # scales of another dtype than a's
        packed_matmul(32, torch.randn(1, 1, 1, 64).half(), *fields, 2, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(("B", "T", "D"), [(8, 8192, 128), (1, 131072, 128), (3, 1888, 80)])
def test_large_and_odd_shapes_on_a_gpu(dtype, bits, B, T, D):
    keys, vals = matrices(B, 8, T, D, bits, 32, dtype, "cuda")
    torch.full((1 << 28,), float("nan"), device="cuda")  # freed at once: what is allocated next holds NaN
    q, p = randn(B, 32, 1, D).to("cuda", dtype), randn(B, 32, 1, T).abs().to("cuda", dtype)
    first = check(q, keys), check(p, vals)
    for out, again in zip(first, (check(q, keys), check(p, vals)), strict=True):
        assert torch.equal(out, again), "sums are added in a fixed order"


@pytest.mark.gpu
def test_offsets_beyond_two_billion_elements_on_a_gpu():
    B, H, D, T = 2, 1, 128, 1 << 18
    code = torch.randint(-(2**31), 2**31 - 1, (B, H, D, T // 16), device="cuda", dtype=torch.int32)
    wide = torch.empty(B, H, D, (1 << 31) // D + T // 16, dtype=torch.int32, device="cuda")
    wide[..., -T // 16 :] = code  # rows lie 2^24 words apart, batches 2^31
    scale, zero = (torch.rand(B, H, D, T // 32, device="cuda").half() for _ in range(2))
    q = torch.randn(B, 4, 1, D, device="cuda").half()
    near = packed_matmul(32, q, code, scale, zero, 2, backend="triton")
    far = packed_matmul(32, q, wide[..., -T // 16 :], scale, zero, 2, backend="triton")
    assert torch.equal(near, far)
