"""The cache of one layer: what is stored when, and the edits that generation needs."""

from .layer import DenseAttention, LayerCache

__all__ = ["DenseAttention", "LayerCache"]
