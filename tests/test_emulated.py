"""The kernels' compiled code, run on a CPU statement by statement; and that what runs it sees mistakes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from interpreting import compiling_environment
from ptx.memory import GlobalMemory, SharedMemory
from ptx.parse import parse
from ptx.steps import step_of
from ptx.warp import Warp, run

SCRIPT = Path(__file__).with_name("emulating.py")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("kivi2", "packing", "appending"), marks=pytest.mark.quick),
        ("balanced", "kivi4 D64, 7 heads", "kivi2 D64 bf16, 5 tokens", "groups of 64, 2 tokens"),
        ("overlapping", "shares"),
        ("16 heads", "2, 4 bits, 16 heads", "portable", "matmul"),
    ],
    ids=" and ".join,
)
def test_compiled_kernels(names, tmp_path):
    """Right, with nothing read that was not written, waited for or there."""
    run = subprocess.run(
        [sys.executable, SCRIPT, *names], env=compiling_environment(tmp_path), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[: len(names)] == list(names)


PTX = """
.visible .entry kernel(
	.param .u64 kernel_param_0
)
.reqntid 64
{
	.reg .b32 %r<9>;
	ld.param.b64 %rd1, [kernel_param_0];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd2, %r1, 4;
	add.s64 %rd3, %rd1, %rd2;
	shl.b32 %r2, %r1, 2;
	mov.b32 %r3, global_smem;
	add.s32 %r4, %r3, %r2;
	xor.b32 %r5, %r4, 128;
BODY
	st.global.b32 [%rd3], {%r7};
	ret;
}
"""
COPY = "cp.async.cg.shared.global [%r4], [%rd3], 0x4, 0x4; cp.async.commit_group;"
WAIT = "cp.async.wait_group 0x0;"
BARRIER = "bar.sync 0;"
OWN, OTHER = "ld.shared.b32 %r7, [%r4];", "ld.shared.b32 %r7, [%r5];"


def run_ptx(*body: str) -> torch.Tensor:
    """0 .. 63 in, by two warps; what comes out: their own numbers, unless the other's were read."""
    x = torch.arange(64, dtype=torch.int32)
    program = parse(PTX.replace("BODY", "\n".join(body)))
    memory, shared = GlobalMemory([x]), SharedMemory(256)
    arguments = {"kernel_param_0": np.full(32, x.data_ptr(), dtype=np.uint64)}
    warps = [
        run(
            Warp(i, {"%tid.x": np.arange(32 * i, 32 * i + 32, dtype=np.uint32)}, arguments, memory, shared, list),
            program,
            step_of,
        )
        for i in range(2)
    ]
    while warps:
        warps = [warp for warp in warps if next(warp, True) is None]
        shared.phase += 1
    return x


def test_emulator_copies_and_barriers():
    numbers = torch.arange(64)
    assert torch.equal(run_ptx(COPY, WAIT, OWN), numbers.int())
    assert torch.equal(run_ptx(COPY, WAIT, BARRIER, OTHER), numbers.roll(32).int())
    assert torch.equal(run_ptx(COPY, OWN), torch.full((64,), -1, dtype=torch.int32)), "not waited for: poison"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (["setp.ge.u32 %p1, %r1, 32;", COPY, WAIT, f"@%p1 {OTHER}", OWN], "race: read"),
        ([COPY, WAIT, OTHER], "race: write"),
        ([COPY, WAIT, BARRIER, OTHER, COPY], "race: read"),
        (["add.s32 %r4, %r4, 256;", OWN], "shared address"),
        (["add.s32 %r4, %r4, 2;", OWN], "not a multiple of 4"),
        (["add.s64 %rd3, %rd3, 256;", "mov.u32 %r7, 0;"], "outside of every tensor"),
        (["setp.lt.u32 %p1, %r1, 40;", "@%p1 bra $L1;", "$L1: mov.u32 %r7, 0;"], "lanes part"),
    ],
)
def test_emulator_refuses(body, message):
    with pytest.raises(RuntimeError, match=message):
        run_ptx(*body)


def test_matrix_product_of_the_emulator_is_that_of_the_manual():
    """Fragments as PTX's manual draws them, on numbers that fp16 holds."""
    from ptx.numbers import product

    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 8, shape).astype(np.float16) for shape in ((16, 16), (16, 8)))
    c = rng.integers(-8, 8, (16, 8)).astype(np.float32)
    lane = np.arange(32)
    group, thread = lane // 4, lane % 4 * 2

    def word(x, row, column, along):
        """Two halves side by side in a register, the lower one first."""
        pair = [x[row, column], x[row, column + 1] if along else x[row + 1, column]]
        return np.ascontiguousarray(np.stack(pair, axis=-1)).view(np.uint32)[:, 0]

    left = [word(a, group + 8 * (i % 2), thread + 8 * (i // 2), True) for i in range(4)]
    right = [word(b, thread + 8 * i, group, False) for i in range(2)]
    sums = [c[group + 8 * (i // 2), thread + i % 2].view(np.uint32) for i in range(4)]
    out = product(left, right, sums, bf16=False)
    expected = a.astype(np.float64) @ b + c
    for i, x in enumerate(out):
        assert (x.view(np.float32) == expected[group + 8 * (i // 2), thread + i % 2]).all()
