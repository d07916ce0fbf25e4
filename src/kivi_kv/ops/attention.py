"""Attention over a layer's storage, in torch, one block of pages at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import reference
from ..config import PAGE
from ..format import Packed, from_pages
from ..storage import KVStorage
from .checks import check_shape

# fp32 elements of one block of K or of logits: bounds scratch; fits a CPU's cache, fills a GPU
_BLOCK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 25}
_NEW_BLOCK = 512  # new tokens per block when many arrive at once

Block = tuple[Tensor, Tensor, Tensor | None]


def attend(
    q: Tensor,
    storage: KVStorage,
    new_k: Tensor | None = None,
    new_v: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Exact attention of M query tokens over sinks, pages, residual and, if given, their own K and V.

    q: [B, HQ, M, D]. Every query sees every stored token of its row; query m sees new tokens 0 .. m.
    new_k, new_v: [B, H, M, D], tokens that are not stored yet. scale multiplies the logits (default D ** -0.5).
    softcap bounds them by softcap * tanh(logit / softcap). sink_logits [HQ] join the softmax without a value.
    Returns [B, HQ, M, D] in q's dtype, zeros where a query sees nothing. Scratch is bounded, whatever the
    context. Raises ValueError on shapes.
    """
    B, HQ, M, D = q.shape
    H = storage.heads
    if HQ % H:
        raise ValueError(f"q: expected heads a multiple of the cache's {H}, got {HQ}")
    check_shape("q", q, (storage.batch, HQ, M, storage.layout.head_dim))
    scale = D**-0.5 if scale is None else scale

    # the query heads of one kv head are rows of one matrix, so K and V are never repeated
    rows = q.float().reshape(B, H, HQ // H * M, D) * scale
    state = _OnlineSoftmax(rows, softcap)
    pages = _BLOCK_ELEMENTS.get(q.device.type, 1 << 22) // (B * H * PAGE * max(D, HQ // H * M))
    for k, v, mask in _stored_blocks(storage, max(1, pages)):
        state.add(k, v, mask)
    if new_k is not None and new_v is not None:
        check_shape("new_k", new_k, (B, H, M, D))
        check_shape("new_v", new_v, (B, H, M, D))
        for k, v, mask in _new_blocks(new_k, new_v, HQ // H):
            state.add(k, v, mask)
    if sink_logits is not None:
        state.add_logits(sink_logits.float().view(1, H, HQ // H, 1).expand(B, -1, -1, M).reshape(B, H, -1, 1))
    return state.output().view(B, HQ, M, D).to(q.dtype)


def _stored_blocks(storage: KVStorage, pages_per_block: int) -> Iterator[Block]:
    """fp32 K and V [B, H, T, D] of each block, and which tokens each row has: [B, 1, 1, T] or None for all."""
    packed = storage.packed
    most = int(packed.max()) if packed.numel() else 0
    least = int(packed.min()) if packed.numel() else 0
    for start in range(0, most, pages_per_block):
        stop = min(start + pages_per_block, most)
        pages = storage.pool[storage.table[:, start:stop].clamp(min=0)]  # [B, P, H, words]
        k, v = from_pages(pages, storage.layout)
        mask = None
        if stop > least:
            page = torch.arange(start, stop, device=packed.device).repeat_interleave(PAGE)
            mask = (page < packed[:, None])[:, None, None]
        yield _values(k).transpose(-1, -2), _values(v)[..., : storage.layout.head_dim], mask
    if storage.lengths.any():
        yield storage.dense_k.float(), storage.dense_v.float(), storage.dense_mask()[:, None, None]


def _values(packed: Packed) -> Tensor:
    """reference.decode in fp32, in place where no group is ragged or near the end of fp32's range."""
    code = reference.unpack(packed.code, packed.bits).float()
    scale, zero = packed.scale.float().unsqueeze(-1), packed.zero.float().unsqueeze(-1)
    groups, ragged = divmod(code.shape[-1], packed.group_size)
    huge = packed.scale.dtype != torch.float16 and scale.max() > torch.finfo(torch.float32).max / 2**packed.bits
    if (ragged and groups) or huge:
        return reference.decode(code, packed.scale, packed.zero, packed.group_size, torch.float32)
    code.unflatten(-1, (max(groups, 1), -1)).mul_(scale).add_(zero)
    return code


def _new_blocks(k: Tensor, v: Tensor, heads: int) -> Iterator[Block]:
    """The new tokens' own K and V, masked causally for rows ordered (head, token)."""
    M = k.shape[2]
    query = torch.arange(M, device=k.device).repeat(heads)[:, None]
    for start in range(0, M, _NEW_BLOCK):
        part = slice(start, start + _NEW_BLOCK)
        mask = torch.arange(M, device=k.device)[part] <= query  # [heads * M, t]
        yield k[:, :, part].float(), v[:, :, part].float(), mask


class _OnlineSoftmax:
    """Softmax-weighted sum of values over blocks: running maximum, sum and output per query row."""

    def __init__(self, q: Tensor, softcap: float | None) -> None:
        self.q = q  # [B, H, rows, D], scaled
        self.softcap = softcap
        self.top = q.new_full((*q.shape[:-1], 1), -torch.inf)
        self.sum = torch.zeros_like(self.top)
        self.acc = torch.zeros_like(q)

    def add(self, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
        logits = self.q @ k.transpose(-1, -2)  # [B, H, rows, T]
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
            if mask.ndim == 4:  # a row without that token may lie over NaN, and 0 * NaN is NaN
                v = v.masked_fill(~mask.transpose(-1, -2), 0.0)
        weights = self.add_logits(logits)
        self.acc += weights @ v

    def add_logits(self, logits: Tensor) -> Tensor:
        top = torch.maximum(self.top, logits.amax(-1, keepdim=True))
        safe = torch.where(top == -torch.inf, 0.0, top)  # nothing seen yet: avoid inf - inf
        weights = torch.exp(logits - safe)
        shrink = torch.exp(self.top - safe)
        self.sum = self.sum * shrink + weights.sum(-1, keepdim=True)
        self.acc = self.acc * shrink
        self.top = top
        return weights

    def output(self) -> Tensor:
        return torch.where(self.sum == 0, 0.0, self.acc / self.sum)  # a NaN stays one
