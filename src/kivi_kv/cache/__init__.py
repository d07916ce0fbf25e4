"""The cache of one layer: what is stored when, and the edits that generation needs."""

from .layer import LayerCache

__all__ = ["LayerCache"]
