"""Kernels without a GPU: python emulating.py NAME ... runs their compiled code on the CPU.

Run without TRITON_INTERPRET. Attention is compared with fp64 over the values that the cache represents.
An access outside of a tensor or of shared memory, a race between warps or a copy that is not waited for ends it.
"""

import sys
from functools import partial

import torch
from triton.backends.compiler import GPUTarget

from attending import TOLERANCE, Case, new_tokens, queries
from compiling import compile_launch
from kivi_kv import KiviConfig, LayerCache, quantize_k, quantize_v
from kivi_kv.config import PAGE
from kivi_kv.format import PageLayout, to_pages
from kivi_kv.ops.kernels.append import append_token
from kivi_kv.ops.kernels.decode import attend_kernel
from kivi_kv.ops.kernels.gluon import attend as gluon
from kivi_kv.ops.kernels.matmul import packed_matmul_triton
from kivi_kv.ops.kernels.quantize import write_pages
from oracle import assert_bitwise_equal, randn, sample
from ptx import Emulator, emulated
from test_append_token import assert_same

TARGET = GPUTarget("cuda", 90, 32)
FP16, BF16 = torch.float16, torch.bfloat16
KIVI2 = KiviConfig(2, 2, 32)
# (config, D, dtype, query heads per kv head, query tokens, their own K and V)
VARIANTS = {
    "kivi2": (KIVI2, 128, FP16, 4, 1, False),
    "balanced": (KiviConfig(4, 2, 128, sink_length=32), 128, BF16, 4, 1, False),
    "kivi4 D64, 7 heads": (KiviConfig(4, 4, 32), 64, FP16, 7, 1, True),
    "kivi2 D64 bf16, 5 tokens": (KIVI2, 64, BF16, 3, 5, True),
    "groups of 64, 2 tokens": (KiviConfig(2, 2, 64, residual_length=40), 128, FP16, 4, 2, True),
    "2, 4 bits, 16 heads": (KiviConfig(2, 4, 32, sink_length=3), 128, BF16, 16, 1, False),
    "16 heads": (KIVI2, 128, FP16, 16, 1, False),
}
LENGTHS = [0, 1, 129, 290, 777]
PROGRAMS = 7  # at once: fewer than rows, so that some have several, and some rows have several


def attend(q, storage, new_k=None, new_v=None, *, scale=None, sink_logits=None, return_lse=True, backend="gluon"):
    """As ops.attend, which would refuse a CPU; with the log-sum-exp."""
    options = {"softcap": None, "sink_logits": sink_logits, "window": None}
    return gluon.attend_gluon(q, storage, new_k, new_v, scale=scale or q.shape[-1] ** -0.5, **options)


def ragged(name: str) -> tuple[Case, torch.Tensor, tuple[torch.Tensor, ...] | None]:
    config, D, dtype, ratio, M, new = VARIANTS[name]
    case = Case.random(config, len(LENGTHS), 2, max(LENGTHS), D, dtype, LENGTHS)
    q = queries(len(LENGTHS), 2 * ratio, M, D, dtype)
    return case, q, new_tokens(len(LENGTHS), 2, M, D, dtype) if new else None


def variant(emulator: Emulator, name: str) -> None:
    case, q, new = ragged(name)
    case.check(q, new, attend=attend)


def overlapping(emulator: Emulator) -> None:
    """Until a program has waited for the kernels before it, memory holds anything they may find there."""
    case, q, _ = ragged("kivi2")
    storage, pages = case.cache.storage, case.cache.packed
    expected = attend(q, storage)
    for lengths, packed in (
        ([0] * 5, [0] * 5),
        (LENGTHS[::-1], pages[::-1]),
        (LENGTHS, [max(0, n - 1) for n in pages]),
        ([n + 100 * (n > 600) for n in LENGTHS], pages),
        ([10**6] * 5, [7000] * 5),
    ):
        emulator.stale = [
            (storage.lengths, torch.tensor(lengths, dtype=torch.int32)),
            (storage.packed, torch.tensor(packed, dtype=torch.int32)),
            (storage.table, torch.full_like(storage.table, -1)),
            (storage.pool, torch.full_like(storage.pool, -1)),
            (q, torch.full_like(q, torch.nan)),
        ]
        for a, b in zip(attend(q, storage), expected, strict=True):
            assert_bitwise_equal(a, b)


