"""What a text puts into a model's KV cache, and what each way of grouping it costs in low bits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import KiviConfig
from ..ops.dense_attention import dense_attention
from ..ops.simulate import AXES, fake_quantize
from .hooks import replaced_attention

NAME = "kivi_inspection"
BITS = (2, 4)
GROUP_SIZE = 32
QUERIES = 64  # the newest queries, whose attention output is compared
MAP_ROWS = 128
SINKS = 32  # the first tokens, which the recommended config leaves in full precision
K_LIMIT = 2.0  # keys get 4 bits when they cost the output more than this many times what values cost
SENSITIVE = 3.0  # a layer is named when its keys cost more than this many times the median layer's
RULE = (
    "Keys get 2 bits, or 4 if the median layer's output error from K per channel at 2 bits is over "
    f"{K_LIMIT:g} times that from V per token. Values get 2 bits. Groups have 32 elements, or 128 if keys get 4 "
    f"bits. The first {SINKS} tokens stay exact. Over {SENSITIVE:g} times the median K error, a layer is sensitive."
)
DECIDED = ("k_bits", "v_bits", "group_size", "sink_length")  # fields of KiviConfig
OPTIONS = (("scale", "scaling"), ("softcap", "softcap"), ("sink_logits", "s_aux"))  # ours, transformers'
TINY = torch.finfo(torch.float32).tiny
Errors = dict[int, dict[str, float]]  # by bits, then by axis


@dataclass(frozen=True, slots=True)
class Captured:
    """What one layer's attention received."""

    q: Tensor  # [1, HQ, M, D], the newest queries
    k: Tensor  # [1, H, T, D], after the rotary embedding
    v: Tensor  # [1, H, T, D]
    options: dict[str, Any]  # of dense_attention: scale, softcap, sink_logits

    def output(self, k: Tensor, v: Tensor) -> Tensor:
        """Attention [1, HQ, M, D] over the given K and V, in fp32."""
        return dense_attention(self.q.float(), k.float(), v.float(), **self.options)


@dataclass(frozen=True, slots=True)
class TensorReport:
    """The keys or the values of one layer.

    outlier_ratio: the largest over the median channel, by mean |x| over the tokens, in the head where that is
    largest; outlier_head and outlier_channel say where. error: |xq - x|^2 / |x|^2 of x itself; output_error: of the
    attention output; sinks_error: of that with the first SINKS tokens exact. map: |x| of that head.
    """

    outlier_ratio: float
    outlier_head: int
    outlier_channel: int
    error: Errors
    output_error: Errors
    sinks_error: Errors
    map: Tensor  # [at most MAP_ROWS, D], fp32, on the CPU


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One full-attention layer. The first token: its share of the attention, its |v| relative to the median's."""

    index: int
    first_token_attention: float
    first_token_value: float
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
        """Everything but the maps, ready for JSON. KiviConfig(**recommended) is the recommended config."""
        fields = asdict(self) | {"recommended": {name: getattr(self.recommended, name) for name in DECIDED}}
        for layer in fields["layers"]:
            del layer["k"]["map"], layer["v"]["map"]
        return fields

    def median(self, side: str, measure: str, bits: int, axis: str) -> float:
        """Over the layers: side is "k" or "v", measure one of TensorReport's errors."""
        return median(getattr(getattr(layer, side), measure)[bits][axis] for layer in self.layers)


@contextmanager
def capture(model: Any) -> Iterator[dict[int, Captured]]:
    """Within it, a forward pass of one row, without a cache, leaves what full attention received, by layer."""
    from ..integrations.transformers.attention import kivi_attention, kivi_mask

    captured: dict[int, Captured] = {}

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        if mask is None and not kwargs.get("sliding_window"):
            options = {name: kwargs.get(argument) for name, argument in OPTIONS}
            captured[module.layer_idx] = Captured(q[:, :, -QUERIES:], k, v, options)
        return kivi_attention(module, q, k, v, mask, **kwargs)

    with replaced_attention(model, NAME, attention, kivi_mask):
        yield captured


