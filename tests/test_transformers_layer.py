"""KiviLayer and the handles that it returns, against the simulated layer, without a model."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kivi_kv import KiviConfig, KiviWarning
from kivi_kv.integrations.transformers.handle import KVHandle
from kivi_kv.integrations.transformers.layer import KiviLayer
from simulated_cache import SimulatedLayer

H, HQ, D = 2, 4, 16
CONFIG = KiviConfig(residual_length=32)


def randn(rows: int, tokens: int, heads: int = H) -> Tensor:
    return torch.randn(rows, heads, tokens, D)


def padding_mask(pads: list[int], tokens: int) -> Tensor:
    """[rows, tokens] bool, False for each row's padding."""
    return torch.arange(tokens) >= torch.tensor(pads)[:, None]


def dense_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """fp64 attention of the newest queries; mask [B, T] hides padding."""
    M, T = q.shape[2], k.shape[2]
    causal = torch.arange(T) <= T - M + torch.arange(M)[:, None]
    seen = causal & mask[:, None, None]
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), seen, enable_gqa=True)


class Pair:
    """The layer under test and its reference, fed alike."""

    def __init__(self, config: KiviConfig, pads: list[int]) -> None:
        self.kivi, self.simulated = KiviLayer(config), SimulatedLayer(config, pads)

    @property
    def rows(self) -> int:
        return len(self.simulated.pads)

    def feed(self, tokens: int) -> None:
        k, v, q = randn(self.rows, tokens), randn(self.rows, tokens), randn(self.rows, tokens, HQ)
        dense_k, dense_v = self.simulated.update(k, v)
        mask = padding_mask(self.simulated.pads, dense_k.shape[2])
        self.kivi.update(k, v)
        out = self.kivi.attend(q, None if mask.all() else mask)
        valid = mask[:, None, -tokens:, None]
        expected = dense_attend(q, dense_k, dense_v, mask).masked_fill(~valid, 0.0)
        torch.testing.assert_close(out.masked_fill(~valid, 0.0).double(), expected, atol=2e-5, rtol=0)

    def call(self, method: str, argument: Any) -> None:
        getattr(self.kivi, method)(argument)
        getattr(self.simulated, method)(argument)

    def check(self) -> None:
        """Same lengths, pages and values."""
        length = self.simulated.get_seq_length()
        assert self.kivi.get_seq_length() == length
        assert self.kivi.cache is not None
        assert self.kivi.cache.packed == self.simulated.packed
        assert self.kivi.cache.lengths == [length - pad for pad in self.simulated.pads]
        valid = padding_mask(self.simulated.pads, length)[:, None, :, None]
        for actual, expected in zip(self.values(), (self.simulated.keys, self.simulated.values), strict=True):
            assert torch.equal(actual.masked_fill(~valid, 0.0), expected.masked_fill(~valid, 0.0))

    def values(self) -> tuple[Tensor, Tensor]:
        k, v = self.kivi.keys, self.kivi.values
        assert k is not None
        assert v is not None
        return k, v


steps = st.one_of(
    st.tuples(st.just("feed"), st.sampled_from([1, 1, 2, 7, 100, 129, 300])),
    st.tuples(st.just("crop"), st.integers(0, 400)),
    st.tuples(st.just("reorder_cache"), st.integers(0, 999)),
    st.tuples(st.just("batch_select_indices"), st.integers(0, 999)),
    st.tuples(st.just("batch_repeat_interleave"), st.integers(1, 2)),
)


@pytest.mark.quick
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    pads=st.lists(st.sampled_from([0, 1, 60, 170, 199]), min_size=1, max_size=3),
    sinks=st.sampled_from([0, 4, 130]),
    edits=st.lists(steps, min_size=2, max_size=8),
)
def test_any_edits_leave_what_the_dense_layer_holds(pads: list[int], sinks: int, edits: list) -> None:
    torch.manual_seed(0)
    pair = Pair(KiviConfig(residual_length=32, sink_length=sinks), pads)
    pair.feed(200)
    for name, number in edits:
        rows = torch.randint(pair.rows, (pair.rows,), generator=torch.Generator().manual_seed(number))
        if name == "feed":
            pair.feed(number)
        elif name == "crop":
            pair.call("crop", -min(number, pair.simulated.get_seq_length() - 1))
        elif name == "batch_repeat_interleave":
            if pair.rows * number <= 6:
                pair.call(name, number)
        else:
            keep = rows[: max(1, pair.rows - number % 2)] if name == "batch_select_indices" else rows
            pair.call(name, keep)
        pair.check()


