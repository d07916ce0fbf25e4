"""Compile kernels for devices that are not there: python compiling.py ARCH [gluon] prints what came of it, in JSON.

Run without TRITON_INTERPRET. The launchers choose every constant, as they would for tensors on such a device; their
launches are compiled instead of run.
"""

import contextlib
import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import KernelInterface

from kivi_kv import KiviConfig, quantize_k, quantize_v
from kivi_kv.format import PageLayout
from kivi_kv.ops.kernels.append import append_token
from kivi_kv.ops.kernels.decode import attend_kernel
from kivi_kv.ops.kernels.gluon import attend as gluon
from kivi_kv.ops.kernels.matmul import packed_matmul_triton
from kivi_kv.ops.kernels.quantize import write_pages
from kivi_kv.storage import KVStorage

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}

# (config, dtype, D, query heads per kv head, query tokens, their own K and V, other options): 8 to 64 columns
DECODE = [
    (KiviConfig(2, 2, 32), torch.float16, 128, 4, 1, False, {}),
    (KiviConfig(4, 2, 128), torch.bfloat16, 128, 8, 2, True, {}),
    (KiviConfig(4, 4, 32), torch.float16, 64, 4, 16, True, {}),
    (KiviConfig(2, 2, 32), torch.bfloat16, 64, 7, 1, True, {"softcap": 30.0, "window": 512, "sink_logits": True}),
]
WRITE = [
    (KiviConfig(2, 2, 32), torch.float16, 128),
    (KiviConfig(4, 2, 128), torch.bfloat16, 128),
    (KiviConfig(4, 4, 32), torch.float16, 64),
]
# what the Gluon kernel takes: fp16 and bf16, few and many columns, new tokens or none, both head dims, all groups
GLUON = [
    (KiviConfig(2, 2, 32), torch.float16, 128, 4, 1, False, {}),
    (KiviConfig(4, 2, 128, sink_length=32), torch.bfloat16, 128, 4, 1, False, {}),
    (KiviConfig(4, 4, 32), torch.float16, 128, 8, 1, False, {"sink_logits": True}),
    (KiviConfig(2, 2, 32), torch.bfloat16, 128, 4, 4, True, {}),
    (KiviConfig(2, 2, 32), torch.float16, 128, 1, 2, True, {}),
    (KiviConfig(4, 2, 64), torch.float16, 64, 7, 2, True, {}),
    (KiviConfig(2, 4, 32), torch.bfloat16, 64, 3, 1, False, {}),
    (KiviConfig(2, 2, 32), torch.float16, 128, 16, 1, False, {}),
]
REPORTED = ("sm_80", "sm_90")  # every variant; elsewhere the first ones, to save time
# (bits, dtype, D, query heads per kv head, query tokens)
MATMUL = [
    (2, torch.float16, 128, 4, 1),
    (2, torch.bfloat16, 256, 8, 3),
    (4, torch.bfloat16, 128, 4, 1),
    (8, torch.bfloat16, 80, 1, 1),
]


@contextlib.contextmanager
def recorded():
    """Launches, as (kernel, arguments, options), instead of running them."""
    launches, usual = [], KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda kernel, grid: lambda *args, **kw: launches.append((kernel, args, kw))
    try:
        yield launches
    finally:
        KernelInterface.__getitem__ = usual


def launches_of_attend(config, dtype, D, group, M, new, options, attend=attend_kernel) -> list:
    storage = KVStorage.empty(config, 2, 3, D, dtype, "cpu", 4096)
    q = torch.zeros(2, 3 * group, M, D, dtype=dtype)
    kv = [torch.zeros(2, M, 3, D, dtype=dtype).transpose(1, 2) if new else None] * 2
    usual = {"scale": D**-0.5, "softcap": None, "sink_logits": None, "window": None}
    if "sink_logits" in options:
        options = {**options, "sink_logits": torch.zeros(3 * group)}
    with recorded() as launches:
        attend(q, storage, *kv, **{**usual, **options})
    return launches


