"""kivi-kv: 2-bit KV caches for LLM decoding (KIVI, arXiv 2402.02750).

>>> from kivi_kv import cache_for
>>> model.generate(**inputs, past_key_values=cache_for(model, "kivi2"))
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .cache import LayerCache
from .config import KiviConfig, KiviWarning
from .format import Packed
from .ops import fake_quantize, pack, packed_matmul, quantize_k, quantize_v, unpack
from .storage import kivi_cache_bytes, kv_cache_bytes

if TYPE_CHECKING:
    from .integrations.transformers import KiviCache, cache_for

__version__ = "0.1.0"

__all__ = [
    "KiviCache",
    "KiviConfig",
    "KiviWarning",
    "LayerCache",
    "Packed",
    "cache_for",
    "fake_quantize",
    "kivi_cache_bytes",
    "kv_cache_bytes",
    "pack",
    "packed_matmul",
    "quantize_k",
    "quantize_v",
    "unpack",
]

_NEEDS_TRANSFORMERS = ("KiviCache", "cache_for")


def __getattr__(name: str) -> object:
    """Import the transformers integration on first use: the core needs torch and triton only."""
    if name not in _NEEDS_TRANSFORMERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(".integrations.transformers", __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(f"{name} needs transformers: pip install 'kivi-kv[transformers]'") from error
