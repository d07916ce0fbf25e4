"""Attention over a layer's storage, in torch, one block of pages at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import reference
from ..config import PAGE
from ..format import Parts, page_parts
from ..storage import KVStorage

# fp32 elements of one block of K or of logits: bounds scratch; fits a CPU's cache, fills a GPU
_BLOCK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 25}
_NEW_BLOCK = 512  # new tokens per block when many arrive at once

Block = tuple[Tensor, Tensor, Tensor | None, Tensor]


def attend_torch(
    q: Tensor,
    storage: KVStorage,
    new_k: Tensor | None,
    new_v: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """ops.attend, one block of pages at a time; scratch is bounded, whatever the context.

    Returns the output [B, HQ, M, D] in q's dtype and the log-sum-exp of the logits [B, HQ, M] in fp32.
    """
    B, HQ, M, D = q.shape
    H = storage.heads
    # the query heads of one kv head are rows of one matrix, so K and V are never repeated
    rows = q.float().reshape(B, H, HQ // H * M, D) * scale
    state = _OnlineSoftmax(rows, softcap)
    newest = storage.lengths[:, None] - 1  # position of each row's query, [B, HQ // H * M]
    if new_k is not None:
        newest = newest + 1 + torch.arange(M, device=q.device).repeat(HQ // H)
    first = None if window is None else (newest - window + 1)[:, None, :, None]  # first token seen
    pages = _BLOCK_ELEMENTS.get(q.device.type, 1 << 22) // (B * H * PAGE * max(D, HQ // H * M))
    for k, v, mask, token in _stored_blocks(storage, max(1, pages)):
        state.add(k, v, mask, None if first is None else token >= first)
    if new_k is not None and new_v is not None:
        for k, v, causal, token in _new_blocks(new_k, new_v, HQ // H):
            behind = storage.lengths[:, None, None, None] + token
            state.add(k, v, None, causal if first is None else causal & (behind >= first))
    if sink_logits is not None:
        state.add_logits(sink_logits.float().view(1, H, HQ // H, 1).expand(B, -1, -1, M).reshape(B, H, -1, 1))
    return state.output().view(B, HQ, M, D).to(q.dtype), state.log_sum().view(B, HQ, M)


def _stored_blocks(storage: KVStorage, pages_per_block: int) -> Iterator[Block]:
    """fp32 K and V [B, H, T, D] of each block, which tokens each row has ([B, 1, 1, T], None for all), and which
    tokens they are ([B or 1, 1, 1, T])."""
    packed, S = storage.packed, storage.config.sink_length
    most = int(packed.max()) if packed.numel() else 0
    least = int(packed.min()) if packed.numel() else 0
    for start in range(0, most, pages_per_block):
        stop = min(start + pages_per_block, most)
        pages = storage.pool[storage.table[:, start:stop].clamp(min=0)]  # [B, P, H, words]
        k, v = (_values(parts, storage.layout.group_size) for parts in page_parts(pages, storage.layout))
        mask = None
        if stop > least:
            page = torch.arange(start, stop, device=packed.device).repeat_interleave(PAGE)
            mask = (page < packed[:, None])[:, None, None]
        token = S + torch.arange(start * PAGE, stop * PAGE, device=packed.device)
        yield (
            k.transpose(-1, -2),
            v[..., : storage.layout.head_dim],
            mask,
            token[None, None, None],
        )
    if storage.lengths.any():
        token = storage.dense_tokens()
        mask = token < storage.lengths[:, None]
        yield storage.dense_k.float(), storage.dense_v.float(), mask[:, None, None], token[:, None, None]


def _values(parts: Parts, group_size: int) -> Tensor:
    """reference.decode in fp32, in place where no group is ragged or near the end of fp32's range."""
    code, scale, zero = parts
    groups, ragged = divmod(code.shape[-1], group_size)
    huge = scale.dtype != torch.float16 and scale.max() > torch.finfo(torch.float32).max / 2**8
    if (ragged and groups) or huge:
        return reference.decode(code, scale, zero, group_size, torch.float32)
    values = code.float()
    values.unflatten(-1, (max(groups, 1), -1)).mul_(scale.float().unsqueeze(-1)).add_(zero.float().unsqueeze(-1))
    return values


def _new_blocks(k: Tensor, v: Tensor, heads: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The new tokens' own K and V, masked causally for rows ordered (head, token)."""
    M = k.shape[2]
    query = torch.arange(M, device=k.device).repeat(heads)[:, None]
    for start in range(0, M, _NEW_BLOCK):
        token = torch.arange(start, min(start + _NEW_BLOCK, M), device=k.device)
        part = slice(start, start + _NEW_BLOCK)
        yield k[:, :, part].float(), v[:, :, part].float(), token <= query, token  # mask: [heads * M, t]


class _OnlineSoftmax:
    """Softmax-weighted sum of values over blocks: running maximum, sum and output per query row."""

    def __init__(self, q: Tensor, softcap: float | None) -> None:
        self.q = q  # [B, H, rows, D], scaled
        self.softcap = softcap
        self.top = q.new_full((*q.shape[:-1], 1), -torch.inf)
        self.sum = torch.zeros_like(self.top)
        self.acc = torch.zeros_like(q)

    def add(self, k: Tensor, v: Tensor, mask: Tensor | None, seen: Tensor | None) -> None:
        """mask: which tokens a row of the batch has, [B, 1, 1, T]; seen: which a query sees, [..., queries, T]."""
        logits = self.q @ k.transpose(-1, -2)  # [B, H, rows, T]
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
            # a row without that token may lie over NaN, and 0 * NaN is NaN
            v = v.masked_fill(~mask.transpose(-1, -2), 0.0)
        if seen is not None:
            logits = logits.masked_fill(~seen, -torch.inf)
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

    def log_sum(self) -> Tensor:
        return (self.top + self.sum.log()).squeeze(-1)