@pytest.mark.quick
@pytest.mark.parametrize("tokens", [1, 3, 129])
@pytest.mark.parametrize("pads", [[0], [0, 1]])
def test_a_page_is_packed_before_the_token_that_makes_it_due(pads: list[int], tokens: int) -> None:
    """The 161st token attends the first page packed, whether it comes alone or at the head of a chunk."""
    pair = Pair(CONFIG, pads)
    pair.feed(160)
    assert pair.kivi.cache.packed == [0] * len(pads)
    pair.feed(tokens)
    pair.check()


@pytest.mark.parametrize("tokens_to_remove", [0, torch.tensor(0), torch.tensor(-30), -300])
def test_crop_takes_what_transformers_passes(tokens_to_remove: int | Tensor) -> None:
    """Some versions pass tensors."""
    pair = Pair(CONFIG, [0])
    pair.feed(290)
    pair.kivi.crop(tokens_to_remove)
    assert pair.kivi.get_seq_length() == max(0, 290 + int(tokens_to_remove))
    assert isinstance(pair.kivi.get_seq_length(), int)


def test_crop_refuses_a_final_length() -> None:
    pair = Pair(CONFIG, [0])
    pair.feed(10)
    with pytest.raises(ValueError, match="tokens_to_remove: expected 0 or less, got 4"):
        pair.kivi.crop(4)


def test_pages_of_a_padded_row_are_those_of_the_row_alone() -> None:
    k, v, q = randn(3, 300), randn(3, 300), randn(3, 300, HQ)
    pads = [0, 37, 139]
    batch = KiviLayer(CONFIG)
    batch.update(k, v)
    batch.attend(q, padding_mask(pads, 300))
    for row, pad in enumerate(pads):
        alone = KiviLayer(CONFIG)
        part = (slice(row, row + 1), slice(None), slice(pad, None))
        alone.update(k[part], v[part])
        alone.attend(q[part], None)
        assert alone.cache.packed[0] == batch.cache.packed[row] > 0
        assert torch.equal(pages(alone, 0), pages(batch, row))


def pages(layer: KiviLayer, row: int) -> Tensor:
    storage = layer.cache.storage
    return storage.pool[storage.table[row, : int(storage.packed[row])]]


@pytest.fixture
def handles() -> tuple[KVHandle, Tensor]:
    """The handle of K over packed, dense and new tokens, and the tensor that it stands for."""
    pair = Pair(CONFIG, [0, 0])
    pair.feed(200)
    k, v = randn(2, 3), randn(2, 3)
    handle, _ = pair.kivi.update(k, v)
    pair.kivi.counts["materializations"] += 1  # no warning: these tests are about values
    return handle, pair.simulated.update(k, v)[0]


