"""The attention named 'kivi' and its mask, registered through transformers' public interfaces."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from ...ops.dense_attention import dense_attention, newest_mask
from .handle import KVHandle

NAME = "kivi"
NEWEST = -1  # for the first query's position, which only the device knows: the queries are the newest tokens
QUERIES = 1024  # of a mask looked at together: what that takes stays small beside the mask
PATTERN = "the model's mask is more than causal and padding: its packed layers are dequantized at every step"


def register() -> None:
    """Make attn_implementation='kivi' known to transformers. Harmless to call again."""
    AttentionInterface.register(NAME, kivi_attention)
    AttentionMaskInterface.register(NAME, kivi_mask)


def kivi_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The padding mask [B, T] as it came, or None, where plain causal attention is asked for.

    Sliding windows, other patterns and caches with free rows at their end get sdpa's 4D mask. So does a model that
    asks for one whatever it says (allow_is_causal_skip=False), since it computes with it: falcon adds its alibi.
    """
    plain = mask_function is causal_mask_function
    alone = q_offset == 0 and (attention_mask is None or attention_mask.shape[1] == 1)
    if plain and q_length == kv_length == 1 and not alone:
        return _step_mask(attention_mask)
    if isinstance(q_offset, int) and q_offset == NEWEST:
        if kv_length == 1:
            raise ValueError(
                "attention_mask: expected a causal one for a step counted on the device, got a pattern"
            )
        q_offset = kv_length - q_length
    newest = isinstance(q_offset, int) and kv_offset == 0 and q_offset + q_length == kv_length
    if not (plain and newest and kwargs.get("allow_is_causal_skip", True)):
        # None must mean "causal, the queries being the newest tokens" to kivi_attention; sdpa_mask means more by it
        kwargs["allow_is_causal_skip"] = kwargs.get("allow_is_causal_skip", True) and q_length in (1, kv_length)
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )
    if attention_mask is None or bool(attention_mask.all()):
        return None
    mask = attention_mask[:, :kv_length].bool()
    short = kv_length - mask.shape[1]
    return torch.nn.functional.pad(mask, (0, short)) if short else mask


def _step_mask(attention_mask: Tensor | None) -> Tensor | None:
    """For one token counted on the device: its column [B, 1] if every row takes it, else the mask as it came.

    Costs a wait for the newest column; in a compiled model there is none, since generate() has been here before.
    """
    if attention_mask is None or attention_mask.shape[1] == 1:
        return attention_mask
    newest = attention_mask[:, -1:].bool().clone(memory_format=torch.contiguous_format)  # strides are compiled in
    if torch.compiler.is_compiling() or bool(newest.all()):
        return newest
    return attention_mask.bool()


def kivi_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | KVHandle,
    value: Tensor | KVHandle,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over a packed layer (handles) or over dense K and V. query: [B, HQ, M, D]; returns [B, M, HQ, D].

    Understands softcap and the sink logits s_aux. Raises ValueError for what it cannot do: dropout, position
    bias, bidirectional attention or a window over a packed layer.
    """
    if not isinstance(key, KVHandle) or not isinstance(value, KVHandle):
        return _dense(module, query, key, value, attention_mask, dropout, scaling, **kwargs), None
    if attention_mask is not None and attention_mask.ndim != 2:
        attention_mask = attention_mask.expand(query.shape[0], -1, -1, -1)  # one mask may serve all rows
        padding = _padding_of(attention_mask)
        if padding is None or not key.layer.is_padding(padding):  # not so if stored tokens are hidden for now
            dense_k, dense_v = key.layer.materialize(PATTERN)
            if attention_mask.shape[-1] != dense_k.shape[2]:
                raise ValueError(
                    f"attention_mask: expected one of {dense_k.shape[2]} tokens, got {attention_mask.shape[-1]}"
                )
            out = _dense(module, query, dense_k, dense_v, attention_mask, dropout, scaling, **kwargs)
            key.layer.store(_stored_of(attention_mask, query.shape[2]))
            return out, None
        attention_mask = padding
    try:
        _check_supported(key, dropout, kwargs)
    except ValueError:
        key.layer.staged = None  # what is refused is not stored later either
        raise
    options = {"scale": scaling, "softcap": kwargs.get("softcap"), "sink_logits": kwargs.get("s_aux")}
    given = {name: x for name, x in options.items() if x is not None}

    def usual(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return _dense(module, q, k, v, None, dropout, scaling, **kwargs).transpose(1, 2)

    return key.layer.attend(query, attention_mask, usual, **given).transpose(1, 2).contiguous(), None


def _dense(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> Tensor:
    """Layers that keep their own cache, and models that run with another cache."""
    M, T = query.shape[2], key.shape[2]
    padding = mask[:, None, None] if mask is not None and mask.ndim == 2 else None
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if padding is not None or (mask is None and causal and 1 < M < T):
        # kivi_mask says less than sdpa's: causal, the queries being the newest tokens
        mask = newest_mask(M, T, query.device)
        mask = mask[None, None] if padding is None else mask & padding
    softcap, sinks = kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
    if softcap is None and sinks is None:
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)[
            0
        ]
    _refuse("dropout", dropout, 0.0)
    out = dense_attention(query, key, value, mask, scale=scaling, softcap=softcap, sink_logits=sinks)
    return out.transpose(1, 2).contiguous()


def _check_supported(key: KVHandle, dropout: float, kwargs: dict[str, Any]) -> None:
    _refuse("dropout", dropout, 0.0)
    _refuse("position_bias", kwargs.get("position_bias"), None)
    _refuse("is_causal", kwargs.get("is_causal", True) in (None, True), True)
    window = kwargs.get("sliding_window")
    if window is not None and window < key.shape[2]:
        raise ValueError(f"sliding_window: expected None for a packed layer, got {window}")


def _refuse(name: str, value: object, allowed: object) -> None:
    if value != allowed:
        raise ValueError(f"{name}: expected {allowed} with a packed cache, got {value}")


def _padding_of(mask: Tensor) -> Tensor | None:
    """The padding [B, T] in a mask [B, 1, M, T] that is causal and nothing else beside it, or None."""
    M, T = mask.shape[-2:]
    if mask.dtype != torch.bool or mask.shape[1] != 1:
        return None
    seen = mask[:, 0, -1]  # the newest query sees all that is not padding
    for first in range(0, M, QUERIES):
        rows = mask[:, 0, first : first + QUERIES]
        past = T - M + first + rows.shape[1]
        causal = newest_mask(rows.shape[1], past, mask.device)
        if rows[..., past:].any() or not torch.equal(rows[..., :past], causal & seen[:, None, :past]):
            return None
    return seen


def _stored_of(mask: Tensor, M: int) -> Tensor:
    """Which of the M newest tokens are no padding, [B, M] bool, by a mask [B, heads, M, T].

    Padding sees nothing and nothing sees it. A model that chooses what to attend may hide a token for now only.
    """
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    seen = seen.any(dim=1)  # [B, M, T]
    return seen.any(dim=2) | seen[..., -M:].any(dim=1)
