"""Crop, select, reset and copies, against rows of plain tensors that hold the values to be attended."""

import copy
import itertools
import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from kivi_kv import KiviConfig, LayerCache, kivi_cache_bytes, reference
from kivi_kv.config import PAGE
from kivi_kv.format import quantize
from kivi_kv.ops import attend
from oracle import assert_bitwise_equal, randn

HQ, H, D = 4, 2, 16
CONFIG = KiviConfig(k_bits=2, v_bits=4, residual_length=40, sink_length=4)
FULL = 500  # tokens: 4 sinks, 3 pages (4 to 387), 112 dense

page_numbers = itertools.count()


class Row:
    """What one row must hold: K and V [H, T, D] as attended, and a number for each page, new at each packing."""

    def __init__(self, config: KiviConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.k = self.v = torch.zeros(H, 0, D, dtype=dtype)
        self.pages: list[int] = []

    def __len__(self) -> int:
        return self.k.shape[1]

    def copy(self) -> "Row":
        row = copy.copy(self)
        row.pages = list(self.pages)
        return row

    def pack(self, pages: int) -> None:
        """Quantize what is held now, page by page, until there are that many."""
        while len(self.pages) < pages:
            start = self.config.sink_length + len(self.pages) * PAGE
            self.k = _packed(self.k, start, self.config.k_bits, self.config.group_size, "tokens")
            self.v = _packed(self.v, start, self.config.v_bits, self.config.group_size, "channels")
            self.pages.append(next(page_numbers))

    def append(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = torch.cat([self.k, k], dim=1), torch.cat([self.v, v], dim=1)
        self.pack(self.config.pages(len(self)))

    def crop(self, length: int) -> None:
        self.k, self.v = self.k[:, :length], self.v[:, :length]
        del self.pages[max(0, length - self.config.sink_length) // PAGE :]


def _packed(x: Tensor, start: int, bits: int, group_size: int, axis) -> Tensor:
    page = quantize(x[None, :, start : start + PAGE], bits, group_size, axis).dequantize()[0]
    return torch.cat([x[:, :start], page, x[:, start + PAGE :]], dim=1)


class Pair:
    """A cache and the rows that it must equal: each method does the same to both."""

    def __init__(self, config: KiviConfig, B: int, dtype: torch.dtype, max_tokens: int | None = None) -> None:
        self.config, self.dtype = config, dtype
        self.cache = LayerCache(config, B, H, D, dtype, max_tokens=max_tokens)
        self.rows = [Row(config, dtype) for _ in range(B)]

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]

    def new(self, M: int, seed: int) -> list[Tensor]:
        """q, k and v of M new tokens."""
        shapes = ((len(self.rows), heads, M, D) for heads in (HQ, H, H))
        return [randn(*shape, dtype=self.dtype, seed=seed + i) for i, shape in enumerate(shapes)]

    def append(self, M: int, seed: int, valid: Tensor | None = None) -> None:
        _, k, v = self.new(M, seed)
        self.cache.append(k, v, valid)
        for i, row in enumerate(self.rows):
            keep = slice(None) if valid is None else valid[i]
            row.append(k[i][:, keep], v[i][:, keep])

    def step(self, M: int, seed: int, valid: Tensor | None = None) -> None:
        q, k, v = self.new(M, seed)
        out = self.cache.step(q, k, v, valid)
        keep = torch.ones(len(self.rows), M, dtype=torch.bool) if valid is None else valid
        for row, keep_row, *parts in zip(self.rows, keep, out, q, k, v, strict=True):
            assert not parts[0][:, ~keep_row].any()
            if keep_row.any():
                row_out, row_q, row_k, row_v = (x[:, keep_row] for x in parts)
                row.pack(self.config.pages(len(row) + 1))
                seen_k, seen_v = torch.cat([row.k, row_k], dim=1), torch.cat([row.v, row_v], dim=1)
                assert_attends(row_out, row_q, seen_k, seen_v)
                row.append(row_k, row_v)

    def crop(self, lengths: int | list[int]) -> None:
        self.cache.crop(lengths)
        each = [lengths] * len(self.rows) if isinstance(lengths, int) else lengths
        for row, length in zip(self.rows, each, strict=True):
            row.crop(length)

    def select(self, indices: list[int]) -> None:
        self.cache.select(torch.tensor(indices))
        self.rows = [self.rows[i].copy() for i in indices]

    def reset(self) -> None:
        self.cache.reset()
        self.rows = [Row(self.config, self.dtype) for _ in self.rows]

    def deepcopy(self) -> "Pair":
        pair = copy.copy(self)
        pair.cache, pair.rows = copy.deepcopy(self.cache), [row.copy() for row in self.rows]
        return pair

    def check(self) -> None:
        """Lengths, pages, slots, values bit for bit, and attention."""
        storage, B = self.cache.storage, len(self.rows)
        assert self.cache.lengths == self.lengths
        assert self.cache.packed == [len(row.pages) for row in self.rows]
        page_in = {}
        for row, slots in zip(self.rows, storage.table.tolist(), strict=True):
            assert len(row.pages) >= self.config.pages(len(row))
            assert set(slots[len(row.pages) :]) <= {-1}
            for index, (slot, page) in enumerate(zip(slots, row.pages, strict=False)):
                assert slot // B == index
                assert page_in.setdefault(slot, page) == page, f"slot {slot} holds two pages"
        for name, actual in zip("kv", self.cache.dequantize(), strict=True):
            expected = torch.zeros(B, H, max(self.lengths), D, dtype=self.dtype)
            for i, row in enumerate(self.rows):
                expected[i, :, : len(row)] = getattr(row, name)
            assert_bitwise_equal(actual, expected)
        q = randn(B, HQ, 1, D, dtype=self.dtype, seed=sum(self.lengths))
        for row, *one in zip(self.rows, attend(q, storage), q, strict=True):
            assert_attends(*one, row.k, row.v)


def assert_attends(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """out is the attention of q, as the newest tokens, over k and v; zeros when there are none."""
    if not k.shape[1]:
        assert not out.any()
        return
    expected = reference.attend(q[None], k[None], v[None], D**-0.5)[0]
    # attend does not round dequantized K and V to their dtype, as they are here: half an eps in each product of a
    # logit, hence eps * sum(|q| |k|) * scale in weights and their sum; v, weights and output add an eps at most
    # each. fp32's own sums of D = 16 products round by sqrt(D) half eps of that sum, and those over tokens by 4 eps
    size = (
        q.double().abs() @ k.double().abs().repeat_interleave(HQ // H, 0).transpose(1, 2)
    ).max().item() * D**-0.5
    tolerance = torch.finfo(k.dtype).eps * (5 * size + 8) * v.abs().max().item()
    assert not out.isnan().any()
    assert (out.double() - expected).abs().max().item() <= tolerance


def full(B: int = 3) -> Pair:
    pair = Pair(CONFIG, B, torch.float16)
    pair.append(FULL, 1)
    pair.check()
    return pair


def go_on(pair: Pair) -> None:
    """More tokens after an edit: dense ones, then across at least one page boundary."""
    for seed, M in enumerate((1, 3, 170, 1)):
        pair.append(M, 100 + 10 * seed)
        pair.check()
    pair.step(1, 200)
    pair.step(140, 210)
    pair.check()


# --- crop ---

CUTS = [FULL, 499, 450, 389, 388, 387, 300, 261, 260, 259, 133, 132, 131, 5, 4, 3, 1, 0]


@pytest.mark.parametrize("length", CUTS)
def test_crop(length):
    """Inside the dense part, into a page, on a boundary, into the sinks, to nothing, and not at all."""
    pair = full(2)
    pair.crop(length)
    assert pair.cache.packed == [min(3, max(0, length - 4) // PAGE)] * 2
    pair.check()
    go_on(pair)


def test_crop_each_row_on_its_own():
    pair = full(6)
    for lengths in ([500, 449, 388, 300, 3, 0], [450, 449, 10, 132, 3, 0]):
        pair.crop(lengths)
        pair.check()
    go_on(pair)


@pytest.mark.parametrize("lengths", [-1, 501, [500, 500], [1, 2, 3, 4], [500, 501, 500], [0, 0, -1]])
def test_a_bad_crop_changes_nothing(lengths):
    pair = full()
    with pytest.raises(ValueError, match=r"^lengths: expected "):
        pair.cache.crop(lengths)
    pair.check()


def test_cropping_the_newest_tokens_every_round_requantizes_nothing():
    """As assisted decoding does, by 0 to 4 tokens: a page that was packed keeps its words."""
    pair, words = Pair(CONFIG, 2, torch.float16), []
    pair.append(100, 1)
    for turn in range(90):
        pair.append(5, 10 * turn)
        pair.crop(pair.lengths[0] - turn % 5)
        now = pair.cache.storage.pool[pair.cache.storage.table[0, : pair.cache.packed[0]]]
        words += list(now[len(words) :].clone())
        assert len(words) == len(now)
        assert all(map(torch.equal, now, words))
    assert len(words) == 2
    pair.check()


# --- select ---

SAME_SIZE = [[2, 1, 0], [0, 0, 0], [1, 1, 2], [0, 1, 2]]
OTHER_SIZE = [[1], [2, 0], [0, 0, 1, 1, 2, 2], [2, 2, 2, 0], [0, 1, 2, 0, 1, 2]]


@pytest.mark.parametrize("indices", SAME_SIZE + OTHER_SIZE, ids=str)
@pytest.mark.parametrize("cut", [[500, 500, 500], [500, 300, 20], [3, 388, 0]], ids=str)
def test_select(indices, cut):
    """Reorder, repeat, shrink, grow, as beam search does; every row then goes on by itself."""
    pair = full()
    pair.crop(cut)
    pair.select(indices)
    pair.check()
    go_on(pair)
    pair.select(list(range(len(indices)))[::-1])
    go_on(pair)


@pytest.mark.parametrize("indices", SAME_SIZE, ids=str)
def test_a_reorder_moves_no_page(indices):
    pair = full()
    storage = pair.cache.storage
    before = {name: x.data_ptr() for name, x in storage.tensors().items()}
    pool = storage.pool.clone()
    pair.select(indices)
    assert {name: x.data_ptr() for name, x in pair.cache.storage.tensors().items()} == before
    assert_bitwise_equal(pair.cache.storage.pool, pool)


def test_rows_that_share_pages_write_apart():
    """Two rows of one history crop into a shared page and go on with different tokens, in turn."""
    pair = full()
    pair.select([1, 1, 1])
    pair.crop([300, 500, 200])
    for turn in range(6):
        pair.append(80, 1000 * turn, torch.arange(3)[:, None].expand(3, 80) == turn % 3)
        pair.check()
    pair.select([2, 0, 2])
    go_on(pair)


@pytest.mark.parametrize("indices", [[3], [-1, 0, 1], [], [0, 1, 3]])
def test_a_bad_select_changes_nothing(indices):
    pair = full()
    with pytest.raises(ValueError, match=r"^indices: expected row numbers from 0 to 2, got "):
        pair.cache.select(torch.tensor(indices, dtype=torch.long))
    pair.check()


# --- reset and copies ---


def test_reset_keeps_the_memory():
    pair = full()
    before = {name: x.data_ptr() for name, x in pair.cache.storage.tensors().items()}
    pair.reset()
    pair.check()
    assert {name: x.data_ptr() for name, x in pair.cache.storage.tensors().items()} == before
    go_on(pair)


def test_copies_go_separate_ways():
    pair = full()
    other = pair.deepcopy()
    assert not {x.data_ptr() for x in pair.cache.storage.tensors().values()} & {
        x.data_ptr() for x in other.cache.storage.tensors().values()
    }
    pair.crop(300)
    pair.select([2, 2, 0])
    go_on(pair)
    other.check()
    go_on(other)
    pair.check()


# --- any sequence of operations ---

SEEDS = st.integers(0, 2**31)
COUNTS = st.one_of(st.sampled_from([64, 127, 128, 129, 170, 257]), st.integers(1, 150))
PADDING = st.lists(st.sampled_from(["all", "left", "right", "holes", "none"]), min_size=5, max_size=5)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        residual=st.integers(0, 40),
        sinks=st.integers(0, 5),
        bits=st.tuples(*[st.sampled_from([2, 4, 8])] * 2),
        group_size=st.sampled_from([32, 64, 128]),
        B=st.integers(1, 4),
        dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
        max_tokens=st.sampled_from([None, 150, 600, 800]),
    )
    def start(self, residual, sinks, bits, group_size, B, dtype, max_tokens):
        config = KiviConfig(*bits, group_size, residual, sinks)
        self.max_tokens = max_tokens
        self.pair = Pair(config, B, dtype, max_tokens)
        self.left_behind = None

    def fitting(self, M: int) -> int:
        return min(M, (self.max_tokens or 800) - max(self.pair.lengths))

    def mask(self, M: int, padding: list[str], seed: int) -> Tensor:
        valid = torch.ones(len(self.pair.rows), M, dtype=torch.bool)
        for i, (row, kind) in enumerate(zip(valid, padding, strict=False)):
            cut = (seed + i) % (M + 1)
            if kind == "holes":
                row[:] = randn(M, seed=seed + i) > 0
            else:
                row[{"all": slice(0), "left": slice(cut), "right": slice(cut, M), "none": slice(M)}[kind]] = False
        return valid

    @rule(M=COUNTS, seed=SEEDS)
    def append(self, M, seed):
        if M := self.fitting(M):
            self.pair.append(M, seed)

    @rule(M=COUNTS, seed=SEEDS, padding=PADDING)
    def append_padded(self, M, seed, padding):
        if M := self.fitting(M):
            self.pair.append(M, seed, self.mask(M, padding, seed))

    @rule(M=st.one_of(st.just(1), COUNTS), seed=SEEDS)
    def step(self, M, seed):
        if M := self.fitting(M):
            self.pair.step(M, seed)

    @rule(M=COUNTS, seed=SEEDS, padding=PADDING)
    def step_padded(self, M, seed, padding):
        if M := self.fitting(M):
            self.pair.step(M, seed, self.mask(M, padding, seed))

    @precondition(lambda self: self.max_tokens)
    @rule(seed=SEEDS, more=st.integers(1, 200))
    def append_too_much(self, seed, more):
        _, k, v = self.pair.new(self.max_tokens - max(self.pair.lengths) + more, seed)
        with pytest.raises(ValueError, match=r"^max_tokens: the cache holds"):
            self.pair.cache.append(k, v)

    def cut(self, data, length: int) -> int:
        start = self.pair.config.sink_length
        edges = [n for p in range(7) for n in range(start + p * PAGE - 1, start + p * PAGE + 2) if 0 <= n <= length]
        few = st.integers(max(0, length - 5), length)
        return data.draw(st.one_of(few, st.sampled_from(edges or [0]), st.integers(0, length)), "cut")

    @rule(data=st.data())
    def crop(self, data):
        self.pair.crop(self.cut(data, min(self.pair.lengths)))

    @rule(data=st.data())
    def crop_rows(self, data):
        self.pair.crop([self.cut(data, length) for length in self.pair.lengths])

    @rule(data=st.data())
    def reorder(self, data):
        B = len(self.pair.rows)
        self.pair.select(data.draw(st.lists(st.integers(0, B - 1), min_size=B, max_size=B), "rows"))

    @rule(data=st.data())
    def resize(self, data):
        B = len(self.pair.rows)
        self.pair.select(data.draw(st.lists(st.integers(0, B - 1), min_size=1, max_size=5), "rows"))

    @precondition(lambda self: any(self.pair.cache.packed))  # else most runs would stay short
    @rule()
    def reset(self):
        self.pair.reset()

    @rule(go_on_with_the_copy=st.booleans())
    def copy(self, go_on_with_the_copy):
        self.left_behind = self.pair.deepcopy()
        if go_on_with_the_copy:
            self.pair, self.left_behind = self.left_behind, self.pair

    @precondition(lambda self: self.left_behind)
    @rule()
    def go_back(self):
        self.pair, self.left_behind = self.left_behind, self.pair

    @invariant()
    def cache_equals_its_rows(self):
        self.pair.check()
        storage, config = self.pair.cache.storage, self.pair.config
        assert storage.used_nbytes <= storage.nbytes
        if self.max_tokens:
            sizes = (len(self.pair.rows), self.max_tokens, H, D, self.pair.dtype)
            assert storage.nbytes == kivi_cache_bytes(config, 1, *sizes)


CacheMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("KIVI_STATE_MACHINE_EXAMPLES", "40")),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestAnySequence = CacheMachine.TestCase
