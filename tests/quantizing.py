"""Both quantizers beside their oracles, for the tests of the number format."""

import pytest
import torch

import oracle
from kivi_kv import quantize_k, quantize_v, unpack
from oracle import DTYPES, assert_bitwise_equal

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
