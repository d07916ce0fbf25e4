"""Operators on tensors: each checks its arguments, then computes what reference.py specifies."""

from .append_token import append_token
from .attention import MAX_COLUMNS, attend, gluon_or_triton
from .dense_attention import dense_attention
from .dispatch import choose, forced
from .packed_matmul import packed_matmul
from .packing import pack, unpack
from .quantize import quantize_k, quantize_v
from .simulate import fake_quantize
from .write_pages import write_pages

__all__ = [
    "MAX_COLUMNS",
    "append_token",
    "attend",
    "choose",
    "dense_attention",
    "fake_quantize",
    "forced",
    "gluon_or_triton",
    "pack",
    "packed_matmul",
    "quantize_k",
    "quantize_v",
    "unpack",
    "write_pages",
]