OTHER = torch.linspace(0.5, 2.0, D)
USES: dict[str, Callable[[Any], Any]] = {
    "index": lambda x: x[:, :, -1],
    "index with a list": lambda x: x[[1, 0]],
    "index with a mask": lambda x: x[torch.abs(x) > 0.5],
    "ellipsis": lambda x: x[..., 5:9, ::2],
    "new axis": lambda x: x[:, :, None],
    "unpack": lambda x: torch.stack(list(x)),
    "method": lambda x: x.transpose(-1, -2).contiguous(),
    "conversion": lambda x: x.to(torch.float64),
    "reduction": lambda x: x.float().sum(),
    "view": lambda x: x.reshape(2, -1, D),
    "expand": lambda x: x[:, :, None].expand(2, H, 2, 203, D).flatten(1, 2),
    "cat": lambda x: torch.cat([x, x], dim=2),
    "function with a keyword": lambda x: torch.softmax(input=x, dim=-1),
    "einsum": lambda x: torch.einsum("bhtd,d->bht", x, OTHER),
    "attention": lambda x: F.scaled_dot_product_attention(torch.ones(2, HQ, 3, D), x, value=x, enable_gqa=True),
    "add": lambda x: x + OTHER,
    "radd": lambda x: 1.0 + x,
    "sub": lambda x: x - OTHER,
    "rsub": lambda x: 1.0 - x,
    "mul": lambda x: x * OTHER,
    "rmul": lambda x: OTHER * x,
    "truediv": lambda x: x / OTHER,
    "neg": operator.neg,
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "rmatmul": lambda x: torch.ones(2, H, 5, 203) @ x,
    "handle by handle": lambda x: x * x,
}


@pytest.mark.parametrize("use", USES)
def test_handle_does_what_the_tensor_does(use: str, handles: tuple[KVHandle, Tensor]) -> None:
    handle, tensor = handles
    actual, expected = USES[use](handle), USES[use](tensor)
    assert type(actual) is Tensor
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


def test_handle_tells_its_shape_without_dequantizing(handles: tuple[KVHandle, Tensor]) -> None:
    handle, tensor = handles
    before = handle.layer.counts["materializations"]
    B, heads, T, dim = handle.shape
    assert (B, heads, T, dim) == tuple(tensor.shape) == tuple(handle.size())
    assert (handle.size(-2), handle.size(dim=0)) == (203, 2)
    assert handle.dim() == handle.ndim == 4
    assert (handle.dtype, handle.device) == (tensor.dtype, tensor.device)
    assert repr(handle) == "KVHandle(K, shape=(2, 2, 203, 16), dtype=torch.float32)"
    assert not isinstance(handle, Tensor)
    assert handle.layer.counts["materializations"] == before


def test_handle_has_no_invented_attributes(handles: tuple[KVHandle, Tensor]) -> None:
    handle, _ = handles
    with pytest.raises(AttributeError):
        _ = handle.no_such_thing


def test_each_slow_way_warns_once() -> None:
    layer = KiviLayer(CONFIG)
    handle, _ = layer.update(randn(1, 5), randn(1, 5))
    with pytest.warns(KiviWarning, match="dequantized at every step") as first:
        _ = handle[0], handle[0]
    with pytest.warns(KiviWarning, match="without passing through the 'kivi' attention"):
        layer.update(randn(1, 1), randn(1, 1))
    layer.update(randn(1, 1), randn(1, 1))  # a second warning would be an error
    assert len(first) == 1
    assert layer.counts == {"materializations": 2, "unattended": 2}
    assert layer.get_seq_length() == 7


def test_a_refused_update_leaves_the_layer_as_it_was() -> None:
    layer = KiviLayer(CONFIG, max_tokens=20)
    layer.update(randn(1, 15), randn(1, 15))
    layer.attend(randn(1, 15, HQ), None)
    layer.update(randn(1, 6), randn(1, 6))
    with pytest.raises(ValueError, match="max_tokens: the cache holds 20 tokens a row, got 21"):
        layer.attend(randn(1, 6, HQ), None)
    assert layer.get_seq_length() == 15
    layer.update(randn(1, 5), randn(1, 5))
    layer.attend(randn(1, 5, HQ), None)
    assert (layer.get_seq_length(), layer.cache.lengths) == (20, [20])


def test_misuse_is_named() -> None:
    layer = KiviLayer(CONFIG)
    assert layer.keys is None
    assert layer.values is None
    with pytest.raises(RuntimeError, match="update must come first"):
        layer.attend(randn(1, 1, HQ), None)
    with pytest.raises(ValueError, match="key_states, value_states: expected equal shapes"):
        layer.update(randn(1, 3), randn(1, 3)[..., :8])
    with pytest.raises(ValueError, match="offloading: expected False"):
        layer.offload()
