"""KiviConfig: how a cache is quantized. Every field and cross-field check lives here."""

from dataclasses import dataclass, replace

PAGE = 128  # tokens per page, fixed: groups of 32, 64 and 128 tokens all fill it
BITS = (2, 4, 8)
GROUP_SIZES = (32, 64, 128)
MAX_SINK_LENGTH = 1024


class KiviWarning(UserWarning):
    """Something works, but not the fast way or not as asked. Each kind is warned about once per cache."""


@dataclass(frozen=True, slots=True)
class KiviConfig:
    """How keys and values are quantized. Immutable; a bad field raises ValueError naming it.

    k_bits, v_bits: bits per code of keys and values, 2, 4 or 8.
    group_size: tokens (keys) or channels (values) that share one scale and zero: 32, 64 or 128.
    residual_length: at least this many of the newest tokens stay in full precision.
    sink_length: this many of the oldest tokens stay in full precision.
    checked: refuse NaN and inf in K and V. None means on the CPU only; on a GPU it costs a
        synchronization at every append.
    layer_bits: (layer, k_bits, v_bits) of layers that differ, the first layer being 0.

    Source: KIVI, arXiv 2402.02750.
    """

    k_bits: int = 2
    v_bits: int = 2
    group_size: int = 32
    residual_length: int = 128
    sink_length: int = 0
    checked: bool | None = None
    layer_bits: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        _check_choice("k_bits", self.k_bits, BITS)
        _check_choice("v_bits", self.v_bits, BITS)
        _check_choice("group_size", self.group_size, GROUP_SIZES)
        _check_range("residual_length", self.residual_length, 0, None)
        _check_range("sink_length", self.sink_length, 0, MAX_SINK_LENGTH)
        if not isinstance(self.checked, bool | None):
            raise ValueError(f"checked: expected True, False or None, got {self.checked!r}")
        if not isinstance(self.layer_bits, tuple):
            raise ValueError(f"layer_bits: expected a tuple of (layer, k_bits, v_bits), got {self.layer_bits!r}")
        for entry in self.layer_bits:
            if not isinstance(entry, tuple) or len(entry) != 3:
                raise ValueError(f"layer_bits: expected entries (layer, k_bits, v_bits), got {entry!r}")
            _check_range("layer_bits: layer", entry[0], 0, None)
            _check_choice("layer_bits: k_bits", entry[1], BITS)
            _check_choice("layer_bits: v_bits", entry[2], BITS)
        layers = [layer for layer, _, _ in self.layer_bits]
        if len(set(layers)) < len(layers):
            raise ValueError(f"layer_bits: expected each layer once, got {layers}")

    @classmethod
    def preset(cls, name: str) -> "KiviConfig":
        """The configuration of that name. Raises ValueError listing the names that exist."""
        if name not in PRESETS:
            raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}")
        return PRESETS[name]

    @classmethod
    def of(cls, config: "KiviConfig | str") -> "KiviConfig":
        """A KiviConfig as it is, or the preset that a string names."""
        if isinstance(config, str):
            return cls.preset(config)
        if not isinstance(config, cls):
            raise ValueError(f"config: expected a KiviConfig or a preset's name, got {type(config).__name__}")
        return config

    def for_layer(self, index: int) -> "KiviConfig":
        """The configuration of one layer: with its own bits, and no layer_bits."""
        k_bits, v_bits = next(((k, v) for i, k, v in self.layer_bits if i == index), (self.k_bits, self.v_bits))
        return replace(self, k_bits=k_bits, v_bits=v_bits, layer_bits=())

    @property
    def ring_length(self) -> int:
        """Rows of the full-precision ring: the residual and one page that is filling up."""
        return self.residual_length + PAGE

    def pages(self, tokens: int) -> int:
        """Pages that are packed once `tokens` tokens are stored, whatever the chunks they came in.

        Pages start after the sinks. The newest token is attended before its page can be packed, hence the 1.
        """
        return max(0, (tokens - self.sink_length - self.residual_length - 1) // PAGE)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_choice(name: str, value: int, choices: tuple[int, ...]) -> None:
    if not _is_int(value) or value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(str, choices))}, got {value!r}")


def _check_range(name: str, value: int, low: int, high: int | None) -> None:
    if not _is_int(value) or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}: expected an int {limit}, got {value!r}")


# kivi2 and kivi4 are KIVI as published; the others were chosen by measurement, see docs/accuracy.md
PRESETS: dict[str, KiviConfig] = {
    "kivi2": KiviConfig(k_bits=2, v_bits=2),
    "kivi4": KiviConfig(k_bits=4, v_bits=4),
    "lean": KiviConfig(k_bits=2, v_bits=2, group_size=64, sink_length=32),
    "balanced": KiviConfig(k_bits=4, v_bits=2, group_size=128, sink_length=32),
    "near-lossless": KiviConfig(k_bits=4, v_bits=4, group_size=64, sink_length=32),
}
