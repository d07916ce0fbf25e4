"""Hugging Face transformers: a cache that any decoder model takes in generate(), without patching."""

from .cache import KiviCache, cache_for, cache_nbytes, head_dim_of
from .compat import cache_argument
from .decoder import GraphDecoder
from .loading import load

__all__ = ["GraphDecoder", "KiviCache", "cache_argument", "cache_for", "cache_nbytes", "head_dim_of", "load"]
