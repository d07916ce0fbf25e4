"""Run a transformers model with another attention for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced_attention(model: Any, name: str, attention: Callable, mask: Callable) -> Iterator[None]:
    """Within it the model attends by `attention`, with masks made by `mask`; afterwards as before."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
