"""Which backend runs an operator: the table, the variable, and what is refused."""

import pytest
import torch
from torch import Tensor

from interpreting import interpreted
from kivi_kv import KiviConfig, LayerCache, cache_for
from kivi_kv.format import PageLayout
from kivi_kv.integrations.transformers import cache_argument
from kivi_kv.ops import attend, choose, gluon_or_triton, write_pages
from kivi_kv.ops.dispatch import BACKENDS, VARIABLE
from tiny_models import make_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize(
    ("op", "device", "dtype", "expected"),
    [
        ("attend", CUDA, FP16, "triton"),
        ("attend", CUDA, BF16, "triton"),
        ("attend", CUDA, FP32, "reference"),
        ("packed_matmul", CUDA, FP16, "triton"),
        ("packed_matmul", CUDA, FP32, "reference"),
        ("quantize", CUDA, FP16, "triton"),
        ("quantize", CUDA, FP32, "triton"),
        ("attend", CPU, FP16, "reference"),
        ("quantize", CPU, BF16, "reference"),
        ("packed_matmul", CPU, FP16, "reference"),
        ("attend", torch.device("meta"), FP16, "reference"),
    ],
    ids=str,
)
def test_the_fastest_that_runs_is_chosen(op, device, dtype, expected, no_interpreter):
    assert choose(op, device, dtype) == expected
    assert choose(op, device, dtype, "reference") == "reference"
    if expected == "triton":
        assert choose(op, device, dtype, "triton") == "triton"


def test_a_cpu_takes_the_reference_even_with_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("attend", CPU, FP16) == "reference"
    assert choose("attend", CPU, FP16, "triton") == "triton"


def test_the_variable_forces_and_the_argument_overrules_it(monkeypatch):
    monkeypatch.setenv(VARIABLE, "reference")
    assert choose("attend", CUDA, FP16) == "reference"
    assert choose("attend", CUDA, FP16, "triton") == "triton"
    monkeypatch.setenv(VARIABLE, "triton")
    assert choose("attend", CUDA, FP16) == "triton"
    assert choose("attend", CUDA, FP16, "reference") == "reference"
    monkeypatch.setenv(VARIABLE, "")
    assert choose("attend", CUDA, FP16) == "triton"


@pytest.mark.parametrize("source", ["backend", VARIABLE])
@pytest.mark.parametrize(
    ("name", "device", "dtype", "why"),
    [
        ("cuda", CUDA, FP16, "expected one of reference, triton, gluon, got 'cuda'"),
        ("Triton", CUDA, FP16, "expected one of reference, triton, gluon, got 'Triton'"),
        ("triton", CPU, FP16, "triton cannot run here, expected a CUDA device .*, got cpu"),
        ("gluon", CPU, FP16, "gluon cannot run here, expected a CUDA device .*, got cpu"),
        (
            "triton",
            CUDA,
            FP32,
            "triton cannot run here, expected a dtype of float16, bfloat16 for attend, got float32",
        ),
    ],
    ids=str,
)
def test_the_impossible_is_refused_by_name(source, name, device, dtype, why, no_interpreter, monkeypatch):
    if source == VARIABLE:
        monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(ValueError, match=f"^{source}: {why}$"):
        choose("attend", device, dtype, name if source == "backend" else None)


def test_triton_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("kivi_kv.ops.dispatch._has_triton", lambda: False)
    assert choose("attend", CUDA, FP16) == "reference"
    with pytest.raises(ValueError, match=r"^backend: triton cannot run here, since it is not installed$"):
        choose("attend", CUDA, FP16, "triton")


def pages_of(config: KiviConfig, backend: str | None) -> Tensor:
    layer = LayerCache(config, 1, 1, 16)
    x, pool = torch.randn(1, 1, 128, 16).half(), torch.zeros(1, 1, layer.storage.layout.words, dtype=torch.int32)
    write_pages(x, x, pool, torch.zeros(1, 1, dtype=torch.int32), layer.storage.layout, backend)
    return pool


@pytest.mark.parametrize("name", ["triton", "none"])
def test_every_entry_refuses_what_cannot_run(name, no_interpreter):
    layer = LayerCache("kivi2", 1, 1, 16)
    with pytest.raises(ValueError, match=r"^backend: "):
        attend(torch.zeros(1, 1, 1, 16).half(), layer.storage, backend=name)
    with pytest.raises(ValueError, match=r"^backend: "):
        pages_of(KiviConfig(), name)
    with pytest.raises(ValueError, match=r"^backend: "):
        LayerCache("kivi2", 1, 1, 16, backend=name)


