"""The command line, as a user types it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kivi_kv import kivi_cache_bytes
from kivi_kv.analysis import known_models
from kivi_kv.cli.app import app
from kivi_kv.config import PRESETS


def kivi(*args: object, stdin: str = "") -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], input=stdin)


def fails_with(result: Result, *parts: str) -> None:
    """Exit code 2 and one line on stderr that has all the parts."""
    assert result.exit_code == 2
    assert result.stderr.strip().count("\n") == 0
    for part in parts:
        assert part in result.stderr


def test_plan_of_a_known_model() -> None:
    result = kivi("plan", "llama-3.1-8b", "--gpu-memory", "24GiB", "--batch", 8, "--tokens", 32768, "--json")
    assert result.exit_code == 0
    plan = json.loads(result.stdout)
    by_cache = {c["cache"]: c for c in plan["caches"]}
    assert list(by_cache) == ["fp16", "fp8", *PRESETS]
    assert by_cache["fp16"]["cache_bytes"] == 2 * 32 * 8 * 32768 * 8 * 128 * 2
    assert by_cache["kivi2"]["cache_bytes"] == kivi_cache_bytes("kivi2", 32, 8, 32768, 8, 128)
    assert plan["model"]["weight_bytes"] == 2 * 8_030_261_248  # the published parameter count
    free = 24 * 2**30 - plan["model"]["weight_bytes"]
    for name, c in by_cache.items():
        if name in PRESETS:
            longest, largest = c["longest_context"], c["largest_batch"]
            assert kivi_cache_bytes(name, 32, 8, longest, 8, 128) <= free
            assert kivi_cache_bytes(name, 32, 8, longest + 1, 8, 128) > free
            assert kivi_cache_bytes(name, 32, largest, 32768, 8, 128) <= free
            assert kivi_cache_bytes(name, 32, largest + 1, 32768, 8, 128) > free


# published parameter counts, in millions, that the shapes in the table must give
PARAMETERS = {
    "SmolLM2-135M": 134.5,
    "Llama-3.1-70B": 70553.7,
    "Qwen2.5-0.5B": 494.0,
    "Qwen2.5-1.5B": 1543.7,
    "Qwen2.5-3B": 3085.9,
    "Qwen2.5-7B": 7615.6,
    "Qwen2.5-14B": 14770.0,
    "Qwen2.5-32B": 32763.9,
    "Qwen2.5-72B": 72706.2,
    "Qwen3-0.6B": 596.0,
    "Qwen3-1.7B": 1720.6,
    "Qwen3-4B": 4022.5,
    "Qwen3-8B": 8190.7,
    "Qwen3-14B": 14768.3,
    "Qwen3-32B": 32762.1,
    "Mistral-7B": 7248.0,
    "Gemma-3-1B": 999.9,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_known_shapes_have_the_published_size(name: str) -> None:
    plan = json.loads(kivi("plan", name, "--json").stdout)
    assert plan["model"]["weight_bytes"] / 2e6 == pytest.approx(PARAMETERS[name], abs=0.06)


@pytest.mark.parametrize("name", [*known_models.CONFIGS, known_models.PAPER_NAME])
def test_every_known_model_plans(name: str) -> None:
    result = kivi("plan", name, "--gpu-memory", "1TB")
    assert result.exit_code == 0
    assert name in result.stdout
    assert "kivi2" in result.stdout


def test_the_papers_example_says_what_it_counts() -> None:
    result = kivi("plan", "KIVI-540B", "--batch", 512, "--tokens", 2048)
    assert "2.8 TiB" in result.stdout  # 3.04 TB
    assert "multi-query" in result.stdout


def test_native_layers_are_named() -> None:
    plan = json.loads(kivi("plan", "Gemma-3-4B", "--tokens", 8192, "--json").stdout)
    native, packed = sorted(plan["model"]["groups"], key=lambda g: g["reason"] is None)
    assert (native["count"], native["window"], packed["count"]) == (29, 1024, 5)
    by_cache = {c["cache"]: c["cache_bytes"] for c in plan["caches"]}
    sliding = 2 * 29 * 1024 * 4 * 256 * 2
    assert by_cache["kivi2"] == sliding + kivi_cache_bytes("kivi2", 5, 1, 8192, 4, 256)


def test_plan_of_local_files(model_dir: Path, smollm2: Path) -> None:
    for path, name in (
        (model_dir, "tiny-llama"),
        (model_dir / "config.json", "tiny-llama"),
        (smollm2, "SmolLM2-135M-Instruct.Q4_1"),
    ):
        result = kivi("plan", path, "--json")
        assert json.loads(result.stdout)["model"]["name"] == name
    shape = json.loads(kivi("plan", smollm2, "--json").stdout)["model"]
    assert shape["groups"] == [{"count": 30, "kv_heads": 3, "head_dim": 64, "reason": None, "window": None}]
    assert shape["max_tokens"] == 8192


def test_plot_is_a_picture(tmp_path: Path) -> None:
    file = tmp_path / "memory.png"
    assert kivi("plan", "Qwen3-8B", "--gpu-memory", "24GiB", "--plot", file).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["nothing-here"], ["MODEL", "Llama-3.1-8B", "nothing-here"]),
        (["Llama-3.1-8B", "--gpu-memory", "lots"], ["--gpu-memory", "24GiB", "lots"]),
        (["Llama-3.1-8B", "--gpu-memory", "8GiB"], ["gpu-memory", "weights"]),
        (["Llama-3.1-8B", "--batch", "0"], ["batch", "at least 1", "0"]),
        (["Llama-3.1-8B", "--tokens", "-5"], ["tokens", "at least 1", "-5"]),
    ],
)
def test_plan_refuses_in_one_line(args: list[str], parts: list[str]) -> None:
    fails_with(kivi("plan", *args), *parts)


def test_generate_completes(model_dir: Path) -> None:
    result = kivi("generate", model_dir, "--prompt", "w5 w6 w7", "--max-new-tokens", 6, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["prompt_tokens"] == 3
    assert report["balanced"]["tokens"] == 6
    assert report["balanced"]["cached_tokens"] == 8
    assert report["balanced"]["cache_bytes"] > 0


def test_generate_streams_and_reports(model_dir: Path) -> None:
    result = kivi("generate", model_dir, "--prompt", "-", "--max-new-tokens", 6, stdin="w5 w6 w7")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()
    assert "balanced: 6 tokens at" in result.stderr


def test_compare_marks_where_they_part(model_dir: Path) -> None:
    prompt = " ".join(f"w{n % 90 + 3}" for n in range(500))  # long enough to be packed
    args = ("generate", model_dir, "--prompt", prompt, "--max-new-tokens", 24, "--compare")
    report = json.loads(kivi(*args, "--json").stdout)
    words = {name: report[name]["text"].split() for name in ("dense", "balanced")}
    part = report["part_at"]
    assert words["dense"][:part] == words["balanced"][:part]
    assert part == 24 or words["dense"][part] != words["balanced"][part]
    assert f"they part {'nowhere' if part == 24 else f'after {part} tokens'}" in kivi(*args).stdout


def test_chat_keeps_its_cache(model_dir: Path) -> None:
    result = kivi("generate", model_dir, "--max-new-tokens", 5, stdin="w5 w6\nw7\n\n")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("balanced: 5 tokens") == 2


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--prompt", "w5", "--preset", "kivi3"], ["preset", "kivi2", "kivi3"]),
        (["--prompt", "  "], ["--prompt"]),
        (["--json"], ["--json", "--prompt"]),
        (["--compare"], ["--compare", "--prompt"]),
        (["--prompt", "w5", "--compare", "--temperature", "1"], ["--compare", "--temperature"]),
    ],
)
def test_generate_refuses_in_one_line(model_dir: Path, args: list[str], parts: list[str]) -> None:
    fails_with(kivi("generate", model_dir, *args), *parts)


def test_generate_needs_a_model() -> None:
    fails_with(kivi("generate", "nothing-here", "--prompt", "w5"), "MODEL", "nothing-here")


@pytest.mark.parametrize("command", ["plan", "generate", "eval", "inspect"])
def test_help_has_an_example(command: str) -> None:
    result = kivi(command, "--help")
    assert result.exit_code == 0
    assert f"Example: kivi {command}" in result.stdout


def test_eval_reports_and_resumes(model_dir: Path, tmp_path: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text(" ".join(f"w{n * n % 90 + 3}" for n in range(700)))
    args = ("eval", model_dir, "--text", text, "--tokens", 600, "--results", tmp_path / "out", "--config", "kivi2")
    result = kivi(*args)
    assert result.exit_code == 0, result.stderr
    assert "kivi2" in result.stdout
    assert (tmp_path / "out" / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
    assert "| kivi2 | 3.00 |" in (tmp_path / "out" / "report.md").read_text()
    rows = json.loads(kivi(*args, "--config", "kivi4", "--json").stdout)
    assert [r["config"] for r in rows] == ["kivi2", "kivi4"]


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--text", "nothing-here.txt"], ["--text", "nothing-here.txt"]),
        (["--config", "kivi3"], ["--config", "sinks 32", "kivi3"]),
        (["--tokens", "9999999"], ["words", "at least 9999999 tokens"]),
    ],
)
def test_eval_refuses_in_one_line(model_dir: Path, tmp_path: Path, args: list[str], parts: list[str]) -> None:
    text = tmp_path / "words.txt"
    text.write_text("w5 w6 w7 " * 50)
    fails_with(kivi("eval", model_dir, "--text", text, "--results", tmp_path / "out", *args), *parts)