def launches_of_write(config, dtype, D) -> list:
    layout = PageLayout.of(config, D, dtype)
    x = torch.zeros(2, 512, 3, D, dtype=dtype).transpose(1, 2)
    pool = torch.zeros(8, 3, layout.words, dtype=torch.int32)
    with recorded() as launches:
        write_pages(x, x, pool, torch.zeros(2, 4, dtype=torch.int32), layout)
    return launches


def launches_of_append(config, dtype, D) -> list:
    storage = KVStorage.empty(config, 2, 3, D, dtype, "cpu", 4096)
    x = torch.zeros(2, 1, 3, D, dtype=dtype).transpose(1, 2)
    with recorded() as launches:
        append_token(x, x, storage)
    return launches


def launches_of_matmul(bits, dtype, D, group, M) -> list:
    x = torch.zeros(1, 2, 1024, D, dtype=dtype)
    with recorded() as launches:
        for packed in (quantize_k(x, bits, 32), quantize_v(x, bits, 32)):
            a = torch.zeros(1, 2 * group, M, packed.code.shape[2], dtype=dtype)
            packed_matmul_triton(32, a, packed.code, packed.scale, packed.zero, bits, dtype)
    return launches


def source(kernel, args, options) -> ASTSource:
    """What triton would compile for this launch: types of arguments, and what it assumes of their values."""
    named = inspect.signature(kernel.fn).bind(*args, **{k: x for k, x in options.items() if k in kernel.arg_names})
    signature, constants, attributes = {}, {}, {}
    for i, (param, (name, x)) in enumerate(zip(kernel.params, named.arguments.items(), strict=True)):
        special = not param.do_not_specialize
        if param.is_constexpr or (special and type(x) is int and x == 1):
            signature[name], constants[(i,)] = "constexpr", x
            continue
        if isinstance(x, torch.Tensor):
            signature[name] = TYPES[x.dtype]
        else:
            signature[name] = "fp32" if isinstance(x, float) else "i32" if abs(x) < 2**31 else "i64"
        if isinstance(x, torch.Tensor) or (special and type(x) is int and x % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)


def compile_launch(kernel, args, options, target: GPUTarget) -> CompiledKernel:
    how = {name: options[name] for name in ("num_warps", "num_stages", "launch_pdl", "maxnreg") if name in options}
    return triton.compile(source(kernel, args, options), target=target, options=how)


def report(kernel, args, options, target: GPUTarget) -> dict:
    """Registers and stack of a compiled launch, and the columns it is for; the size of its code elsewhere."""
    compiled = compile_launch(kernel, args, options, target)
    columns = options["TILES"] * 4 if "TILES" in options else 0
    if target.backend != "cuda":
        return {"bytes": len(compiled.asm["hsaco"])}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [BIN / "cuobjdump", "--dump-resource-usage", file.name]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
    return {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", run.stdout)} | {"columns": columns}


def launches_for(arch: str, what: str) -> list:
    few = None if arch in REPORTED else 2
    if what == "gluon":
        gluon._device = lambda device, layout, tiles: (1056, int(arch.removeprefix("sm_")) >= 90)
        gluon.prefer_shared_memory = lambda kernel: None
        return [(variant, *x) for variant in GLUON[:few] for x in launches_of_attend(*variant, gluon.attend_gluon)]
    launches = [(variant, *x) for variant in DECODE[:few] for x in launches_of_attend(*variant)]
    launches += [(variant, *x) for variant in WRITE[:few] for x in launches_of_write(*variant)]
    launches += [(variant, *x) for variant in WRITE[:few] for x in launches_of_append(*variant)]
    return launches + [(variant, *x) for variant in MATMUL[:few] for x in launches_of_matmul(*variant)]


def main(arch: str, what: str = "triton") -> None:
    hip = arch.startswith("gfx")
    if hip:
        torch.version.hip = "6.4"  # launchers ask it which device this is
    target = GPUTarget("hip", arch, 64) if hip else GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    reports = [
        [f"{kernel.fn.__name__} {variant}", report(kernel, *x, target)]
        for variant, kernel, *x in launches_for(arch, what)
    ]
    print(json.dumps(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
