"""The kernels that quantize into pages: every byte as the reference writes it, and no other byte."""

import numpy as np
import pytest
import torch
from torch import Tensor

from interpreting import ONE_ROUNDING, interpreted
from kivi_kv.config import PAGE
from kivi_kv.format import PageLayout, from_pages, to_pages
from kivi_kv.ops import write_pages
from kivi_kv.ops.kernels import quantize
from oracle import DTYPES, assert_bitwise_equal, randint, randn, sample

FP16, BF16, FP32 = DTYPES
BITS, GROUPS = (2, 4, 8), (32, 64, 128)
HEAD_DIMS = (16, 20, 48, 64, 80, 96, 112, 128, 160, 256)
POISON = -1

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN and inf in the interpreter


def written(k: Tensor, v: Tensor, layout: PageLayout, seed: int = 0) -> Tensor:
    """Pages [B, P, H, words] that the kernels put in slots of a poisoned pool, in random order with gaps."""
    B, H, T, _ = k.shape
    pages = B * T // PAGE
    pool = torch.full((pages + 3, H, layout.words), POISON, dtype=torch.int32, device=k.device)
    order = torch.randperm(pages + 3, generator=torch.Generator().manual_seed(seed)).to(k.device)
    slots = order[:pages].view(B, -1)
    write_pages(k, v, pool, slots.int(), layout, backend="triton")
    assert (pool[order[pages:]] == POISON).all(), "a slot that was not asked for was written"
    return pool[slots]


def check(k: Tensor, v: Tensor, k_bits: int, v_bits: int, group_size: int) -> None:
    layout = PageLayout(k_bits, v_bits, group_size, k.shape[3], k.dtype)
    assert_bitwise_equal(written(k, v, layout).cpu(), to_pages(k, v, layout).cpu())


# --- shapes, in the interpreter ---

COMBINATIONS = [
    (bits, group, dtype, HEAD_DIMS[(9 * i + 3 * j + n) % len(HEAD_DIMS)])
    for i, bits in enumerate(BITS)
    for j, group in enumerate(GROUPS)
    for n, dtype in enumerate(DTYPES)
]


@interpreted
@pytest.mark.parametrize(("bits", "group_size", "dtype", "D"), COMBINATIONS, ids=str)
def test_bits_groups_dtypes(bits, group_size, dtype, D):
    k, v = (sample(1, 2, PAGE, D, dtype=dtype, seed=seed) for seed in (1, 2))
    check(k, v, bits, BITS[BITS.index(bits) - 1], group_size)


@interpreted
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_head_dims(D):
    """The last V group holds what is left of D; what pads D to a multiple of 16 is zero."""
    k, v = (sample(2, 1, PAGE, D, dtype=FP16, seed=D + seed) for seed in (1, 2))
    check(k, v, 4, 2, (32, 64, 128)[D % 3])


@interpreted
@pytest.mark.parametrize("D", [20, 64])
def test_many_pages_rows_and_heads(D):
    k, v = (sample(3, 2, 3 * PAGE, D, dtype=FP16, seed=seed) for seed in (1, 2))
    check(k, v, 2, 4, 32)


# --- strides ---


def as_projection(B: int, H: int, T: int, D: int, dtype: torch.dtype, seed: int, device: str) -> Tensor:
    """The output of a projection [B, T, H * D], as [B, H, T, D]."""
    return sample(B, T, H, D, dtype=dtype, seed=seed).to(device).transpose(1, 2)


def odd_slice(B: int, H: int, T: int, D: int, dtype: torch.dtype, seed: int, device: str) -> Tensor:
    """Tokens from an odd offset on of a longer, wider tensor: no row is aligned."""
    return sample(B, H, T + 9, D + 3, dtype=dtype, seed=seed).to(device)[:, :, 5 : T + 5, 1 : D + 1]


def scattered(B: int, H: int, T: int, D: int, dtype: torch.dtype, seed: int, device: str) -> Tensor:
    """Channels apart, tokens side by side."""
    return sample(B, H, D, T, dtype=dtype, seed=seed).to(device).transpose(2, 3)


def every_second(B: int, H: int, T: int, D: int, dtype: torch.dtype, seed: int, device: str) -> Tensor:
    return sample(B, 2 * H, T, 2 * D, dtype=dtype, seed=seed).to(device)[:, 1::2, :, ::2]


