"""LayerCache refuses bad arguments before anything is stored."""

import pytest
import torch
from torch import Tensor

from caching import (
    assert_unchanged,
    filled,
    inputs,
    snapshot,
    tokens,
)
from kivi_kv import KiviConfig, LayerCache

# --- refusals ---


def test_max_tokens_is_refused_before_anything_is_stored():
    k, v = tokens(2, 300)
    cache = filled(KiviConfig(residual_length=0), k, v, max_tokens=310)
    before = snapshot(cache)
    for M in (11, 500):
        more = tokens(2, M)
        for call in (cache.append, lambda k, v: cache.step(k, k, v)):
            with pytest.raises(ValueError, match=rf"^max_tokens: the cache holds 310 tokens a row, got {300 + M}$"):
                call(*more)
            assert_unchanged(cache, before)
    valid = torch.arange(11) > torch.tensor([[0], [5]])  # 10 and 5 tokens: padding takes no room
    cache.append(*tokens(2, 11), valid)
    assert cache.lengths == [310, 305]


@pytest.mark.parametrize("max_tokens", [0, -1, 2.0, "8"])
def test_a_bad_max_tokens_is_refused(max_tokens):
    with pytest.raises(ValueError, match=r"^max_tokens: expected a positive int or None, got "):
        LayerCache(KiviConfig(), 1, 1, 16, max_tokens=max_tokens)


def test_bad_shapes_and_dtypes_of_a_cache_are_refused():
    for args, message in [
        ((1, 1, 8), "expected a head dimension of at least 16, got 8"),
        ((1, 0, 16), "heads: expected a positive int, got 0"),
        ((1, 1, 16, torch.float64), "expected a dtype of float16, bfloat16, float32, got float64"),
    ]:
        with pytest.raises(ValueError, match=message):
            LayerCache(KiviConfig(), *args)


def assert_refused(length: int, arguments: dict[str, Tensor], message: str) -> None:
    """step refuses the arguments, and append does unless only q is at fault; what is stored stays as it was."""
    cache = LayerCache(KiviConfig(residual_length=0), 2, 2, 16)
    cache.append(*tokens(2, length))
    before = snapshot(cache)
    with pytest.raises(ValueError, match=message):
        cache.step(**arguments)
    assert_unchanged(cache, before)
    if not message.startswith(("^q", "^sink_logits")):
        with pytest.raises(ValueError, match=message):
            cache.append(**{name: x for name, x in arguments.items() if name != "q"})
        assert_unchanged(cache, before)


WRONG_SHAPES = [("k", 0, 3), ("k", 1, 4), ("k", 3, 20), ("v", 1, 1), ("v", 2, 5), ("v", 3, 20), ("valid", 1, 5)]
WRONG_SHAPES += [("q", 0, 1), ("q", 1, 3), ("q", 2, 5), ("q", 3, 20)]
at_states = pytest.mark.parametrize("length", [0, 384])  # 384: the next token packs a page
of_tokens = pytest.mark.parametrize("M", [1, 2])


@at_states
@of_tokens
@pytest.mark.parametrize(("name", "dim", "size"), WRONG_SHAPES)
def test_a_wrong_shape_leaves_the_cache_as_it_was(name, dim, size, M, length):
    arguments = inputs(M)
    shape = list(arguments[name].shape)
    shape[dim] = size
    assert_refused(length, {**arguments, name: arguments[name].new_zeros(shape)}, rf"^{name}: expected .*, got ")


@at_states
@of_tokens
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("k", lambda k: k[0], r"^k: expected shape"),
        ("k", lambda k: k.bfloat16(), r"^k: expected torch.float16 on cpu, got torch.bfloat16 on cpu"),
        ("v", lambda v: v.float(), r"^v: expected torch.float16 on cpu, got torch.float32 on cpu"),
        ("k", lambda k: k + torch.nan, r"^k: expected finite values, got \d+ NaN or inf of \d+"),
        ("v", lambda v: v + torch.inf, r"^v: expected finite values, got \d+ NaN or inf of \d+"),
        ("v", lambda v: v - torch.inf, r"^v: expected finite values, got \d+ NaN or inf of \d+"),
        ("valid", lambda valid: valid.long(), r"^valid: expected .*bool"),
        ("sink_logits", lambda _: torch.zeros(3), r"^sink_logits: expected"),
    ],
    ids=["3 dims", "bf16", "fp32", "nan", "inf", "minus inf", "integer mask", "sink logits"],
)
def test_a_wrong_value_leaves_the_cache_as_it_was(name, change, message, M, length):
    arguments = inputs(M)
    assert_refused(length, {**arguments, name: change(arguments.get(name))}, message)


@of_tokens
def test_an_unknown_option_leaves_the_cache_as_it_was(M):
    cache = filled(KiviConfig(residual_length=0), *tokens(2, 384))
    before = snapshot(cache)
    with pytest.raises(TypeError, match="scael"):
        cache.step(**inputs(M), scael=1.0)
    assert_unchanged(cache, before)


def test_sizes_and_shapes_are_named():
    for name, sizes in (("batch", (0, 1, 16)), ("heads", (1, -1, 16)), ("head_dim", (1, 1, 0))):
        with pytest.raises(ValueError, match=rf"^{name}: expected a positive int, got "):
            LayerCache("kivi2", *sizes)
    with pytest.raises(ValueError, match=r"^config: expected that of one layer, see for_layer"):
        LayerCache(KiviConfig(layer_bits=((0, 8, 8),)), 1, 2, 16)
    cache = filled(KiviConfig(), *tokens(1, 40))
    with pytest.raises(ValueError, match=r"^k: expected shape \[1, 2, M, 16\], got \(2, 1, 16\)"):
        cache.append(torch.zeros(2, 1, 16).half(), torch.zeros(2, 1, 16).half())
    with pytest.raises(ValueError, match=r"^lengths: expected from 0 to 40 in row 0, got 10.5"):
        cache.crop([10.5])
    with pytest.raises(ValueError, match=r"^indices: expected a tensor, got list"):
        cache.select([0, 0])
