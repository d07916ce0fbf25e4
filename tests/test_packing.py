import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from kivi_kv import pack, unpack
from oracle import assert_bitwise_equal, randint

BITS = (2, 4, 8)


@pytest.fixture(params=[0, 1, 2])
def seed(request):
    return request.param


def codes_like(bits, *shape, seed=0):
    return randint(0, 2**bits, shape, seed).to(torch.int32)


def pack_by_loops(codes, bits, dim):
    rows = codes.transpose(dim, -1)
    words = [oracle.pack_words(row.tolist(), bits) for row in rows.reshape(-1, rows.shape[-1])]
    return torch.tensor(words, dtype=torch.int32).reshape(*rows.shape[:-1], -1).transpose(dim, -1)


@pytest.mark.parametrize(
    ("bits", "codes", "word"),
    [
        (2, [1] + 15 * [0], 0x1),
        (2, [0, 1] + 14 * [0], 0x4),
        (2, 4 * [0, 1, 2, 3], 0xE4E4E4E4 - 2**32),
        (2, 15 * [0] + [2], -(2**31)),
        (2, 16 * [3], -1),
        (4, [1, 2, 3, 4, 5, 6, 7, 8], 0x87654321 - 2**32),
        (4, 7 * [0] + [7], 0x70000000),
        (8, [0x01, 0x23, 0x45, 0x67], 0x67452301),
        (8, [255, 0, 0, 128], 0x800000FF - 2**32),
    ],
)
def test_words_by_hand(bits, codes, word):
    words = pack(torch.tensor(codes, dtype=torch.int32), bits, 0)
    assert_bitwise_equal(words, torch.tensor([word], dtype=torch.int32))
    assert_bitwise_equal(unpack(words, bits, 0), torch.tensor(codes, dtype=torch.int32))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -2, -3, -4])
def test_every_dim_matches_the_loops(bits, dim, seed):
    shape = [2, 3, 5, 2]
    shape[dim] = 3 * (32 // bits)
    codes = codes_like(bits, *shape, seed=seed)
    words = pack(codes, bits, dim)
    assert_bitwise_equal(words, pack_by_loops(codes, bits, dim))
    assert_bitwise_equal(unpack(words, bits, dim), codes)


@pytest.mark.parametrize("bits", BITS)
def test_negative_dim_is_the_dim_from_the_end(bits, seed):
    codes = codes_like(bits, 32, 32, 32, seed=seed)
    for dim in range(3):
        assert_bitwise_equal(pack(codes, bits, dim - 3), pack(codes, bits, dim))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_any_integer_dtype_of_codes(bits, dtype, seed):
    codes = codes_like(bits, 3, 64, seed=seed).clamp_max(min(torch.iinfo(dtype).max, 255))
    assert_bitwise_equal(pack(codes.to(dtype), bits, 1), pack_by_loops(codes, bits, 1))


@pytest.mark.parametrize("bits", BITS)
def test_strided_codes_and_words(bits, seed):
    codes = codes_like(bits, 32, 6, 64, seed=seed)
    for view in (codes.transpose(0, 2), codes[:, ::2], codes[:, 1], codes[:, :1].expand(-1, 4, -1)):
        words = pack(view, bits, -1)
        assert_bitwise_equal(words, pack(view.contiguous(), bits, -1))
        strided = words.transpose(0, -1).contiguous().transpose(0, -1)
        assert_bitwise_equal(unpack(strided, bits, -1), view)


@pytest.mark.parametrize("bits", BITS)
def test_one_changed_code_changes_only_its_own_bits(bits):
    lanes = 32 // bits
    base = codes_like(bits, lanes)
    for j in range(lanes):
        changed = base.clone()
        changed[j] ^= 2**bits - 1
        difference = (pack(base, bits, 0) ^ pack(changed, bits, 0)).item() & 0xFFFFFFFF
        assert difference == (2**bits - 1) << (j * bits)


@pytest.mark.parametrize("bits", BITS)
def test_inputs_are_left_alone(bits):
    codes = codes_like(bits, 4, 32)
    before = codes.clone()
    words = pack(codes, bits, 1)
    kept = words.clone()
    unpack(words, bits, 1)
    assert_bitwise_equal(codes, before)
    assert_bitwise_equal(words, kept)


@st.composite
def packable(draw):
    bits = draw(st.sampled_from(BITS))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] *= 32 // bits
    seed = draw(st.integers(0, 2**31 - 1))
    return codes_like(bits, *shape, seed=seed), bits, dim


@settings(deadline=None, max_examples=60, derandomize=True)
@given(packable())
def test_roundtrip_of_any_codes(case):
    codes, bits, dim = case
    words = pack(codes, bits, dim)
    assert words.numel() * (32 // bits) == codes.numel()
    assert_bitwise_equal(unpack(words, bits, dim), codes)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8), st.sampled_from(BITS))
def test_roundtrip_of_any_words(values, bits):
    words = torch.tensor(values, dtype=torch.int32)
    codes = unpack(words, bits, 0)
    assert codes.tolist() == oracle.unpack_words(values, bits)
    assert_bitwise_equal(pack(codes, bits, 0), words)


@pytest.mark.parametrize("bits", [0, 1, 3, 5, 16, 32, -2])
def test_unsupported_bits_are_refused(bits):
    with pytest.raises(ValueError, match=rf"bits.*{bits}"):
        pack(torch.zeros(4, 32, dtype=torch.int32), bits, 1)
    with pytest.raises(ValueError, match=rf"bits.*{bits}"):
        unpack(torch.zeros(4, 2, dtype=torch.int32), bits, 1)


@pytest.mark.parametrize("dim", [2, 5, -3])
def test_dim_out_of_range_is_refused(dim):
    with pytest.raises(ValueError, match=rf"dim.*{dim}"):
        pack(torch.zeros(32, 32, dtype=torch.int32), 2, dim)
    with pytest.raises(ValueError, match=rf"dim.*{dim}"):
        unpack(torch.zeros(32, 32, dtype=torch.int32), 2, dim)


@pytest.mark.parametrize(("bits", "length"), [(2, 8), (2, 24), (2, 17), (4, 4), (4, 12), (8, 2), (8, 6)])
def test_a_partly_filled_word_is_refused(bits, length):
    with pytest.raises(ValueError, match=rf"(codes|dim).*{length}"):
        pack(torch.zeros(length, 32, dtype=torch.int32), bits, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_point_codes_are_refused(dtype):
    with pytest.raises(ValueError, match=r"codes.*float"):
        pack(torch.zeros(4, 32, dtype=dtype), 2, 1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8, torch.float32])
def test_words_other_than_int32_are_refused(dtype):
    with pytest.raises(ValueError, match=r"words.*int32"):
        unpack(torch.zeros(4, 2, dtype=dtype), 2, 1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_codes_outside_the_range_are_refused(bits, dtype):
    for bad in (-1, 2**bits, 1000, -1000):
        codes = torch.zeros(2, 32, dtype=dtype)
        codes[1, 7] = bad
        with pytest.raises(ValueError, match="codes"):
            pack(codes, bits, 1)