@interpreted
def test_the_interpreter_has_no_gluon():
    with pytest.raises(ValueError, match=r"^backend: gluon cannot run here, since Triton interprets$"):
        choose("attend", CPU, FP16, "gluon")
    assert choose("quantize", CPU, FP16, "gluon") == "triton", "which has no other kernel"


def test_what_gluon_does_not_take_goes_to_triton():
    layouts = {D: PageLayout.of(KiviConfig(4, 2, 64), D, FP16) for D in (64, 80, 128)}
    for D in (64, 128):
        assert gluon_or_triton(layouts[D], True, columns=16, scale=0.1) == "gluon"
    wide = PageLayout.of(KiviConfig(8, 2), 128, FP16)
    refused = {
        r"head_dim: expected 64 or 128, got 80": (layouts[80], {}),
        r"k_bits, v_bits: expected 2 or 4, got 8 and 2": (wide, {}),
        r"q: expected at most 16 query tokens x query heads of a kv head, got 17": (layouts[64], {"columns": 17}),
        r"softcap, window: expected None, got 30.0 and None": (layouts[64], {"softcap": 30.0}),
        r"softcap, window: expected None, got None and 5": (layouts[64], {"window": 5}),
        r"scale: expected a positive number, got 0.0": (layouts[64], {"scale": 0.0}),
    }
    for why, (layout, options) in refused.items():
        assert gluon_or_triton(layout, False, **options) == "triton"
        with pytest.raises(ValueError, match=f"^backend: gluon cannot run here, {why}$"):
            gluon_or_triton(layout, True, **options)


@interpreted
def test_fp32_queries_are_not_for_triton():
    """A cache that a kernel can read, asked by queries that it cannot take."""
    layer = LayerCache("kivi2", 1, 1, 16, FP16)
    layer.append(*torch.randn(2, 1, 1, 5, 16).half())
    q = torch.randn(1, 1, 1, 16)
    with pytest.raises(ValueError, match=r"^backend: triton cannot run here, expected a dtype of .*, got float32$"):
        attend(q, layer.storage, backend="triton")
    assert attend(q, layer.storage).dtype == FP32
    with pytest.raises(ValueError, match=r"^backend: .* for attend, got float32$"):
        LayerCache("kivi2", 1, 1, 16, FP32, backend="triton")


def test_a_layer_says_what_runs(monkeypatch):
    for backend in (None, "reference"):
        assert LayerCache("kivi2", 1, 1, 16, backend=backend).backends == dict.fromkeys(
            ("quantize", "attend"), "reference"
        )
    monkeypatch.setenv(VARIABLE, "reference")
    assert set(LayerCache("kivi2", 1, 1, 16).backends.values()) == {"reference"}


@interpreted
def test_the_choice_is_made_once(monkeypatch):
    layer = LayerCache("kivi2", 1, 1, 16, backend="triton")
    assert set(layer.backends.values()) == {"triton"}
    monkeypatch.setenv(VARIABLE, "nonsense")
    layer.append(*torch.randn(2, 1, 1, 5, 16).half())
    assert layer.step(*torch.randn(3, 1, 1, 1, 16).half()).isfinite().all()
    with pytest.raises(
        ValueError, match=rf"^{VARIABLE}: expected one of reference, triton, gluon, got 'nonsense'$"
    ):
        LayerCache("kivi2", 1, 1, 16)


@interpreted
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "gluon"])
def test_a_cache_of_a_model_says_what_runs(backend):
    model = make_model("llama").half()
    cache = cache_for(model, KiviConfig(residual_length=0), backend=backend)
    assert cache.stats()["backends"] is None, "nothing is stored yet"
    ids = torch.randint(3, model.config.vocab_size, (1, 140))
    for part in (ids[:, :139], ids[:, 139:]):
        with torch.no_grad():
            model(part, **cache_argument(cache))
    stats = cache.stats()
    assert stats["backends"] == {"quantize": backend, "attend": backend}
    assert stats["attend_calls"] == {backend: len(cache.packed_layers)}, "the prompt was attended dense"


def test_a_cache_of_a_model_refuses_an_unknown_backend(no_interpreter):
    model = make_model("llama")
    with pytest.raises(ValueError, match=r"^backend: expected one of reference, triton, gluon or None, got 'gpu'$"):
        cache_for(model, "kivi2", backend="gpu")
    with pytest.raises(ValueError, match=r"^backend: triton cannot run here"), torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.long), **cache_argument(cache_for(model, "kivi2", backend="triton")))
