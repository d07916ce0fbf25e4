"""Names of Gluon that differ between versions of Triton: the one place that knows them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

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