def repeated(B: int, H: int, T: int, D: int, dtype: torch.dtype, seed: int, device: str) -> Tensor:
    """One head for all, by a stride of 0."""
    return sample(B, 1, T, D, dtype=dtype, seed=seed).to(device).expand(-1, H, -1, -1)


VIEWS = [as_projection, odd_slice, scattered, every_second, repeated]


@interpreted
@pytest.mark.parametrize("k_view", VIEWS)
def test_strides(k_view):
    """K and V are read where they lie, each with strides of its own."""
    v_view = VIEWS[VIEWS.index(k_view) - 1]
    shape = (2, 2, PAGE, 80, FP16)
    check(k_view(*shape, 1, "cpu"), v_view(*shape, 2, "cpu"), 2, 2, 32)


# --- values ---


def ties(T: int, D: int, dtype: torch.dtype) -> Tensor:
    """Multiples of half a step of 2-bit groups, whatever the axis: codes at exact ties."""
    x = randint(0, 7, (1, 1, T, D)).double() / 2 * 0.25 - 0.25
    x[:, :, ::32], x[:, :, 1::32], x[..., ::32], x[..., 1::32] = -0.25, 0.5, -0.25, 0.5
    x[:, :, 0], x[..., 0] = -0.25, -0.25
    x[:, :, 1::32, ::32], x[:, :, ::32, 1::32] = 0.5, 0.5
    return x.to(dtype)


def edges(T: int, D: int, dtype: torch.dtype) -> Tensor:
    """Halfway between codes of 8 bits, and one unit in the last place beside it."""
    x = (randint(0, 511, (1, 1, T, D)).float() / 2).to(dtype)
    unit = torch.finfo(dtype).eps
    x = (x.float() * (1 + unit * randint(-1, 2, (1, 1, T, D)).float())).to(dtype)
    x[:, :, ::32], x[:, :, 1::32] = 0.0, 255.0
    x[..., ::32], x[..., 1::32] = 0.0, 255.0
    return x


def zeros(T: int, D: int, dtype: torch.dtype) -> Tensor:
    """0.0 and -0.0 in all mixtures, alone and below positive values."""
    x = torch.where(randint(0, 2, (1, 1, T, D)) > 0, 0.0, -0.0)
    x[:, :, ::3, ::5] = 1.0
    x[:, :, 32:64, 16:] = -0.0
    return x.to(dtype)


def constant(T: int, D: int, dtype: torch.dtype) -> Tensor:
    """Groups of one value, and groups whose range is one unit in the last place."""
    x = randn(1, 1, 1, D).expand(-1, -1, T, -1).to(dtype).clone()
    x[:, :, 32:64] = randn(1, 1, 32, 1, seed=1).to(dtype)
    x[:, :, 7, ::2] = (x[:, :, 7, ::2].float() * (1 + torch.finfo(dtype).eps)).to(dtype)
    return x


def offsets(T: int, D: int, dtype: torch.dtype) -> Tensor:
    """Up to +-60,000 with little on top of it, and the whole range at once."""
    x = randn(1, 1, T, D) * 2.0 ** randint(-8, 6, (1, 1, T, D)) + 60_000 * randn(1, 1, 1, D, seed=1).sign()
    x[:, :, 40:48] = 60_000 * randn(1, 1, 8, D, seed=2).sign()
    x[:, :, 50, 3], x[:, :, 51, 3] = 65504, -65504
    return x.to(dtype)


