"""`kivi inspect`: the measures, the capture, the command, and its report in a browser."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from selenium import webdriver
from selenium.webdriver.common.by import By
from transformers import DynamicCache

from kivi_kv import KiviConfig, fake_quantize
from kivi_kv.analysis.html_report import config_code, png_uri, write_html
from kivi_kv.analysis.inspection import (
    Captured,
    LayerReport,
    ModelReport,
    capture,
    inspect_layer,
    inspect_model,
    magnitude_map,
    recommend,
)
from kivi_kv.analysis.inspection_plots import spread
from kivi_kv.integrations.transformers import cache_argument
from oracle import assert_bitwise_equal, randn
from test_cli import fails_with, kivi
from tiny_models import make_model, prompt

HEADS, TOKENS, CHANNELS = 2, 256, 64


def made(**changes: Any) -> Captured:
    """Attention inputs whose keys have one channel far from zero, in head 1."""
    k = randn(1, HEADS, TOKENS, CHANNELS, seed=1)
    k[:, 1, :, 5] += 50
    q, v = randn(1, 2 * HEADS, 64, CHANNELS, seed=2), randn(1, HEADS, TOKENS, CHANNELS, seed=3)
    return replace(Captured(q, k, v, {}), **changes)


def squared(x: torch.Tensor, exact: torch.Tensor) -> float:
    return ((x - exact).double().norm() ** 2 / exact.double().norm() ** 2).item()


def test_an_outlier_channel_is_found_and_measured() -> None:
    report = inspect_layer(3, made())
    assert report.index == 3
    assert (report.k.outlier_head, report.k.outlier_channel) == (1, 5)
    means = made().k[0, 1].abs().mean(0)
    assert report.k.outlier_ratio == pytest.approx((means.max() / means.median()).item(), rel=1e-6)
    assert 50 < report.k.outlier_ratio < 75  # mean |x| of a standard normal is 0.8
    assert report.v.outlier_ratio < 2
    for bits in (2, 4):
        for errors in (report.k.error, report.k.output_error, report.k.sinks_error):
            assert errors[bits]["channel"] < errors[bits]["token"] / 2


@pytest.mark.parametrize("axis", ["tensor", "token", "channel"])
@pytest.mark.parametrize("bits", [2, 4])
def test_errors_are_those_of_fake_quantize(bits: int, axis: str) -> None:
    x = made()
    report = inspect_layer(0, x)

    def attention(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = [t.repeat_interleave(2, dim=1).double() for t in (k, v)]
        seen = torch.ones(64, TOKENS, dtype=torch.bool).tril(TOKENS - 64)
        logits = x.q.double() @ heads[0].transpose(-1, -2) / 8
        return logits.masked_fill(~seen, -torch.inf).softmax(-1) @ heads[1]

    exact = attention(x.k, x.v)
    for side, tensor in (("k", x.k), ("v", x.v)):
        xq = fake_quantize(tensor, bits, 32, axis)
        with_sinks = torch.cat([tensor[:, :, :32], xq[:, :, 32:]], dim=2)
        found = getattr(report, side)
        assert found.error[bits][axis] == pytest.approx(squared(xq, tensor), rel=1e-5)
        for replaced, errors in ((xq, found.output_error), (with_sinks, found.sinks_error)):
            out = attention(replaced, x.v) if side == "k" else attention(x.k, replaced)
            assert errors[bits][axis] == pytest.approx(squared(out, exact), rel=1e-3)


def test_the_first_token_is_measured() -> None:
    v = randn(1, HEADS, TOKENS, CHANNELS, seed=3)
    v[:, :, 0] /= 8
    k = torch.zeros(1, HEADS, TOKENS, CHANNELS)
    report = inspect_layer(0, made(k=k, v=v))
    seen = torch.arange(TOKENS - 63, TOKENS + 1)  # uniform attention over these numbers of tokens
    assert report.first_token_attention == pytest.approx((1 / seen).mean().item(), rel=1e-4)
    assert 0.1 < report.first_token_value < 0.16


def test_per_token_values_protect_a_small_token_that_is_attended() -> None:
    v = randn(1, HEADS, TOKENS, CHANNELS, seed=3)
    v[:, :, 0] /= 8
    k = torch.zeros(1, HEADS, TOKENS, CHANNELS)
    k[:, :, 0, 0] = 60.0
    q = torch.zeros(1, 2 * HEADS, 64, CHANNELS)
    q[..., 0] = 1.0  # nearly all weight is on the first token
    report = inspect_layer(0, made(q=q, k=k, v=v)).v
    assert report.error[2]["channel"] < 1.1 * report.error[2]["token"]
    assert report.output_error[2]["channel"] > 4 * report.output_error[2]["token"]
    assert report.sinks_error[2]["channel"] < report.output_error[2]["token"]


def test_maps_average_neighbouring_tokens() -> None:
    x = randn(256, 8, seed=4)
    torch.testing.assert_close(magnitude_map(x), x.abs().view(128, 2, 8).mean(1))
    assert_bitwise_equal(magnitude_map(x[:50]), x[:50].abs())


def with_costs(*costs: float) -> list[LayerReport]:
    """Layers whose keys cost this much at 2 bits, per channel; values cost 0.1 per token."""
    layer = inspect_layer(0, made())
    v = replace(layer.v, output_error={2: {"token": 0.1}})
    return [
        replace(layer, index=index, k=replace(layer.k, output_error={2: {"channel": cost}}), v=v)
        for index, cost in enumerate(costs)
    ]


@pytest.mark.parametrize(
    ("costs", "config", "sensitive"),
    [
        ([0.1, 0.2, 0.19], KiviConfig(2, 2, 32, sink_length=32), []),
        ([0.1, 0.2, 0.61], KiviConfig(2, 2, 32, sink_length=32), [2]),
        ([0.9, 0.21, 0.2], KiviConfig(4, 2, 128, sink_length=32), [0]),
    ],
)
def test_the_rule(costs: list[float], config: KiviConfig, sensitive: list[int]) -> None:
    assert recommend(with_costs(*costs))[:2] == (config, sensitive)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "gemma3", "gpt_oss"])
def test_capture_is_what_a_cache_holds(family: str) -> None:
    model, ids = make_model(family), prompt(200)
    cache = DynamicCache()  # without a config it keeps every token, in sliding layers too
    with torch.no_grad():
        before = model(ids, **cache_argument(cache)).logits
        with capture(model) as captured:
            inside = model(ids, use_cache=False).logits
    full = [n for n, layer in enumerate(cache.layers) if n in captured]
    assert full == ([1, 3] if family in ("gemma3", "gpt_oss") else [0, 1])
    assert sorted(captured) == full
    for index in full:
        assert captured[index].q.shape[2] == 64
        if family != "gpt_oss":  # its eager attention rounds differently
            assert_bitwise_equal(captured[index].k, cache.layers[index].keys)
            assert_bitwise_equal(captured[index].v, cache.layers[index].values)
        torch.testing.assert_close(captured[index].k, cache.layers[index].keys)
    torch.testing.assert_close(inside, before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_output_is_the_layers_own_attention(family: str) -> None:
    """Scale and sink logits are those of the model: the attention output enters o_proj unchanged."""
    model = make_model(family)
    seen: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args, index=index: seen.update({index: args[0]}))
    with torch.no_grad(), capture(model) as captured:
        model(prompt(200), use_cache=False)
    for index, x in captured.items():
        out = x.output(x.k, x.v).transpose(1, 2).flatten(2)  # [1, M, HQ * D]
        torch.testing.assert_close(out, seen[index][:, -64:], atol=1e-5, rtol=1e-4)


def test_the_model_has_its_attention_back() -> None:
    model = make_model("llama")
    before = model.config._attn_implementation
    report = inspect_model(model, prompt(100), "m", "t")
    assert (report.tokens, report.kv_heads, report.head_dim, report.other_layers) == (100, 2, 32, 0)
    assert model.config._attn_implementation == before
    with pytest.raises(KeyError), capture(model):
        raise KeyError
    assert model.config._attn_implementation == before


def test_sliding_layers_are_left_out_and_needed() -> None:
    report = inspect_model(make_model("gemma3"), prompt(100), "m", "t")
    assert [layer.index for layer in report.layers] == [1, 3]
    assert report.other_layers == 2
    with pytest.raises(ValueError, match="full-attention layers"):
        inspect_model(make_model("mistral_sliding"), prompt(100), "m", "t")


def test_at_most_six_layers_are_shown() -> None:
    layers = with_costs(*[0.1] * 30)
    assert [layer.index for layer in spread(layers, 6)] == [0, 6, 12, 17, 23, 29]
    assert spread(layers[:4], 6) == layers[:4]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "words.txt"
    file.write_text(" ".join(f"w{n * n % 90 + 3}" for n in range(400)))
    return file


def test_inspect_writes_its_report(model_dir: Path, words: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "report"
    result = kivi("inspect", model_dir, "--text", words, "--tokens", 300, "--out", folder, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report == json.loads((folder / "report.json").read_text())
    assert (folder / "overview.png").read_bytes().startswith(b"\x89PNG")
    assert {key: report[key] for key in ("model", "text", "tokens", "kv_heads", "head_dim", "other_layers")} == {
        "model": "tiny-llama",
        "text": "words",
        "tokens": 300,
        "kv_heads": 2,
        "head_dim": 32,
        "other_layers": 0,
    }
    assert KiviConfig(**report["recommended"]).sink_length == 32
    assert {"sensitive_layers", "k_output_error", "v_output_error", "rule"} < report.keys()
    assert [layer["index"] for layer in report["layers"]] == [0, 1]
    for layer in report["layers"]:
        for side in ("k", "v"):
            assert set(layer[side]) == {
                "outlier_ratio",
                "outlier_head",
                "outlier_channel",
                "error",
                "output_error",
                "sinks_error",
            }
            for name in ("error", "output_error", "sinks_error"):
                assert list(layer[side][name]) == ["2", "4"]
                assert list(layer[side][name]["2"]) == ["tensor", "token", "channel"]


def test_inspect_prints_a_table(model_dir: Path, words: Path, tmp_path: Path) -> None:
    result = kivi("inspect", model_dir, "--text", words, "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "400 tokens" in result.stdout  # all there are
    assert "K per channel" in result.stdout
    assert "KiviConfig(k_bits=" in result.stdout
    assert "report.html" in result.stderr


@pytest.mark.parametrize(
    ("text", "args", "parts"),
    [
        (None, [], ["--text", "words.txt"]),
        ("w5 w6 w7", [], ["--text", "at least 64 tokens", "3"]),
        ("w5 " * 99, ["--tokens", "9999"], ["--tokens", "at most 2048", "9999"]),
    ],
)
def test_inspect_refuses_in_one_line(
    model_dir: Path, tmp_path: Path, text: str | None, args: list[str], parts: list[str]
) -> None:
    file = tmp_path / "words.txt"
    if text is not None:
        file.write_text(text)
    fails_with(kivi("inspect", model_dir, "--text", file, "--out", tmp_path / "out", *args), *parts)


def test_inspect_needs_a_model(words: Path) -> None:
    fails_with(kivi("inspect", "nothing-here", "--text", words), "MODEL", "nothing-here")


def report_of(name: str, layers: list[LayerReport]) -> ModelReport:
    return ModelReport(name, "a text", TOKENS, HEADS, CHANNELS, 1, layers, *recommend(layers))


def test_html_escapes_and_loads_nothing(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    write_html(report_of("<script>alert(1)</script> & co", [inspect_layer(0, made())]), file)
    html = file.read_text()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co" in html
    for loader in ("http:", "https:", "url(", "@import", "<link", "<script", 'src="/'):
        assert loader not in html


def test_a_map_of_zeros_is_a_picture() -> None:
    assert png_uri(torch.zeros(4, 4)).startswith("data:image/png;base64,iVBOR")


FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
)


@contextmanager
def browser(profile: Path) -> Iterator[webdriver.Chrome]:
    """A headless Chromium that logs its console and its network."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.mark.browser
def test_report_in_a_browser(model_dir: Path, words: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    result = kivi("inspect", model_dir, "--text", words, "--out", folder, "--json")
    report = json.loads(result.stdout)
    page = (folder / "report.html").as_uri()
    with browser(tmp_path / "profile") as driver:
        driver.get(page)
        assert driver.title == "kivi inspect: tiny-llama"
        assert len(driver.find_elements(By.CSS_SELECTOR, "section.layer")) == len(report["layers"]) == 2
        images = driver.find_elements(By.TAG_NAME, "img")
        assert len(images) == 4  # K and V
        for image in images:
            assert driver.execute_script("return arguments[0].complete && arguments[0].naturalWidth", image) == 32
        config = driver.find_element(By.ID, "recommended")
        assert config.is_displayed()
        assert config.text == config_code(KiviConfig(**report["recommended"]))
        overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert driver.execute_script(overflow) == 0
        assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
        events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    urls = {x["request"]["url"] for x in sent if x["documentURL"] == page}  # the browser's own start page loads too
    assert {url for url in urls if not url.startswith("data:")} == {page}
