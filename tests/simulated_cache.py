"""The reference of the packed cache: transformers' own dense cache, holding the values that packing would leave.

It knows the rule of the cache and the public quantizers, and none of the code that it is compared with.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from kivi_kv import KiviConfig, quantize_k, quantize_v

PAGE = 128


class SimulatedLayer(DynamicLayer):
    """A dense layer whose tokens take their dequantized values for good when their page would be packed.

    pads: left padding of each row; a row's pages start behind it and behind its sinks.
    """

    def __init__(self, config: KiviConfig, pads: list[int]) -> None:
        super().__init__()
        self.config = config
        self.pads = list(pads)
        self.packed = [0] * len(pads)  # pages of each row

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        stored, new = self.get_seq_length(), key_states.shape[2]
        self._pack(stored + 1)  # room for the first new token; all of them are attended in full precision
        super().update(key_states, value_states)
        attended = self.keys.clone(), self.values.clone()
        self._pack(stored + new)
        return attended

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.pads = [min(pad, self.get_seq_length()) for pad in self.pads]
        start = self.config.sink_length
        whole = [max(0, self.get_seq_length() - pad - start) // PAGE for pad in self.pads]
        self.packed = [min(pair) for pair in zip(self.packed, whole, strict=True)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._select([row for row in range(len(self.pads)) for _ in range(repeats)])

    def _select(self, rows: list[int]) -> None:
        self.pads = [self.pads[row] for row in rows]
        self.packed = [self.packed[row] for row in rows]

    def _pack(self, tokens: int) -> None:
        """Pack every page that is due once the padded batch holds `tokens` tokens."""
        config = self.config
        for row, pad in enumerate(self.pads):
            due = max(0, (tokens - pad - config.sink_length - config.residual_length - 1) // PAGE)
            for page in range(self.packed[row], due):
                start = pad + config.sink_length + page * PAGE
                part = (slice(row, row + 1), slice(None), slice(start, start + PAGE))
                k = quantize_k(self.keys[part], config.k_bits, config.group_size)
                v = quantize_v(self.values[part], config.v_bits, config.group_size)
                self.keys, self.values = self.keys.clone(), self.values.clone()  # a caller may hold the old ones
                self.keys[part], self.values[part] = k.dequantize(), v.dequantize()
            self.packed[row] = max(self.packed[row], due)


class SimulatedCache(DynamicCache):
    """DynamicCache with a SimulatedLayer in the place of each layer of full attention."""

    def __init__(self, model_config: PreTrainedConfig, config: KiviConfig, pads: list[int]) -> None:
        super().__init__(config=model_config)
        for index, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer:
                self.layers[index] = SimulatedLayer(config, pads)

    @property
    def pages(self) -> int:
        """Packed pages of all rows of the first simulated layer."""
        return next((sum(layer.packed) for layer in self.layers if isinstance(layer, SimulatedLayer)), 0)


def equal_tokens(actual: Tensor, expected: Tensor) -> None:
    """Assert equality of token ids [rows, T], saying where they part."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} != {tuple(expected.shape)}"
    differ = (actual != expected).nonzero()
    assert not len(differ), (
        f"tokens differ from row {differ[0, 0]}, position {differ[0, 1]} of {actual.shape[1]} on"
    )


def varied_and_equal(actual: Tensor, expected: Tensor) -> None:
    """Equal tokens mean little when a model repeats one of them."""
    assert len(expected[:, -20:].unique()) >= 6
    equal_tokens(actual, expected)


def repeat_pads(pads: list[int], times: int) -> list[int]:
    """Padding of a batch whose rows generate() repeats, for beams or several return sequences."""
    return torch.tensor(pads).repeat_interleave(times).tolist()