def shares(emulator: Emulator) -> None:
    """Any number of programs at once gives the same, as far as rounding allows."""
    case, q, _ = ragged("kivi2")
    for programs in (1, 2, 5, 13, 60):
        gluon._device = lambda device, layout, tiles, programs=programs: (programs, True)
        case.check(q, attend=attend)


def portable(emulator: Emulator) -> None:
    """The kernel for other GPUs, and for what the Gluon kernel does not take."""

    def attend(q, storage, new_k=None, new_v=None, *, return_lse, backend, softcap=None, window=None):
        options = {"scale": q.shape[-1] ** -0.5, "sink_logits": None, "softcap": softcap, "window": window}
        return attend_kernel(q, storage, new_k, new_v, **options)

    for name, options in (("kivi2", {"window": 200}), ("balanced", {"softcap": 30.0})):
        case, q, _ = ragged(name)
        case.check(q, attend=attend, **options)


def matmul(emulator: Emulator) -> None:
    for bits, dtype in ((2, FP16), (4, BF16)):
        x = randn(1, 2, 352, 80, dtype=dtype)
        for packed in (quantize_k(x, bits, 32), quantize_v(x, bits, 32)):
            a = randn(1, 8, 2, packed.code.shape[2], dtype=dtype, seed=1)
            out = packed_matmul_triton(32, a, packed.code, packed.scale, packed.zero, bits, dtype)
            dense = packed.dequantize(torch.float64)
            dense = dense if packed.axis == "channels" else dense.mT
            expected = (a.double().unflatten(1, (2, 4)) @ dense[:, :, None]).flatten(1, 2)
            assert (out.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


def packing(emulator: Emulator) -> None:
    """Every byte of a page as the reference writes it, by the division and rounding that devices have."""
    for (k_bits, v_bits, group), D, dtype in (
        ((2, 2, 32), 128, FP16), ((2, 4, 64), 128, BF16), ((8, 2, 128), 80, FP16), ((4, 8, 32), 64, torch.float32),
    ):  # fmt: skip
        layout = PageLayout(k_bits, v_bits, group, D, dtype)
        k, v = (sample(1, 2, 2 * PAGE, D, dtype=dtype, seed=seed) for seed in (1, 2))
        pool = torch.full((5, 2, layout.words), -1, dtype=torch.int32)
        write_pages(k, v, pool, torch.tensor([[4, 1]], dtype=torch.int32), layout)
        assert_bitwise_equal(pool[[4, 1]][None], to_pages(k, v, layout))
        assert (pool[[0, 2, 3]] == -1).all()


def appending(emulator: Emulator) -> None:
    """Tokens that the device stores by itself, across the steps at which pages are packed."""
    config = KiviConfig(2, 2, 32, residual_length=1, sink_length=1)
    lengths = [0, 100, 128, 129, 257]
    valid = torch.arange(257) < torch.tensor(lengths)[:, None]
    k, v = (randn(5, 2, 257, 64, dtype=FP16, seed=seed) for seed in (1, 2))
    layers = [LayerCache(config, 5, 2, 64, FP16, max_tokens=600) for _ in range(2)]
    for layer in layers:
        layer.append(k, v, valid)
    layers[1].prepare()
    for step in range(3):
        k, v = (randn(5, 1, 2, 64, dtype=FP16, seed=10 * step + i).transpose(1, 2) for i in (1, 2))
        layers[0].append(k, v)
        append_token(k, v, layers[1].storage)
    assert_same(*layers)


def main(names: list[str]) -> None:
    gluon._device = lambda device, layout, tiles: (PROGRAMS, True)
    gluon.prefer_shared_memory = lambda kernel: None
    others = {x.__name__: x for x in (overlapping, shares, portable, matmul, packing, appending)}
    with emulated(partial(compile_launch, target=TARGET)) as emulator:
        for name in names:
            if name in others:
                others[name](emulator)
            else:
                variant(emulator, name)
            print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
