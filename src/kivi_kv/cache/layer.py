"""LayerCache: append tokens, pack pages, attend."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..config import PAGE, KiviConfig
from ..ops import append_token, attend, choose, dense_attention, forced, gluon_or_triton, write_pages
from ..ops.checks import check_kv
from ..storage import KVStorage
from . import compiled, edits, read, slots
from .checks import check_query, check_tokens

DenseAttention = Callable[..., Tensor]  # (q, k, v, **options)
_PACK_BLOCK = 16  # pages quantized at a time by the reference: bounds its scratch for a long prompt


class LayerCache:
    """K and V of one layer: packed pages, sinks and residual.

    Rows of the batch are independent: their lengths may differ, and what a row stores is what it would store
    alone. After n tokens a row has at least config.pages(n) packed pages, whatever the chunks they came in
    (exactly that many unless it was cropped). Every token is quantized once, when its page is packed.

    Without max_tokens storage grows, by pages at first, then by eighths. With it, everything is allocated here.
    backend: "reference", "triton", "gluon", or None for the fastest that runs here (see ops.dispatch); `backends`
    says which runs each operator, `attend_calls` how often each attended packed pages: what "gluon" does not take,
    such as a long chunk, "triton" does.
    """

    def __init__(
        self,
        config: KiviConfig | str,
        batch: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str = "cpu",
        max_tokens: int | None = None,
        backend: str | None = None,
    ) -> None:
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise ValueError(f"max_tokens: expected a positive int or None, got {max_tokens!r}")
        self.config = config = KiviConfig.of(config)
        if config.layer_bits:
            raise ValueError(
                f"config: expected that of one layer, see for_layer, got layer_bits {config.layer_bits}"
            )
        for name, size in (("batch", batch), ("heads", heads), ("head_dim", head_dim)):
            if type(size) is not int or size < 1:
                raise ValueError(f"{name}: expected a positive int, got {size!r}")
        self.max_tokens = max_tokens
        self.storage = KVStorage.empty(config, batch, heads, head_dim, dtype, device, max_tokens)
        check_kv("head_dim, dtype", self.storage.dense_k)
        device = torch.device(device)
        self.backends = {op: choose(op, device, dtype, backend) for op in ("quantize", "attend")}
        if self.backends["attend"] == "gluon":
            self.backends["attend"] = gluon_or_triton(self.storage.layout, forced(backend) is not None)
        self.attend_calls: Counter[str] = Counter()
        self._known: list[tuple[int, int]] | None = [(0, 0)] * batch  # what `_states` need not ask the device
        self._prepared = False
        self._decoded_by: str | None = None  # what attended in `decode` last
        self._longest = 0  # tokens of the longest row, before that or when last asked
        on_cpu = device.type == "cpu"
        self.checked = on_cpu if config.checked is None else config.checked

    @property
    def lengths(self) -> list[int]:
        """Tokens stored in each row."""
        return [length for length, _ in self._states()]

    @property
    def packed(self) -> list[int]:
        """Packed pages of each row."""
        return [packed for _, packed in self._states()]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.storage.nbytes

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None = None,
        dense: DenseAttention = dense_attention,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Attend M new tokens and store them.

        q: [B, HQ, M, D]; k, v: [B, H, M, D]; valid: [B, M] bool, False for padding, which is never stored and
        whose output is zero. Each query sees its row's stored tokens, packed or not, and the new tokens up to
        itself in full precision. scale, softcap, sink_logits: as in ops.attend. dense attends plain K and V, the
        queries being the newest tokens: a prompt on empty rows, and single tokens for as long as nothing is packed.
        A model that passes its usual attention gets its usual output there, to the bit.
        Returns [B, HQ, M, D]. Raises ValueError before anything is stored.
        """
        self._check(k, v, valid)
        check_query(self.storage, q, k.shape[2], sink_logits)
        options = {"scale": scale, "softcap": softcap, "sink_logits": sink_logits}
        if valid is None or bool(valid.all()):
            return self._step(slice(0, self.storage.batch), q, k, v, dense, options)
        out = torch.zeros_like(q)
        for row, keep in enumerate(valid):
            rows = slice(row, row + 1)
            if keep.any():
                q_row, k_row, v_row = (x[rows][:, :, keep] for x in (q, k, v))
                out[rows, :, keep] = self._step(rows, q_row, k_row, v_row, dense, options)
        return out

    def append(self, k: Tensor, v: Tensor, valid: Tensor | None = None) -> None:
        """Store M new tokens k, v [B, H, M, D], but not those that valid [B, M] marks False.

        Raises ValueError before anything is stored.
        """
        self._check(k, v, valid)
        if valid is None or bool(valid.all()):
            self._append(slice(0, self.storage.batch), k, v)
            return
        for row, keep in enumerate(valid):
            rows = slice(row, row + 1)
            self._append(rows, k[rows][:, :, keep], v[rows][:, :, keep])

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """K and V as they are attended, [B, H, longest length, D]; zeros behind the end of shorter rows."""
        return read.dequantize(self.storage, max(self.lengths), self._uniform(slice(0, self.storage.batch)))

    def fits(self, k: Tensor) -> bool:
        """Whether tokens like k [B, H, M, D] can be stored here, by shape, dtype and device."""
        dense = self.storage.dense_k
        same = (k.dtype, k.device) == (dense.dtype, dense.device)
        return same and k.ndim == 4 and (*k.shape[:2], k.shape[3]) == (*dense.shape[:2], dense.shape[3])

    def make_room(self) -> None:
        """Pack what the next token must find packed; `step` does so by itself."""
        self._make_room(slice(0, self.storage.batch))

    def prepare(self) -> None:
        """Give every page to come its slot, so that `decode` needs nothing of the host. max_tokens must be set."""
        if self.max_tokens is None:
            raise ValueError("max_tokens: expected a number, for storage that does not grow, got None")
        for part, _, packed in self._uniform(slice(0, self.storage.batch)):
            self._slots(part, packed, self.config.pages(self.max_tokens))
        self._longest, self._prepared = max(self.lengths), True

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """`step` for one token in each row, by the device alone: the call can be captured in a CUDA graph.

        q: [B, HQ, 1, D]; k, v: [B, H, 1, D]. `prepare` must come first, and again after anything but `decode`. A
        row that is full keeps what it has. Values are not checked. Returns [B, HQ, 1, D]. Raises ValueError.
        """
        if not self._prepared:
            raise ValueError("decode: expected prepare() before, and again after any change but decode, got none")
        if k.ndim == 4 and k.shape[2] != 1:
            raise ValueError(f"k: expected one token a row, got {k.shape[2]}")
        check_tokens(self.storage, k, v, None, checked=False)
        check_query(self.storage, q, 1, sink_logits)
        self._decoded_by = self._attends(q, scale, softcap)
        backends = self.backends["quantize"], self._decoded_by
        return compiled.decode(q, k, v, self.storage, *backends, scale, softcap, sink_logits)

    def crop(self, lengths: int | list[int]) -> None:
        """Keep the first tokens of each row only. A page that is cut returns to full precision."""
        self._forget()
        edits.crop(self.storage, [lengths] * self.storage.batch if isinstance(lengths, int) else lengths)

    def select(self, indices: Tensor) -> None:
        """Make the rows at indices the new batch, in that order; rows may repeat."""
        self._forget()
        edits.select(self.storage, indices)

    def reset(self) -> None:
        """Forget every token; keep the memory."""
        self._forget()
        edits.reset(self.storage)

    def _step(
        self, rows: slice, q: Tensor, k: Tensor, v: Tensor, dense: DenseAttention, options: dict[str, Any]
    ) -> Tensor:
        if k.shape[2] == 1:
            self._append(rows, k, v)
            plain = self._plain(rows)
            if plain is not None:
                return dense(q, *plain, **options)
            return self._attend(q, self.storage.rows(rows), None, None, options)
        usual = options["softcap"] is None and options["sink_logits"] is None
        if usual and not any(self.lengths[rows]):
            out = dense(q, k, v, **options)
        else:
            self._make_room(rows)
            out = self._attend(q, self.storage.rows(rows), k, v, options)
        self._append(rows, k, v)
        return out

    def _attend(
        self, q: Tensor, view: KVStorage, k: Tensor | None, v: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Over packed pages, by what attends such queries; counted."""
        name = self._attends(q, options["scale"], options["softcap"])
        self.attend_calls[name] += 1
        return attend(q, view, k, v, **options, backend=name)

    def _attends(self, q: Tensor, scale: float | None, softcap: float | None) -> str:
        """The backend that attends such queries."""
        name = self.backends["attend"]
        if name != "gluon":
            return name
        columns = q.shape[1] // self.storage.heads * q.shape[2]
        return gluon_or_triton(self.storage.layout, False, columns, softcap, scale=scale)

    def _make_room(self, rows: slice) -> None:
        """Pack as decoding one more token would: all queries of a chunk see that state."""
        for part, length, packed in self._uniform(rows):
            if self.max_tokens is None or length < self.max_tokens:
                self._pack(part, length, packed, self.config.pages(length + 1))

    def _plain(self, rows: slice) -> tuple[Tensor, Tensor] | None:
        """K and V [B, H, T, D] of rows that have packed nothing yet and are equally long, else None."""
        states = set(self._states()[rows])
        length, packed = states.pop()
        if packed or states:
            return None
        s = self.storage
        return s.dense_k[rows, :, :length], s.dense_v[rows, :, :length]

    def _append(self, rows: slice, k: Tensor, v: Tensor) -> None:
        M = k.shape[2]
        if not M:
            return
        k, v = k.detach(), v.detach()
        s, S = self.storage, self.config.sink_length
        parts = list(self._uniform(rows))
        if M == 1 and len(parts) > 1:  # one scatter for all of them
            for part, length, packed in parts:
                self._slots(part, packed, self.config.pages(length + 1))
            append_token(k, v, s.rows(rows), "reference")
            for part, length, packed in parts:
                self._count(part, length + 1, max(packed, self.config.pages(length + 1)))
            return
        for part, length, packed in parts:
            new = slice(part.start - rows.start, part.stop - rows.start)
            new_k, new_v = k[new], v[new]
            total = length + M
            pages = max(packed, self.config.pages(total))
            # pack before storing: the ring rows of a packed page are free for the new tokens
            self._pack(part, length, packed, pages, new_k, new_v)
            for start, stop in ((length, min(total, S)), (max(length, S + pages * PAGE), total)):
                if start < stop:
                    index = s.dense_index(start, stop)
                    s.dense_k[part].index_copy_(2, index, new_k[:, :, start - length : stop - length])
                    s.dense_v[part].index_copy_(2, index, new_v[:, :, start - length : stop - length])
            self._count(part, total, pages)
        s.lengths[rows] += M

    def _slots(self, rows: slice, packed: int, pages: int) -> Tensor | None:
        """Give pages packed .. pages - 1 of rows their slots [rows, pages], if there are any."""
        if pages <= packed:
            return None
        slots.reserve(self.storage, pages)
        slot = slots.assign(self.storage, rows, packed, pages)
        self.storage.table[rows, packed:pages] = slot
        return slot

    def _pack(
        self,
        rows: slice,
        length: int,
        packed: int,
        pages: int,
        new_k: Tensor | None = None,
        new_v: Tensor | None = None,
    ) -> None:
        """Pack pages packed .. pages - 1 of rows that hold `length` tokens, the tokens behind being new."""
        slot = self._slots(rows, packed, pages)
        if slot is None:
            return
        s, S = self.storage, self.config.sink_length
        for first, last in self._runs(packed, pages, length):
            start, stop = S + first * PAGE, S + last * PAGE
            k = read.tokens(s, s.dense_k[rows], start, stop, length, new_k)
            v = read.tokens(s, s.dense_v[rows], start, stop, length, new_v)
            write_pages(k, v, s.pool, slot[:, first - packed : last - packed], s.layout, self.backends["quantize"])
        s.packed[rows] = pages
        self._count(rows, length, pages)

    def _runs(self, packed: int, pages: int, length: int) -> Iterator[tuple[int, int]]:
        """Pages to quantize at once. Those of new tokens alone are read where they are, by kernels all at once."""
        if self.backends["quantize"] == "reference":
            for first in range(packed, pages, _PACK_BLOCK):
                yield first, min(first + _PACK_BLOCK, pages)
            return
        new = min(max(packed, -(-(length - self.config.sink_length) // PAGE)), pages)
        for first, last in ((packed, new), (new, pages)):
            if first < last:
                yield first, last

    def _states(self) -> list[tuple[int, int]]:
        """(length, packed) of each row: known here, or asked of the device where `decode` may have gone on."""
        if self._known is None or self._prepared:
            self._known = list(zip(self.storage.lengths.tolist(), self.storage.packed.tolist(), strict=True))
        if self._prepared:  # a graph's replays do not pass through here, so steps are counted by what they stored
            longest = max(length for length, _ in self._known)
            if self._decoded_by is not None and longest > self._longest:
                self.attend_calls[self._decoded_by] += longest - self._longest
            self._longest = longest
        return self._known

    def _count(self, rows: slice, length: int, packed: int) -> None:
        """Know what was just done on the device."""
        self._states()[rows] = [(length, packed)] * (rows.stop - rows.start)
        self._prepared = False

    def _forget(self) -> None:
        if self._prepared:
            self._states()  # counts the steps
        self._known, self._prepared = None, False

    def _uniform(self, rows: slice) -> Iterator[tuple[slice, int, int]]:
        """Runs of neighbouring rows with the same length and pages: (rows, length, packed)."""
        states = self._states()[rows]
        start = 0
        for end in range(1, len(states) + 1):
            if end == len(states) or states[end] != states[start]:
                yield slice(rows.start + start, rows.start + end), *states[start]
                start = end

    def _check(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        check_tokens(self.storage, k, v, valid, self.checked)
        if self.max_tokens is not None:
            new = [k.shape[2]] * self.storage.batch if valid is None else valid.sum(1).tolist()
            longest = max(n + m for n, m in zip(self.lengths, new, strict=True))
            if longest > self.max_tokens:
                raise ValueError(f"max_tokens: the cache holds {self.max_tokens} tokens a row, got {longest}")
