"""What one layer's cache stores on the device, and how many bytes that is."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .config import PAGE, KiviConfig
from .format import MIN_HEAD_DIM, PageLayout


@dataclass(slots=True)
class KVStorage:
    """One layer's K and V: packed pages behind a table, and full-precision rows.

    Of a row's tokens the first sink_length lie in dense rows 0 .. S - 1, the next packed * 128 in pages, the
    rest in the ring behind the sinks: token t in dense row S + (t - S) % ring_length.
    """

    pool: Tensor  # [slots, H, words] int32, immutable pages; a multiple of B slots for each page index
    table: Tensor  # [B, P] int32: the slot of each of a row's pages, -1 where there is none yet
    lengths: Tensor  # [B] int32: tokens stored
    packed: Tensor  # [B] int32: pages stored
    dense_k: Tensor  # [B, H, rows, D]: sinks, then the ring
    dense_v: Tensor  # [B, H, rows, D]
    config: KiviConfig
    layout: PageLayout

    @classmethod
    def empty(
        cls,
        config: KiviConfig,
        batch: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        max_tokens: int | None = None,
    ) -> "KVStorage":
        """Storage for max_tokens tokens a row, or with no page yet when max_tokens is None."""
        layout = PageLayout.of(config, head_dim, dtype)
        P = 0 if max_tokens is None else config.pages(max_tokens)
        rows = dense_rows(config, max_tokens)
        ints = torch.zeros(0, dtype=torch.int32, device=device)
        floats = torch.zeros(0, dtype=dtype, device=device)
        # zeros, not empty: a masked row still meets a product, and 0 * NaN is NaN
        return cls(
            pool=ints.new_zeros((P * batch, heads, layout.words)),
            table=ints.new_full((batch, P), -1),
            lengths=ints.new_zeros(batch),
            packed=ints.new_zeros(batch),
            dense_k=floats.new_zeros((batch, heads, rows, head_dim)),
            dense_v=floats.new_zeros((batch, heads, rows, head_dim)),
            config=config,
            layout=layout,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that is allocated, by name."""
        return {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}

    @property
    def batch(self) -> int:
        return self.table.shape[0]

    @property
    def heads(self) -> int:
        return self.dense_k.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(x.nbytes for x in self.tensors().values())

    @property
    def used_nbytes(self) -> int:
        """Bytes of the pages and full-precision rows that hold tokens."""
        pages, tokens = int(self.packed.sum()), int(self.lengths.sum())
        row = 2 * self.dense_k.shape[3] * self.dense_k.element_size()
        return self.heads * (pages * self.layout.words * 4 + (tokens - pages * PAGE) * row)

    def rows(self, rows: slice) -> "KVStorage":
        """A view of some batch rows; the pool stays whole, since table entries point into it."""
        return KVStorage(
            self.pool,
            self.table[rows],
            self.lengths[rows],
            self.packed[rows],
            self.dense_k[rows],
            self.dense_v[rows],
            self.config,
            self.layout,
        )

    def dense_index(self, start: int, stop: int) -> Tensor:
        """Dense rows of tokens start .. stop - 1, which must all be dense."""
        return self.dense_row(torch.arange(start, stop, device=self.table.device))

    def dense_row(self, token: Tensor) -> Tensor:
        """The dense row of each of the given tokens, int64, whatever the shape."""
        S = self.config.sink_length
        return torch.where(token < S, token, S + (token - S) % self.config.ring_length)

    def dense_tokens(self) -> Tensor:
        """Which token each dense row holds, [B, rows] int64; lengths or more where it holds none."""
        S, ring = self.config.sink_length, self.config.ring_length
        row = torch.arange(self.dense_k.shape[2], device=self.table.device)
        start = (self.packed.long() * PAGE)[:, None]  # first token of the ring, counted behind the sinks
        return torch.where(row < S, row, S + start + (row - S - start) % ring)


def dense_rows(config: KiviConfig, max_tokens: int | None) -> int:
    """Full-precision rows that a layer allocates for each row of the batch."""
    rows = config.sink_length + config.ring_length
    return rows if max_tokens is None else min(rows, max_tokens)


def kv_cache_bytes(
    layers: int, batch: int, tokens: int, kv_heads: int, head_dim: int, bytes_per_element: float = 2
) -> int:
    """Bytes of a dense cache: 2 (K and V) x layers x batch x tokens x kv_heads x head_dim x bytes_per_element."""
    sizes = {
        "layers": layers,
        "batch": batch,
        "tokens": tokens,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "bytes_per_element": bytes_per_element,
    }
    for name, value in sizes.items():
        if value < 0:
            raise ValueError(f"{name}: expected a number of at least 0, got {value!r}")
        if type(value) is not int and name != "bytes_per_element":
            raise ValueError(f"{name}: expected an int, got {value!r}")
    return round(2 * layers * batch * tokens * kv_heads * head_dim * bytes_per_element)


def kivi_cache_bytes(
    config: KiviConfig | str,
    layers: int,
    batch: int,
    tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float16,
) -> int:
    """Bytes that a cache of `tokens` tokens allocates with max_tokens=tokens, to the byte.

    Counts codes, scales, zeros, sinks, the full-precision ring, page table and lengths.
    """
    kv_cache_bytes(layers, batch, tokens, kv_heads, head_dim)  # refuses bad sizes
    if head_dim < MIN_HEAD_DIM:
        raise ValueError(f"head_dim: expected at least {MIN_HEAD_DIM}, got {head_dim}")
    config = KiviConfig.of(config)
    beyond = [layer for layer, _, _ in config.layer_bits if layer >= layers]
    if beyond:
        raise ValueError(f"layer_bits: expected layers from 0 to {layers - 1}, got {beyond}")
    pages = config.pages(tokens)
    page = sum(PageLayout.of(config.for_layer(i), head_dim, dtype).words * 4 for i in range(layers))
    dense = 2 * dense_rows(config, tokens) * head_dim * dtype.itemsize
    return batch * (kv_heads * (pages * page + layers * dense) + layers * 4 * (pages + 2))
