"""LayerCache.decode as an operator of torch, so that a model that decodes can be compiled whole."""

import torch
from torch import Tensor

from ..config import KiviConfig
from ..format import PageLayout
from ..ops import append_token, attend
from ..storage import KVStorage


@torch.library.custom_op("kivi_kv::decode", mutates_args=("pool", "lengths", "packed", "dense_k", "dense_v"))
def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    table: Tensor,
    lengths: Tensor,
    packed: Tensor,
    dense_k: Tensor,
    dense_v: Tensor,
    sink_logits: Tensor | None,
    numbers: list[int],
    quantize_by: str,
    attend_by: str,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    k_bits, v_bits, group_size, residual_length, sink_length = numbers
    config = KiviConfig(k_bits, v_bits, group_size, residual_length, sink_length)
    layout = PageLayout.of(config, dense_k.shape[3], dense_k.dtype)
    storage = KVStorage(pool, table, lengths, packed, dense_k, dense_v, config, layout)
    append_token(k, v, storage, quantize_by)
    out = attend(q, storage, scale=scale, softcap=softcap, sink_logits=sink_logits, backend=attend_by)
    return out.contiguous()


@_decode.register_fake
def _(q: Tensor, *args: object) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    storage: KVStorage,
    quantize_by: str,
    attend_by: str,
    scale: float | None,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """Store one token in every row and attend: [B, HQ, 1, D]. quantize_by, attend_by: names of backends."""
    s, c = storage, storage.config
    numbers = [c.k_bits, c.v_bits, c.group_size, c.residual_length, c.sink_length]
    return _decode(
        q, k, v, s.pool, s.table, s.lengths, s.packed, s.dense_k, s.dense_v, sink_logits, numbers, quantize_by,
        attend_by, scale, softcap,
    )  # fmt: skip
