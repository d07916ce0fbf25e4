"""16 full-precision tokens at a time: sinks, residual and new ones."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from . import names
from .operands import HALVES, MMA, A, apart, from_words, weight_operands
from .page import query


@gluon.jit
def _rows(codes, D: gl.constexpr, DTYPE: gl.constexpr):
    """A page's codes' memory as [16 tokens, D]."""
    return names.view(codes.slice(0, 8 * D), DTYPE, [16, D], HALVES)


@gluon.constexpr_function
def _pieces(D):
    """[16 tokens, D] halves: 16 bytes a lane, whole rows side by side."""
    return gl.BlockedLayout([1, 8], [256 // D, D // 8], [1, 1], [1, 0])


@gluon.jit
def _copy(codes, source, offset, stored, D: gl.constexpr):
    """The tokens that lie at source + offset [16], zeros where not stored [16]."""
    L: gl.constexpr = _pieces(D)
    at = gl.expand_dims(offset, 1) + gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, L)), 0)
    mask = gl.expand_dims(stored, 1) & (at >= 0)
    names.copy_to_shared(_rows(codes, D, source.dtype.element_ty), source + at, mask=mask)
    names.commit_group()


@gluon.jit
def copy_rows(codes, source, packed, n, stop, S: gl.constexpr, RING: gl.constexpr, D: gl.constexpr):
    """Tokens n .. n + 15 of those stored in full precision, up to `stop`: sinks, then the ring, oldest first."""
    token = n + gl.arange(0, 16, layout=gl.SliceLayout(1, _pieces(D)))
    row = gl.where(token < S, token, S + (token + packed * 128 - S) % RING)
    _copy(codes, source, row * D, token < stop, D)


@gluon.jit
def copy_new(codes, source, stride, start, M, D: gl.constexpr):
    """The M <= 16 new tokens from `start` on, which is 0."""
    token = start + gl.arange(0, 16, layout=gl.SliceLayout(1, _pieces(D)))
    _copy(codes, source, token * stride, token < M, D)


@gluon.jit
def dense_logits(
    codes, q, token, limits, D: gl.constexpr, TILES: gl.constexpr, L: gl.constexpr, DTYPE: gl.constexpr
):
    """Logits [16, 4] by tile, -inf where token [16, 1] >= limits, by tile [1, 4]."""
    rows = _rows(codes, D, DTYPE)
    x = ()
    for t in gl.static_range((TILES + 1) // 2):
        total = gl.zeros([16, 8], gl.float32, layout=MMA)
        for kb in gl.static_range(D // 32):
            part = from_words(query(q, t * (D // 32) + kb, L))
            if DTYPE == gl.bfloat16:  # exact: it was bf16, times a power of two
                part = part.to(gl.float32).to(gl.bfloat16)
            total = mma_v2(rows.slice(kb * 32, 32, 1).load(A), part, total)
        parts = apart(total)
        x = x + (gl.where(token < limits[2 * t], parts[0], float("-inf")),)
        if TILES > 1:
            x = x + (gl.where(token < limits[2 * t + 1], parts[1], float("-inf")),)
    return x


@gluon.jit
def dense_values(
    codes, p, acc, acc_zero, alpha, D: gl.constexpr, TILES: gl.constexpr, DTYPE: gl.constexpr, UNIT: gl.constexpr
):
    """acc and acc_zero as of page_values: times alpha, plus UNIT times these values by weights p, by tile."""
    weights = weight_operands(p, TILES, DTYPE)
    rest = ()
    if DTYPE == gl.bfloat16:  # whose rounding of weights would show
        lows = ()
        for t in gl.static_range(TILES):
            lows = lows + (p[t] - p[t].to(gl.bfloat16).to(gl.float32),)
        rest = rest + weight_operands(lows, TILES, DTYPE)
    new_acc, new_zero = (), ()
    for nb in gl.static_range(D // 32):
        v = _rows(codes, D, DTYPE).slice(nb * 32, 32, 1).permute([1, 0]).load(A)
        for t in gl.static_range(len(acc_zero)):
            part = mma_v2(v, weights[t], gl.zeros([32, 8], gl.float32, layout=MMA))
            if DTYPE == gl.bfloat16:
                part = mma_v2(v, rest[t], part)
            new_acc = new_acc + (acc[nb * len(acc_zero) + t] * gl.expand_dims(alpha[t], 0) + part * UNIT,)
    for t in gl.static_range(len(acc_zero)):
        new_zero = new_zero + (acc_zero[t] * gl.expand_dims(alpha[t], 0),)
    return new_acc, new_zero
