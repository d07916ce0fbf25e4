import pytest
import torch

import oracle
from kivi_kv import packed_matmul, quantize_k, quantize_v
from oracle import DTYPES, assert_bitwise_equal, randint, randn, sample

BITS = (2, 4, 8)
# The result is accumulated in fp32 and rounded once to a's dtype: half an eps per element at most.
# Twice that leaves room for the order of the sums; fp32 sums of a few hundred terms stay below 1e-5.
TOLERANCE = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 1e-5}

every_bits = pytest.mark.parametrize("bits", BITS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def relative_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def check(group_size, a, code, scale, zero, bits):
    out = packed_matmul(group_size, a, code, scale, zero, bits)
    expected = oracle.packed_matmul(group_size, a, code, scale, zero, bits)
    assert out.dtype == a.dtype
    assert out.shape == expected.shape
    # per head, so that one wrong head cannot hide among the others
    for b in range(a.shape[0]):
        for head in range(a.shape[1]):
            assert relative_error(out[b, head], expected[b, head]) < TOLERANCE[a.dtype], (b, head)
    return out


def packed(B, H, K, N, group_size, bits, dtype, seed=0):
    """A packed matrix made without the quantizer: every code equally likely, scales of both signs of size."""
    groups = -(-N // group_size)
    code = randint(-(2**31), 2**31, (B, H, K, N * bits // 32), seed).to(torch.int32)
    scale = (randn(B, H, K, groups, seed=seed + 1).abs() / 2**bits).to(dtype)
    zero = randn(B, H, K, groups, dtype=dtype, seed=seed + 2)
    return code, scale, zero


@every_bits
@every_dtype
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_matches_float64(bits, dtype, group_size):
    a = randn(3, 4, 5, 80, dtype=dtype, seed=group_size)
    check(group_size, a, *packed(3, 2, 80, 128, group_size, bits, dtype), bits)


@pytest.mark.parametrize("ratio", [1, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("M", [1, 5, 17])
def test_query_heads_share_kv_heads(ratio, M):
    a = randn(2, 2 * ratio, M, 64, dtype=torch.float16, seed=ratio)
    check(32, a, *packed(2, 2, 64, 96, 32, 2, torch.float16, seed=M), 2)


@every_bits
@pytest.mark.parametrize("words", [1, 3, 5, 33])
@pytest.mark.parametrize("group_size", [32, 64, 1024])
def test_any_number_of_words(bits, words, group_size):
    N = words * 32 // bits
    a = randn(2, 2, 3, 48, dtype=torch.float16, seed=words)
    check(group_size, a, *packed(2, 1, 48, N, group_size, bits, torch.float16), bits)


@every_bits
@pytest.mark.parametrize("K", [1, 7, 57, 80, 112, 129, 300])
def test_any_inner_length(bits, K):
    a = randn(2, 2, 2, K, dtype=torch.float32, seed=K)
    check(32, a, *packed(2, 2, K, 64, 32, bits, torch.float32), bits)


@every_dtype
def test_one_batch_one_head_one_row(dtype):
    check(32, randn(1, 1, 1, 64, dtype=dtype), *packed(1, 1, 64, 128, 32, 2, dtype), 2)


@every_bits
@every_dtype
@pytest.mark.parametrize("D", [64, 80, 112])
def test_scores_from_quantize_k(bits, dtype, D):
    k = quantize_k(sample(2, 2, 96, D, dtype=dtype, seed=D), bits, 32)
    q = randn(2, 6, 3, D, dtype=dtype, seed=1)
    out = check(32, q, k.code, k.scale, k.zero, bits)
    dense = q.double() @ k.dequantize(torch.float32).double().repeat_interleave(3, 1).transpose(2, 3)
    assert relative_error(out, dense) < TOLERANCE[dtype]


@every_bits
@every_dtype
@pytest.mark.parametrize(("D", "group_size"), [(16, 32), (80, 32), (96, 64), (112, 32), (112, 128), (128, 32)])
def test_outputs_from_quantize_v(bits, dtype, D, group_size):
    v = quantize_v(sample(2, 2, 75, D, dtype=dtype, seed=D), bits, group_size)
    p = randn(2, 8, 1, 75, seed=1).softmax(-1).to(dtype)
    out = check(group_size, p, v.code, v.scale, v.zero, bits)
    dense = p.double() @ v.dequantize(torch.float32).double().repeat_interleave(4, 1)
    assert relative_error(out, dense) < TOLERANCE[dtype]


@every_bits
def test_biases_that_cancel(bits):
    # Two key channels with a bias of 900 and opposite queries: what is left is small, so a product
    # over values rounded to fp16 (a step of 1/2 there) would be off by several percent.
    k = randn(1, 1, 64, 64, seed=1)
    k[..., 3] += 900
    k[..., 40] += 900
    q = randn(1, 4, 2, 64, seed=2)
    q[..., 40] = -q[..., 3]
    q = q.half()
    k = quantize_k(k.half(), bits, 32)
    check(32, q, k.code, k.scale, k.zero, bits)


@every_bits
def test_large_keys_stay_finite(bits):
    k = randn(1, 2, 64, 64, seed=1).half()
    k[..., 5] = (60000 * (randint(0, 2, (64,), 2) * 2 - 1)).half()
    k[:, 1, ::2, 9], k[:, 1, 1::2, 9] = 65504, -65504
    k = quantize_k(k, bits, 32)
    q = (randn(1, 4, 3, 64, seed=3) / 64).half()
    out = packed_matmul(32, q, k.code, k.scale, k.zero, bits)
    assert out.isfinite().all()
    # one value in the range +-65504 may count as 65504 or as the 65536 that code * scale + zero gives
    expected = oracle.packed_matmul(32, q, k.code, k.scale, k.zero, bits)
    assert relative_error(out, expected) < 2 * TOLERANCE[torch.float16]


def test_zero_rows_and_constant_groups():
    k = torch.full((1, 1, 64, 64), 2.5, dtype=torch.float16)
    k = quantize_k(k, 2, 32)
    a = torch.zeros(1, 1, 2, 64, dtype=torch.float16)
    a[0, 0, 1] = 1
    out = packed_matmul(32, a, k.code, k.scale, k.zero, 2)
    assert_bitwise_equal(out, torch.stack([torch.zeros(64), torch.full((64,), 160.0)])[None, None].half())


@every_bits
def test_a_row_of_the_batch_is_the_row_alone(bits):
    code, scale, zero = packed(3, 2, 64, 64, 32, bits, torch.float32)
    a = randn(3, 4, 2, 64, seed=7)
    a[1] *= 1e4
    batch = packed_matmul(32, a, code, scale, zero, bits)
    for b in range(3):
        one = slice(b, b + 1)
        alone = packed_matmul(32, a[one], code[one], scale[one], zero[one], bits)
        assert relative_error(batch[one], alone.double()) < TOLERANCE[torch.float32]


@every_bits
def test_strided_operands(bits):
    a = randn(2, 3, 4, 64, dtype=torch.float16, seed=1).transpose(1, 2)  # [B, M, HQ, K] as a projection gives
    code, scale, zero = packed(2, 4, 128, 128, 32, bits, torch.float16)
    code, scale, zero = code[:, ::2, ::2], scale[:, ::2, ::2], zero[:, ::2, ::2]
    out = check(32, a, code, scale, zero, bits)
    dense = packed_matmul(32, a.contiguous(), code.contiguous(), scale.contiguous(), zero.contiguous(), bits)
    assert relative_error(out, dense.double()) < TOLERANCE[torch.float16]


def test_operands_are_left_alone():
    operands = (randn(1, 2, 2, 64, dtype=torch.float16), *packed(1, 1, 64, 64, 32, 4, torch.float16))
    before = [x.clone() for x in operands]
    packed_matmul(32, *operands, 4)
    for x, kept in zip(operands, before, strict=True):
        assert_bitwise_equal(x, kept)


# --- errors ---


@pytest.fixture
def operands():
    """a [1, 4, 2, 64] and a packed [1, 2, 64, 96], groups of 32, 2 bits."""
    code, scale, zero = packed(1, 2, 64, 96, 32, 2, torch.float16)
    return {"a": randn(1, 4, 2, 64, dtype=torch.float16), "code": code, "scale": scale, "zero": zero}


def test_the_operands_as_such_are_accepted(operands):
    check(32, **operands, bits=2)


@pytest.mark.parametrize("bits", [0, 1, 3, 16])
def test_unsupported_bits_are_refused(operands, bits):
    with pytest.raises(ValueError, match=rf"bits.*{bits}"):
        packed_matmul(32, **operands, bits=bits)


@pytest.mark.parametrize("group_size", [0, -32, 32.0, None])
def test_bad_group_sizes_are_refused(operands, group_size):
    with pytest.raises(ValueError, match=r"group_size"):
        packed_matmul(group_size, **operands, bits=2)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("a", lambda a: a[:, :3]),  # 3 query heads over 2 kv heads
        ("a", lambda a: a[:, :1]),
        ("a", lambda a: a[..., :32]),  # K mismatch
        ("a", lambda a: a[0]),
        ("a", lambda a: a.repeat(2, 1, 1, 1)),  # batch mismatch
        ("a", lambda a: a.double()),
        ("a", lambda a: a.int()),
        ("code", lambda code: code[..., :4]),  # N = 64: two groups, not the three of scale and zero
        ("code", lambda code: code.repeat(1, 1, 1, 2)),
        ("code", lambda code: code[:, :, :32]),
        ("code", lambda code: code.long()),
        ("code", lambda code: code.float()),
        ("scale", lambda scale: scale[..., :2]),
        ("scale", lambda scale: scale[..., :1]),  # must not broadcast
        ("scale", lambda scale: scale[:, :1]),
        ("scale", lambda scale: scale[:, :, :1]),
        ("scale", lambda scale: scale.transpose(2, 3)),
        ("zero", lambda zero: zero[..., :2]),
        ("zero", lambda zero: zero[..., :1]),
        ("zero", lambda zero: zero[:, :1]),
    ],
)
def test_operands_that_do_not_fit_are_refused(operands, name, change):
    operands[name] = change(operands[name])
    with pytest.raises(ValueError, match=r"\b(a|code|scale|zero|heads|K|N)\b"):
        packed_matmul(32, **operands, bits=2)


def test_logits_beyond_fp16_come_out_in_fp32():
    q, k = torch.full((1, 2, 1, 128), 30.0).half(), (40 + randn(1, 1, 32, 128, seed=1)).half()
    packed = quantize_k(k, 2, 32)
    fields = (packed.code, packed.scale, packed.zero, 2)
    assert packed_matmul(32, q, *fields).isinf().all()
    out = packed_matmul(32, q, *fields, out_dtype=torch.float32)
    expected = q.double() @ packed.dequantize(torch.float64).transpose(-1, -2)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=0)  # fp32 sums of 128 products
