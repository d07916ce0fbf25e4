"""Matrix operands of one warp: layouts, and the ways between them that cost nothing or one instruction."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]))
A = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
B = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
FLAT3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
# rows of halves, their 16-byte pieces so placed that those of one column lie in different banks
HALVES = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@gluon.jit
def zeros(COUNT: gl.constexpr, ROWS: gl.constexpr):
    """COUNT of [ROWS, 8], to add products to."""
    x = ()
    for _ in gl.static_range(COUNT):
        x = x + (gl.zeros([ROWS, 8], gl.float32, layout=MMA),)
    return x


@gluon.jit
def multiply(a, b):
    """Products of fp16 pairs."""
    return gl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def as_halves(words):
    """int32 words as their low and high halves, fp16: no instruction."""
    return gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
    )


@gluon.jit
def to_words(x):
    """An operand [32, 8] as words [16, 8] of two halves, which would fill a register each through a loop."""
    low, high = gl.split(x.reshape([16, 2, 8]).permute([0, 2, 1]))
    return gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def joined(low, high):
    """The operand [32, 8] of its words' halves [16, 8]."""
    return gl.convert_layout(gl.join(low, high).permute([0, 2, 1]).reshape([32, 8]), B, assert_trivial=True)


@gluon.jit
def from_words(words):
    """Undo to_words."""
    low, high = as_halves(words)
    return joined(low, high)


@gluon.jit
def store_words(target, words):
    """Words [16, 8] of an operand to shared memory, 16 bytes a lane."""
    target.store(words.reshape([4, 4, 8]).permute([2, 1, 0]))


@gluon.jit
def load_words(source, L: gl.constexpr):
    """Undo store_words; L: the words' layout."""
    P: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2]], [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [], [], [8, 4, 4]
    )
    words = source.load(P).permute([2, 1, 0]).reshape([16, 8])
    return gl.convert_layout(words, L, assert_trivial=True)


@gluon.jit
def apart(x):
    """[16, 8], or [1, 8] for every row, to two of [16, 4]: even and odd columns, which lie in one lane."""
    x, _ = gl.broadcast(x, gl.zeros([16, 8], gl.float32, layout=MMA))
    return gl.split(x.reshape([16, 4, 2]))


@gluon.jit
def together(even, odd):
    """Undo apart: [16, 8]."""
    return gl.convert_layout(gl.join(even, odd).reshape([16, 8]), MMA, assert_trivial=True)


@gluon.jit
def pairs(x):
    """Tiles of 4 columns [16, 4] as tiles of 8: two share one, a single one has all its columns twice."""
    wide = ()
    if len(x) == 1:
        wide = wide + (together(x[0], x[0]),)
    else:
        for t in gl.static_range(len(x) // 2):
            wide = wide + (together(x[2 * t], x[2 * t + 1]),)
    return wide


@gluon.jit
def tiles(wide, TILES: gl.constexpr):
    """Undo pairs, of columns [8] that are the same for every row: TILES of [16, 4]."""
    parts = ()
    for t in gl.static_range(len(wide)):
        even, odd = apart(gl.expand_dims(wide[t], 0))
        parts = parts + (even,)
        if TILES > 1:
            parts = parts + (odd,)
    return parts


@gluon.constexpr_function
def _transposing(dtype):
    cast = "f16x2" if dtype == gl.float16 else "bf16x2"
    return f"{{ .reg .b32 t; cvt.rn.{cast}.f32 t, $2, $1; movmatrix.sync.aligned.m8n8.trans.b16 $0, t; }}"


@gluon.jit
def transposed(even, odd, DTYPE: gl.constexpr):
    """Two of fp32 [16 tokens, 4] to the operand [16 tokens, 8] of even and odd columns: across lanes."""
    t = gl.inline_asm_elementwise(_transposing(DTYPE), "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    low, high = as_halves(t)
    if DTYPE == gl.bfloat16:
        low, high = low.to(gl.bfloat16, bitcast=True), high.to(gl.bfloat16, bitcast=True)
    x = gl.join(low, high).reshape([2, 8, 4, 2]).permute([0, 2, 3, 1]).reshape([16, 8])
    return gl.convert_layout(x, B, assert_trivial=True)


@gluon.jit
def weight_operands(p, TILES: gl.constexpr, DTYPE: gl.constexpr):
    """Weights [16, 4] by slot and tile as operands [16, 8] by slot and pair of tiles."""
    weights = ()
    for i in gl.static_range(len(p) // TILES):
        if TILES == 1:
            weights = weights + (transposed(p[i], p[i], DTYPE),)
        else:
            for t in gl.static_range(TILES // 2):
                weights = weights + (transposed(p[i * TILES + 2 * t], p[i * TILES + 2 * t + 1], DTYPE),)
    return weights
