"""The number format spelled out one element at a time: an oracle that shares no code with the package.

Loops over groups and elements, numpy float32 for every operation, bit tricks for the casts.  Slow on
purpose; inputs stay small.
"""

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

F32 = np.float32
HALF = F32(0.5)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def randint(low: int, high: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def sample(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal data whose channels differ in magnitude (2^-6 to 2^6) and offset, as real keys do."""
    channels = shape[-1]
    magnitude = 2.0 ** randint(-6, 7, (channels,), seed + 1000)
    offset = 8 * randn(channels, seed=seed + 2000)
    return (randn(*shape, seed=seed) * magnitude + offset).to(dtype)


def bits_of(x: Tensor) -> Tensor:
    return x.contiguous().view(INT_OF_SIZE[x.element_size()])


def assert_bitwise_equal(actual: Tensor, expected: Tensor) -> None:
    """Same dtype, shape and bits: -0.0 differs from 0.0, and a NaN equals itself."""
    assert actual.dtype == expected.dtype, f"expected {expected.dtype}, got {actual.dtype}"
    assert actual.shape == expected.shape, f"expected {tuple(expected.shape)}, got {tuple(actual.shape)}"
    wrong = bits_of(actual) != bits_of(expected)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        expected_value, actual_value = expected[at].item(), actual[at].item()
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} differ, first at {at}: "
            f"expected {expected_value!r}, got {actual_value!r}"
        )


def round_to(value: np.float32, dtype: torch.dtype) -> np.float32:
    """value as the nearest number of dtype, ties to even, kept in float32."""
    if dtype == torch.float32:
        return F32(value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # overflow to inf is what the cast must give
        if dtype == torch.float16:
            return F32(np.float16(value))
    word = int(np.array(value, dtype=np.float32).view(np.uint32))
    if math.isfinite(value):
        word = (word + 0x7FFF + (word >> 16 & 1)) & 0xFFFF0000
    return F32(np.array(word, dtype=np.uint32).view(np.float32))


def quantize_group(xs: list[np.float32], bits: int, dtype: torch.dtype):
    """-> (codes, scale, zero) of one group of finite values."""
    top = 2**bits - 1
    high, low = max(xs), min(xs)
    with np.errstate(over="ignore", under="ignore"):
        overflows = not np.isfinite(high - low)
        if overflows:
            scale = round_to((high * HALF - low * HALF) / F32(top / 2), dtype)
        else:
            scale = round_to((high - low) / F32(top), dtype)
        codes = []
        for x in xs:
            if scale == 0:
                codes.append(0)
                continue
            steps = (x * HALF - low * HALF) / (scale * HALF) if overflows else (x - low) / scale
            codes.append(min(max(round(float(steps)), 0), top))  # Python's round: half to even
    return codes, scale, low


def dequantize_value(code: int, scale: np.float32, zero: np.float32, dtype: torch.dtype) -> np.float32:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        value = F32(code) * scale + zero
        if not np.isfinite(value):
            value = (F32(code) * (scale * HALF) + zero * HALF) * F32(2)
        limit = F32(torch.finfo(dtype).max)
        return round_to(min(max(value, -limit), limit), dtype)


def pack_words(codes: list[int], bits: int) -> list[int]:
    """Signed int32 words, the first code in the lowest bits."""
    lanes = 32 // bits
    words = []
    for start in range(0, len(codes), lanes):
        word = 0
        for j, code in enumerate(codes[start : start + lanes]):
            word |= code << (j * bits)
        words.append(word - 2**32 if word >= 2**31 else word)
    return words


def unpack_words(words: list[int], bits: int) -> list[int]:
    return [(word >> (j * bits)) & (2**bits - 1) for word in words for j in range(32 // bits)]


def fake_quantize_run(xs: list[np.float32], bits: int, group_size: int, dtype: torch.dtype):
    """One run of values that belong to consecutive groups -> (codes, scales, zeros, values)."""
    codes, scales, zeros, values = [], [], [], []
    for start in range(0, len(xs), group_size):
        group_codes, scale, zero = quantize_group(xs[start : start + group_size], bits, dtype)
        codes += group_codes
        scales.append(scale)
        zeros.append(zero)
        values += [dequantize_value(code, scale, zero, dtype) for code in group_codes]
    return codes, scales, zeros, values


@dataclass(frozen=True)
class Expected:
    code: Tensor
    scale: Tensor
    zero: Tensor
    values: Tensor  # dequantized to the input's dtype


def quantize_last_dim(x: Tensor, bits: int, group_size: int) -> Expected:
    rows = x.float().numpy().reshape(-1, x.shape[-1])
    runs = [fake_quantize_run(list(row), bits, group_size, x.dtype) for row in rows]
    lead = x.shape[:-1]

    def floats(part: int) -> Tensor:
        return torch.from_numpy(np.array([run[part] for run in runs], F32)).to(x.dtype).reshape(*lead, -1)

    words = torch.tensor([pack_words(run[0], bits) for run in runs], dtype=torch.int32).reshape(*lead, -1)
    return Expected(words, floats(1), floats(2), floats(3))


def quantize_k(k: Tensor, bits: int, group_size: int) -> Expected:
    """k: [B, H, T, D]; groups of tokens."""
    out = quantize_last_dim(k.transpose(2, 3), bits, group_size)
    return Expected(out.code, out.scale, out.zero, out.values.transpose(2, 3))


def quantize_v(v: Tensor, bits: int, group_size: int) -> Expected:
    """v: [B, H, T, D]; groups of channels."""
    return quantize_last_dim(v, bits, group_size)


def fake_quantize(x: Tensor, bits: int, group_size: int | None, axis: str) -> Tensor:
    """x: [..., T, D]."""
    if axis == "tensor":
        runs, size = x.reshape(1, -1), x.numel()
    else:
        runs, size = (x.transpose(-1, -2) if axis == "channel" else x), group_size
    rows = runs.float().numpy().reshape(-1, runs.shape[-1])
    values = [fake_quantize_run(list(row), bits, size, x.dtype)[3] for row in rows]
    out = torch.from_numpy(np.array(values, F32)).to(x.dtype).reshape(runs.shape)
    return out.transpose(-1, -2) if axis == "channel" else out.reshape(x.shape)


def logical_matrix(group_size: int, code: Tensor, scale: Tensor, zero: Tensor, bits: int) -> np.ndarray:
    """code [B, H, K, N / lanes] -> float64 [B, H, K, N], exact: code * scale + zero fits in float64."""
    B, H, K, W = code.shape
    N = W * (32 // bits)
    out = np.zeros((B, H, K, N))
    scales, zeros = scale.double().numpy(), zero.double().numpy()
    for b, h, row in np.ndindex(B, H, K):
        group = np.arange(N) // group_size
        codes = np.array(unpack_words(code[b, h, row].tolist(), bits), np.float64)
        out[b, h, row] = codes * scales[b, h, row][group] + zeros[b, h, row][group]
    return out


def packed_matmul(group_size: int, a: Tensor, code: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """float64 [B, HQ, M, N]; query head i reads kv head i // (HQ // H)."""
    matrix = logical_matrix(group_size, code, scale, zero, bits)
    B, HQ, M, _ = a.shape
    out = torch.zeros(B, HQ, M, matrix.shape[-1], dtype=torch.float64)
    for b, head in np.ndindex(B, HQ):
        kv_head = head // (HQ // code.shape[1])
        out[b, head] = torch.from_numpy(a[b, head].double().numpy() @ matrix[b, kv_head])
    return out
