"""Names of Gluon that differ between versions of Triton: the one place that knows them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .operands import LANES

copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
commit_group = async_copy.commit_group
wait_group = async_copy.wait_group
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# (shared memory, dtype, shape, layout): the same bytes as something else
view = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@gluon.jit
def launch_dependents():
    """Let the next kernel start, if it was launched so."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_others():
    """Wait for the kernels before this one, if it was launched before their end."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def prefetch(source, WORDS: gl.constexpr, wanted):
    """Bring words of global memory, 16 bytes at least, on their way to L2: by one warp, from sm_90 on."""
    EACH: gl.constexpr = (WORDS + 127) // 128 * 4  # of a lane
    start = gl.arange(0, 32, layout=LANES) * EACH
    nbytes = gl.where(wanted, 4 * gl.minimum(gl.maximum(WORDS - start, 0), EACH), 0)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r", [(source + start).to(gl.int64), nbytes], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