def huge(T: int, D: int, dtype: torch.dtype) -> Tensor:
    """Ranges beyond fp32, and just within it."""
    x = 3e38 * (2 * torch.rand(1, 1, T, D, generator=torch.Generator().manual_seed(1)) - 1)
    x[:, :, 5] = torch.finfo(dtype).max * randn(1, 1, D, seed=2).sign()
    x[:, :, 64:] /= 2.0 ** randint(0, 3, (1, 1, T - 64, D))
    x[..., 32:48] *= 1e-30
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def tiny(T: int, D: int, dtype: torch.dtype) -> Tensor:
    """Subnormals, and numbers whose scale is one."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = randint(-300, 300, (1, 1, T, D)).double() * smallest
    x[:, :, 64:] *= 2.0 ** randint(0, 12, (1, 1, T - 64, 1))
    x[..., 5], x[..., 6] = smallest, 0.0
    return x.to(dtype)


def magnitudes(T: int, D: int, dtype: torch.dtype) -> Tensor:
    """Every exponent that the dtype has, one range per group of 32."""
    low, high = {FP16: (-24, 14), BF16: (-133, 126), FP32: (-149, 126)}[dtype]
    power = 2.0 ** randint(low, high, (1, 1, T // 32, D // 16)).double()
    return (randn(1, 1, T, D).double() * power.repeat_interleave(32, 2).repeat_interleave(16, 3)).to(dtype)


EVERYWHERE = (ties, edges, zeros, constant, tiny, magnitudes)
VALUES = [(make, dtype) for make in EVERYWHERE for dtype in DTYPES]
VALUES += [(offsets, FP16), (huge, BF16), (huge, FP32), (offsets, BF16)]
every_value = pytest.mark.parametrize(("make", "dtype"), VALUES, ids=lambda x: getattr(x, "__name__", str(x)))


class AsCompiled:
    """A kernel that the interpreter runs with the division that GPUs use."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **options: self.kernel[grid](*args, **{**options, "FUSED": True})


@pytest.fixture(params=["interpreter's division", "GPU's division"])
def division(request, monkeypatch):
    if request.param == "GPU's division":
        if not ONE_ROUNDING:
            pytest.skip("this interpreter's fma rounds twice")
        for name in ("_k_pages_kernel", "_v_pages_kernel"):
            monkeypatch.setattr(quantize, name, AsCompiled(getattr(quantize, name)))


@interpreted
@every_value
@pytest.mark.usefixtures("division")
def test_hard_values(make, dtype):
    x = make(PAGE, 64, dtype)
    assert x.isfinite().all()
    check(x, x, 2, 8, 32)
    check(x.flip(3), x.flip(2), 8, 2, 32)


def check_spoiled(dtype: torch.dtype, bad: float, D: int, device: str, bits: int = 2) -> None:
    """A bad value at token 37, channel 17 changes nothing outside its own groups."""
    clean_k, clean_v = (sample(1, 2, 2 * PAGE, D, dtype=dtype, seed=seed).to(device) for seed in (1, 2))
    k, v = clean_k.clone(), clean_v.clone()
    k[0, 1, 37, 17] = v[0, 1, 37, 17] = bad
    layout = PageLayout(bits, bits, 32, D, dtype)
    pages, clean = written(k, v, layout), written(clean_k, clean_v, layout)
    assert_bitwise_equal(pages[:, 1], clean[:, 1])
    assert_bitwise_equal(pages[:, :, 0], clean[:, :, 0])
    for axis, a, b in zip("kv", from_pages(pages, layout), from_pages(clean, layout), strict=True):
        code, params = a.code != b.code, (a.scale != b.scale) | (a.zero != b.zero)  # NaN differs
        line, group = (17, 1) if axis == "k" else (37, 0)
        assert params.nonzero().tolist() == [[0, 1, line, group]]
        words = slice(group * bits, (group + 1) * bits)  # 32 codes
        code[0, 1, line, words] = False
        assert not code.any()


@interpreted
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("division")
def test_bad_values_spoil_their_own_group_only(dtype, bad):
    check_spoiled(dtype, bad, 48, "cpu")


# --- division ---


def corrected(x: np.ndarray, divisor: np.ndarray, estimate: np.ndarray) -> np.ndarray:
    """What the kernels compute, with an fma that is exact in 64 bits of mantissa before it rounds to fp32."""
    wide, single = np.longdouble, np.float32
    quotient = x * estimate
    rest = (x.astype(wide) - quotient.astype(wide) * divisor.astype(wide)).astype(single)
    return (quotient.astype(wide) + rest.astype(wide) * estimate.astype(wide)).astype(single)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="needs 64 bits of mantissa")
