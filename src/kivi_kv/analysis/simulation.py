"""One forward pass that attends as decoding with a quantized cache would, token by token."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..config import PAGE
from ..ops import dense_attention
from .fidelity import decode_chunks
from .hooks import replaced_attention
from .remedies import SimConfig, quantize_keys, quantize_values

NAME = "kivi_simulation"
_BLOCK = 128


def attend_as_decoded(q: Tensor, k: Tensor, v: Tensor, config: SimConfig, layer: int, scale: float) -> Tensor:
    """Causal attention [B, HQ, T, D] in which query t sees each token as its cache holds it after t + 1 tokens.

    q: [B, HQ, T, D]; k, v: [B, H, T, D]. Between two flushes the packed tokens stay the same, so the queries of
    such a stretch share one K and one V, part quantized and part as it came.
    """
    if config.paper_flush:
        return _attend_paper(q, k, v, config, layer, scale)
    T, S = q.shape[2], config.cache.sink_length
    end = S + config.cache.pages(T) * PAGE  # tokens S .. end - 1 are packed at last
    packed_k = quantize_keys(k[:, :, S:end], config, layer) if end > S else k[:, :, :0]
    packed_v = quantize_values(v[:, :, S:end], config, layer) if end > S else v[:, :, :0]
    out = torch.empty_like(q)
    for start, stop in decode_chunks(T, config.cache):
        edge = S + config.cache.pages(start + 1) * PAGE
        seen_k = torch.cat([k[:, :, :S], packed_k[:, :, : edge - S], k[:, :, edge:stop]], dim=2)[:, :, :stop]
        seen_v = torch.cat([v[:, :, :S], packed_v[:, :, : edge - S], v[:, :, edge:stop]], dim=2)[:, :, :stop]
        out[:, :, start:stop] = dense_attention(q[:, :, start:stop], seen_k, seen_v, scale=scale)
    return out


def _attend_paper(q: Tensor, k: Tensor, v: Tensor, config: SimConfig, layer: int, scale: float) -> Tensor:
    """KIVI's own rule: keys wait until residual_length of them are packed at once, values leave one by one.

    Both after the step in which they become too many.
    """
    B, HQ, T, D = q.shape
    H, R = k.shape[1], max(config.cache.residual_length, config.cache.group_size)
    filler = k[:, :, -1:].expand(-1, -1, -T % PAGE, -1)  # only whole groups are used below
    packed_k = quantize_keys(torch.cat([k, filler], dim=2), config, layer)
    packed_v = quantize_values(v, config, layer)
    out = torch.empty_like(q)
    token = torch.arange(T, device=q.device)
    for start in range(0, T, _BLOCK):
        stop = min(start + _BLOCK, T)
        query = token[start:stop, None]
        rows = q[:, :, start:stop].float().reshape(B, H, HQ // H, stop - start, D)
        logits = torch.where(
            token[:stop] < query // R * R,
            rows @ packed_k[:, :, None, :stop].float().transpose(-1, -2),
            rows @ k[:, :, None, :stop].float().transpose(-1, -2),
        )
        weights = (logits * scale).masked_fill(token[:stop] > query, -torch.inf).softmax(-1)
        old = weights * (token[:stop] < query - config.cache.residual_length)
        mixed = old @ packed_v[:, :, None, :stop].float() + (weights - old) @ v[:, :, None, :stop].float()
        out[:, :, start:stop] = mixed.reshape(B, HQ, stop - start, D).to(q.dtype)
    return out


@contextmanager
def simulate(model: Any, config: SimConfig | None, errors: dict[int, float] | None = None) -> Iterator[None]:
    """Within it, a forward pass of model without a cache attends as decoding with config would; None is dense.

    Sliding layers attend as usual. For one unpadded row at a time. errors, if given, receives for each layer the
    relative error of its attention output, against dense attention of the same q, k and v.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        for name in ("softcap", "s_aux"):
            if kwargs.get(name) is not None:
                raise ValueError(f"model: expected plain softmax attention for a simulation, got {name}")
        if config is None or kwargs.get("sliding_window"):
            return sdpa_attention_forward(module, q, k, v, mask, **kwargs)
        if mask is not None:
            raise ValueError("model: expected causal attention of one unpadded text, got another mask")
        index: Any = module.layer_idx
        scale = kwargs.get("scaling") or q.shape[-1] ** -0.5
        out = attend_as_decoded(q, k, v, config, index, scale)
        if errors is not None:
            exact = dense_attention(q, k, v, scale=scale).float()
            errors[index] = ((out.float() - exact).norm() / exact.norm()).item()
        return out.transpose(1, 2).contiguous(), None

    with replaced_attention(model, NAME, attention, sdpa_mask):
        yield
