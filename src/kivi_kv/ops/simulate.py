"""Quantization without packing, to compare groupings."""

from torch import Tensor

from .. import reference
from .checks import check_float, check_group_size

AXES = ("tensor", "token", "channel")


def fake_quantize(x: Tensor, bits: int, group_size: int | None, axis: str) -> Tensor:
    """Quantize and dequantize x, in the arithmetic of the real format, at any of 1 to 8 bits.

    x: [..., T, D], fp16, bf16 or fp32. axis says which values share a range:
      "tensor"   all of x (group_size is ignored),
      "token"    group_size channels of one token, as KIVI does for values,
      "channel"  group_size tokens of one channel, as KIVI does for keys.
    A last group may be shorter. Returns x's shape and dtype. Raises ValueError naming the argument at fault.
    """
    if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= 8:
        raise ValueError(f"bits: expected an int from 1 to 8, got {bits!r}")
    if axis not in AXES:
        raise ValueError(f"axis: expected one of {', '.join(AXES)}, got {axis!r}")
    check_float("x", x)
    if x.ndim < 2 or not x.numel():
        raise ValueError(f"x: expected a non-empty [..., T, D], got shape {tuple(x.shape)}")
    if axis == "tensor":
        return reference.roundtrip(x.flatten(), bits, x.numel()).view(x.shape)
    if group_size is None:
        raise ValueError(f"group_size: expected a positive int for axis {axis!r}, got None")
    check_group_size(group_size)
    if axis == "token":
        return reference.roundtrip(x, bits, group_size)
    return reference.roundtrip(x.transpose(-1, -2), bits, group_size).transpose(-1, -2)
