"""Attention over dense K and V: torch's own, or written out for softcap and sink logits, which that lacks."""

import torch
import torch.nn.functional as F
from torch import Tensor


def newest_mask(M: int, T: int, device: torch.device) -> Tensor:
    """Which of T tokens each of the M newest sees, [M, T] bool: those up to itself."""
    return torch.arange(T, device=device) <= T - M + torch.arange(M, device=device)[:, None]


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """softmax(softcap * tanh(q k^T * scale / softcap)) v, the softmax including one value-less logit per head.

    q: [B, HQ, M, D]; k, v: [B, H, T, D]; mask: bool, True where seen, broadcastable to [B, HQ, M, T], or None for
    causal with the queries being the newest tokens; sink_logits: [HQ]. Returns [B, HQ, M, D] in q's dtype.
    """
    B, HQ, M, D = q.shape
    H, T = k.shape[1], k.shape[2]
    plain = softcap is None and sink_logits is None
    if plain and mask is None and M in (1, T):
        return F.scaled_dot_product_attention(q, k, v, is_causal=M > 1, scale=scale, enable_gqa=True)
    if mask is None:
        mask = newest_mask(M, T, q.device)
    if plain:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    grouped = q.float().reshape(B, H, HQ // H * M, D)
    logits = (grouped @ k.float().transpose(-1, -2)).view(B, HQ, M, T) * (D**-0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    if sink_logits is not None:
        sink = sink_logits.float().view(1, HQ, 1, 1).expand(B, -1, M, -1)
        logits = torch.cat([logits, sink], dim=-1)
    weights = logits.softmax(-1)[..., :T].reshape(B, H, HQ // H * M, T)
    return (weights @ v.float()).view(B, HQ, M, D).to(q.dtype)
