"""What `update` returns in place of a K or V tensor."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .layer import KiviLayer


class KVHandle:
    """Stands for a layer's K or V [B, H, T, D] on the way from the cache to the attention call.

    Our attention takes the layer out of it. Anybody else gets the dequantized tensor, whatever they do with it
    (index it, call its methods, pass it to a torch function); the layer warns and counts that.
    """

    def __init__(self, layer: "KiviLayer", which: int, like: Tensor, tokens: int) -> None:
        self.layer = layer
        self.which = which  # 0 for K, 1 for V
        B, H, _, D = like.shape
        self.shape = torch.Size((B, H, tokens, D))
        self.dtype, self.device = like.dtype, like.device

    @property
    def ndim(self) -> int:
        return 4

    def dim(self) -> int:
        return 4

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dense(self) -> Tensor:
        """The dequantized tensor, [B, H, T, D]."""
        return self.layer.materialize()[self.which]

    def __repr__(self) -> str:
        return f"KVHandle({'KV'[self.which]}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*_dense(args), **_dense(kwargs or {}))


def _dense(x: Any) -> Any:
    if isinstance(x, KVHandle):
        return x.dense()
    if isinstance(x, (tuple, list)):
        return type(x)(_dense(item) for item in x)
    if isinstance(x, dict):
        return {key: _dense(item) for key, item in x.items()}
    return x


def _operator(name: str) -> Callable:
    def apply(self: KVHandle, *args: Any) -> Any:
        return getattr(self.dense(), name)(*_dense(args))

    return apply


# Python looks operators up on the class, where __getattr__ does not reach
for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "matmul", "rmatmul", "truediv", "neg"):
    setattr(KVHandle, f"__{_name}__", _operator(f"__{_name}__"))
