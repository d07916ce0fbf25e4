"""What a text puts into a model's KV cache, and what each way of grouping it costs in low bits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import KiviConfig
from ..ops.dense_attention import dense_attention
from ..ops.simulate import AXES, fake_quantize

NAME = "kivi_inspection"
BITS = (2, 4)
GROUP_SIZE = 32
QUERIES = 64  # the newest queries, whose attention output is compared
MAP_ROWS = 128
K_LIMIT = 2.0  # keys get 4 bits when they cost the output more than this many times what values cost
SENSITIVE = 3.0  # a layer is named when its keys cost more than this many times the median layer's
RULE = (
    f"Keys get 2 bits, or 4 if the median layer's output error from K per channel at 2 bits is more than {K_LIMIT:g} "
    "times that from V per token at 2 bits. Values get 2 bits. A group is 32 elements, or 128 where keys have 4 bits. "
    "The first 32 tokens stay in full precision: attention leans on them. A layer is called sensitive when its "
    f"output error from K is more than {SENSITIVE:g} times the median."
)
Errors = dict[int, dict[str, float]]  # by bits, then by axis


@dataclass(frozen=True, slots=True)
class Captured:
    """What one layer's attention received. options: scale, softcap and sink_logits of dense_attention."""

    q: Tensor  # [1, HQ, M, D], the newest queries
    k: Tensor  # [1, H, T, D], after the rotary embedding
    v: Tensor  # [1, H, T, D]
    options: dict[str, Any] = field(default_factory=dict)

    def output(self, k: Tensor, v: Tensor) -> Tensor:
        """Attention [1, HQ, M, D] over the given K and V, in fp32."""
        return dense_attention(self.q.float(), k.float(), v.float(), **self.options)


@dataclass(frozen=True, slots=True)
class TensorReport:
    """The keys or the values of one layer. Errors are |xq - x|^2 / |x|^2, of x itself or of the attention output.

    outlier_ratio: the largest over the median channel, by mean |x| over the tokens, in the head where that is
    largest; outlier_head and outlier_channel say where. map: |x| of that head, neighbouring tokens averaged.
    """

    outlier_ratio: float
    outlier_head: int
    outlier_channel: int
    error: Errors
    output_error: Errors
    map: Tensor  # [at most MAP_ROWS, D], fp32, on the CPU


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One full-attention layer."""

    index: int
    k: TensorReport
    v: TensorReport


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model on a text. other_layers counts those without full attention, which keep their own cache."""

    model: str
    text: str
    tokens: int
    kv_heads: int
    head_dim: int
    other_layers: int
    layers: list[LayerReport]
    recommended: KiviConfig
    sensitive_layers: list[int]
    k_output_error: float  # median over the layers, per channel, 2 bits
    v_output_error: float  # median over the layers, per token, 2 bits
    rule: str = RULE

    def asdict(self) -> dict[str, Any]:
        """Everything but the maps, ready for JSON."""
        fields = asdict(self)
        for layer in fields["layers"]:
            del layer["k"]["map"], layer["v"]["map"]
        return fields

    def median(self, side: str, measure: str, bits: int, axis: str) -> float:
        """Over the layers: side is "k" or "v", measure "error" or "output_error"."""
        return median(getattr(getattr(layer, side), measure)[bits][axis] for layer in self.layers)


@contextmanager
def capture(model: Any, queries: int = QUERIES) -> Iterator[dict[int, Captured]]:
    """Within it, a forward pass of model without a cache leaves its full-attention layers' inputs, by layer.

    For one unpadded row at a time. The model's own attention is restored at the end.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    from ..integrations.transformers.attention import kivi_attention, kivi_mask

    captured: dict[int, Captured] = {}

    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        if mask is None and not kwargs.get("sliding_window"):
            index: Any = module.layer_idx
            options = {"scale": "scaling", "softcap": "softcap", "sink_logits": "s_aux"}
            options = {name: kwargs.get(theirs) for name, theirs in options.items()}
            captured[index] = Captured(q[:, :, -queries:], k, v, options)
        return kivi_attention(module, q, k, v, mask, **kwargs)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, kivi_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield captured
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def inspect_model(
    model: Any, ids: Tensor, name: str, text: str, progress: Callable[[int, int], object] = lambda done, total: None
) -> ModelReport:
    """Run ids [1, T] through the model and measure every full-attention layer.

    progress gets the layers done and their number. Raises ValueError when there is no such layer.
    """
    with capture(model) as captured:
        model.base_model(ids, use_cache=False)
    if not captured:
        raise ValueError(f"MODEL: expected full-attention layers behind transformers' interface, {name} has none")
    layers = []
    for index in sorted(captured):
        progress(len(layers), len(captured))
        layers.append(inspect_layer(index, captured[index]))
    progress(len(layers), len(layers))
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    _, H, T, D = next(iter(captured.values())).k.shape
    return ModelReport(name, text, T, H, D, count - len(layers), layers, **recommend(layers))


def inspect_layer(index: int, captured: Captured) -> LayerReport:
    """Measure one layer's keys and values."""
    k, v = captured.k, captured.v
    exact = captured.output(k, v)
    return LayerReport(
        index,
        _measure(k, lambda kq: relative_error(captured.output(kq, v), exact)),
        _measure(v, lambda vq: relative_error(captured.output(k, vq), exact)),
    )


def recommend(layers: list[LayerReport]) -> dict[str, Any]:
    """The fields of a ModelReport that RULE decides."""
    k_cost = {layer.index: layer.k.output_error[2]["channel"] for layer in layers}
    k_error = median(k_cost.values())
    v_error = median(layer.v.output_error[2]["token"] for layer in layers)
    k_bits = 4 if k_error > K_LIMIT * v_error else 2
    return {
        "recommended": KiviConfig(k_bits, v_bits=2, group_size=128 if k_bits == 4 else 32, sink_length=32),
        "sensitive_layers": [index for index, cost in k_cost.items() if cost > SENSITIVE * k_error],
        "k_output_error": k_error,
        "v_output_error": v_error,
    }


def relative_error(x: Tensor, exact: Tensor) -> float:
    """|x - exact|^2 / |exact|^2."""
    exact = exact.float()
    size = exact.square().sum().clamp(min=torch.finfo(torch.float32).tiny)
    return ((x.float() - exact).square().sum() / size).item()


def magnitude_map(x: Tensor) -> Tensor:
    """|x| of one head [T, D], neighbouring tokens averaged to at most MAP_ROWS rows."""
    rows = min(x.shape[0], MAP_ROWS)
    return F.adaptive_avg_pool1d(x.float().abs().T[None], rows)[0].T.cpu()


def _measure(x: Tensor, output_error: Callable[[Tensor], float]) -> TensorReport:
    """x: [1, H, T, D]. output_error maps a replacement of x to the error of the attention output."""
    channels = x[0].float().abs().mean(dim=1)  # [H, D]
    ratios = channels.amax(-1) / channels.median(-1).values.clamp(min=torch.finfo(torch.float32).tiny)
    head = int(ratios.argmax())
    error: Errors = {bits: {} for bits in BITS}
    output: Errors = {bits: {} for bits in BITS}
    for bits in BITS:
        for axis in AXES:
            xq = fake_quantize(x, bits, GROUP_SIZE, axis)
            error[bits][axis], output[bits][axis] = relative_error(xq, x), output_error(xq)
    return TensorReport(
        ratios[head].item(), head, int(channels[head].argmax()), error, output, magnitude_map(x[0, head])
    )