@torch.no_grad()
def inspect_model(
    model: Any, ids: Tensor, name: str, text: str, progress: Callable[[int, int], object] = lambda done, total: None
) -> ModelReport:
    """Run ids [1, T] through the model and measure its full-attention layers. ValueError if it has none."""
    with capture(model) as captured:
        model.base_model(ids, use_cache=False)
    if not captured:
        raise ValueError(f"MODEL: expected full-attention layers behind transformers' interface, {name} has none")
    layers: list[LayerReport] = []
    for index, inputs in sorted(captured.items()):
        layers.append(inspect_layer(index, inputs))
        progress(len(layers), len(captured))
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    _, H, T, D = next(iter(captured.values())).k.shape
    return ModelReport(name, text, T, H, D, count - len(layers), layers, *recommend(layers))


def inspect_layer(index: int, captured: Captured) -> LayerReport:
    """Measure one layer's keys and values."""
    k, v = captured.k, captured.v
    exact = captured.output(k, v)
    first = torch.zeros_like(v)
    first[:, :, 0] = 1  # so that the output is the weight of the first token
    sizes = v[0].float().norm(dim=-1)  # [H, T]
    return LayerReport(
        index,
        captured.output(k, first).mean().item(),
        (sizes[:, 0] / sizes.median(-1).values.clamp(min=TINY)).mean().item(),
        _measure(k, lambda kq: relative_error(captured.output(kq, v), exact)),
        _measure(v, lambda vq: relative_error(captured.output(k, vq), exact)),
    )


def recommend(layers: list[LayerReport]) -> tuple[KiviConfig, list[int], float, float]:
    """What RULE says: recommended, sensitive_layers, k_output_error and v_output_error of a ModelReport."""
    k_errors = {layer.index: layer.k.output_error[2]["channel"] for layer in layers}
    k_error = median(k_errors.values())
    v_error = median(layer.v.output_error[2]["token"] for layer in layers)
    k_bits = 4 if k_error > K_LIMIT * v_error else 2
    config = KiviConfig(k_bits, v_bits=2, group_size=128 if k_bits == 4 else 32, sink_length=SINKS)
    return config, [i for i, error in k_errors.items() if error > SENSITIVE * k_error], k_error, v_error


def relative_error(x: Tensor, exact: Tensor) -> float:
    """|x - exact|^2 / |exact|^2."""
    exact = exact.float()
    return ((x.float() - exact).square().sum() / exact.square().sum().clamp(min=TINY)).item()


def magnitude_map(x: Tensor) -> Tensor:
    """|x| of one head [T, D], neighbouring tokens averaged to at most MAP_ROWS rows."""
    return F.adaptive_avg_pool1d(x.float().abs().T[None], min(x.shape[0], MAP_ROWS))[0].T.cpu()


def _measure(x: Tensor, output_error: Callable[[Tensor], float]) -> TensorReport:
    """x: [1, H, T, D]. output_error maps a replacement of x to the error of the attention output."""
    channels = x[0].float().abs().mean(dim=1)  # [H, D]
    ratios = channels.amax(-1) / channels.median(-1).values.clamp(min=TINY)
    head = int(ratios.argmax())
    error, output, sinks = ({bits: dict.fromkeys(AXES, 0.0) for bits in BITS} for _ in range(3))
    for bits, axis in product(BITS, AXES):
        xq = fake_quantize(x, bits, GROUP_SIZE, axis)
        error[bits][axis], output[bits][axis] = relative_error(xq, x), output_error(xq)
        sinks[bits][axis] = output_error(torch.cat([x[:, :, :SINKS], xq[:, :, SINKS:]], dim=2))
    channel = int(channels[head].argmax())
    return TensorReport(ratios[head].item(), head, channel, error, output, sinks, magnitude_map(x[0, head]))