def test_one_correction_gives_the_rounded_quotient():
    """For every divisor of 11 bits: random dividends, and those whose quotient lies nearest to a rounding edge."""
    rng = np.random.default_rng(0)
    for divisor in [3, 15, 255, *range(1024, 2048)]:
        odd = divisor
        while odd % 2 == 0:
            odd //= 2
        x = rng.integers(2**23, 2**24, 300)
        if odd > 1:
            edge = [pow(2, -shift, odd) * sign % odd for shift in (23, 24, 25) for sign in (1, -1)]
            steps = rng.integers(0, 2**23 // odd, (100, 1))
            x = np.concatenate([x, (2**23 // odd * odd + odd + steps * odd + np.array(edge)).ravel()])
        x = x[x < 2**24].astype(np.float32)
        d = np.full_like(x, divisor)
        expected = (x.astype(np.float64) / divisor).astype(np.float32)  # no quotient is that near to an edge
        for error in (-(2.0**-22), 0.0, 2.0**-22, *rng.uniform(-(2.0**-22), 2.0**-22, 3)):
            estimate = np.full_like(x, (1 + error) / divisor)
            np.testing.assert_array_equal(corrected(x, d, estimate), expected, f"{divisor}, {error}")


# --- on a GPU ---

GPU_VARIANTS = [
    (2, 2, 32, 128, FP16),
    (2, 2, 32, 128, BF16),
    (2, 2, 32, 128, FP32),
    (4, 2, 128, 128, BF16),
    (4, 4, 32, 64, FP16),
    (8, 8, 64, 80, BF16),
    (2, 8, 128, 256, FP16),
    (8, 4, 32, 20, FP32),
    (4, 2, 64, 96, BF16),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("k_bits", "v_bits", "group_size", "D", "dtype"), GPU_VARIANTS, ids=str)
def test_many_tokens_on_a_gpu(k_bits, v_bits, group_size, D, dtype):
    """Real and hard values, long and odd numbers of pages: the same compiled kernels throughout."""
    for B, H, pages in ((1, 2, 1), (3, 5, 37), (2, 8, 256)):
        k, v = (as_projection(B, H, pages * PAGE, D, dtype, seed, "cuda") for seed in (1, 2))
        check(k, v, k_bits, v_bits, group_size)
    for make in (*EVERYWHERE, offsets) if dtype == FP16 else (*EVERYWHERE, huge):
        x = make(4 * PAGE, 256, dtype)[..., :D].repeat(1, 2, 1, 1).cuda()
        check(x, x.flip(2), k_bits, v_bits, group_size)


@pytest.mark.gpu
@pytest.mark.parametrize("k_view", VIEWS)
def test_strides_on_a_gpu(k_view):
    v_view = VIEWS[VIEWS.index(k_view) - 1]
    shape = (2, 3, 3 * PAGE, 128, FP16)
    check(k_view(*shape, 1, "cuda"), v_view(*shape, 2, "cuda"), 2, 2, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bad_values_on_a_gpu(dtype, bad):
    check_spoiled(dtype, bad, 128, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_every_quotient_on_a_gpu(dtype):
    """Random 16-bit patterns, all finite: every exponent beside every other one, and every scale."""
    for seed in range(8):
        x = randint(-(2**15), 2**15, (1, 8, 64 * PAGE, 128), seed).to(torch.int16).view(dtype)
        x = torch.where(x.isfinite(), x, 1.0).to(dtype).cuda()
        check(x, x, 2, 2, 32)
        x = (randint(0, 2**11, x.shape, seed).float() * 2.0 ** randint(-12, 2, (1, 8, 64 * PAGE, 1), seed)).to(
            dtype
        )
        check(x.cuda(), x.cuda(), 2, 2, 32)


@pytest.mark.gpu
def test_far_offsets_on_a_gpu():
    """Input and pool both beyond 2^31 elements: the far ends are read and written."""
    B, H, pages, D = 2, 8, 8448, 128
    k = torch.zeros(B, pages * PAGE, H, D, dtype=FP16, device="cuda").transpose(1, 2)
    k[1, :, -PAGE:] = sample(H, PAGE, D, dtype=FP16).cuda()
    layout = PageLayout(2, 2, 32, D, FP16)
    slots = 2**31 // (H * layout.words) + 1
    pool = torch.full((slots, H, layout.words), POISON, dtype=torch.int32, device="cuda")
    write_pages(
        k, k, pool, torch.arange(slots - B * pages, slots, device="cuda").view(B, -1).int(), layout, "triton"
    )
    last = k[1:, :, -PAGE:]
    assert_bitwise_equal(pool[-1], to_pages(last, last, layout)[0, 0])
    assert (pool[: slots - B * pages] == POISON).all()
    assert not pool[slots - B * pages : -1].any()
