"""The evaluation runs: passkey prompts, resuming, tables, pictures."""

import json
from pathlib import Path

import pytest
import torch

from kivi_kv.analysis.catalog import catalog
from kivi_kv.analysis.lab import Records, run_passkey, run_real, run_texts
from kivi_kv.analysis.passkey import finds_passkey, passkey_prompt
from kivi_kv.analysis.plots import plot_tradeoff
from kivi_kv.analysis.report import accuracy_table, mean_by_config, passkey_table, real_table
from tiny_models import make_model


class Letters:
    """A tokenizer of characters."""

    class Encoding:
        def __init__(self, ids: list[int], tensors: str | None) -> None:
            self.input_ids = torch.tensor([ids]) if tensors else ids

    def __call__(self, text: str, add_special_tokens: bool = True, return_tensors: str | None = None) -> Encoding:
        return self.Encoding([3 + ord(c) % 90 for c in text], return_tensors)


FILLER = "the quick brown fox jumps over the lazy dog; " * 40


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_key_lies_at_its_depth_and_is_asked_for(depth: float) -> None:
    prompt, answer = passkey_prompt(Letters(), FILLER, 600, depth, seed=4)
    assert prompt.shape[1] + len(answer) == 600
    ids, key = prompt[0].tolist(), answer.tolist()[1:]
    found = [i for i in range(len(ids)) if ids[i : i + len(key)] == key]
    assert len(found) == 2  # said twice, never in the question
    filler = (
        600
        - len(answer)
        - len(Letters()("\n\nThe pass key is 12345. Remember it. 12345 is the pass key.\n\n").input_ids)
    )
    filler -= len(Letters()("\n\nWhat is the pass key? The pass key is").input_ids)
    assert found[0] == round(depth * filler) + len("\n\nThe pass key is ")


def test_a_filler_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^tokens: expected from \d+ to \d+, got 99999"):
        passkey_prompt(Letters(), FILLER, 99999, 0.5, 0)


def test_found_means_greedy_decoding_says_it() -> None:
    model = make_model("llama")
    prompt = torch.randint(3, 99, (1, 200))
    answer = model.generate(prompt, max_new_tokens=6, do_sample=False)[0, 200:]
    assert finds_passkey(model, prompt, answer, None)
    wrong = answer.clone()
    wrong[-1] = (wrong[-1] + 1) % 99
    assert not finds_passkey(model, prompt, wrong, None)


def test_runs_resume_where_they_stopped(tmp_path: Path) -> None:
    model, file = make_model("llama"), tmp_path / "results.jsonl"
    known = catalog(model.config.num_hidden_layers)
    configs = {name: known[name] for name in ("kivi2", "kivi4", "sinks 4")}
    first = {"kivi2": known["kivi2"]}
    run_texts(model, Letters(), "tiny", {"a": FILLER}, first, 400, Records(file))
    done: list[str] = []
    run_texts(model, Letters(), "tiny", {"a": FILLER, "b": FILLER[7:]}, configs, 400, Records(file), done.append)
    assert done == ["kivi4", "sinks 4", "kivi2", "kivi4", "sinks 4"]
    run_passkey(model, Letters(), "tiny", FILLER, {"dense": None, **first}, (300,), Records(file), done.append)
    again: list[str] = []
    run_texts(model, Letters(), "tiny", {"a": FILLER}, configs, 400, Records(file), again.append)
    run_passkey(model, Letters(), "tiny", FILLER, {"dense": None, **first}, (300,), Records(file), again.append)
    assert again == []
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 8
    assert {r["text"] for r in rows if "text" in r} == {"a", "b"}
    with pytest.raises(ValueError, match="text a: expected at least 99999 tokens"):
        run_texts(model, Letters(), "tiny", {"a": FILLER}, configs, 99999, Records(file))


ROWS = [
    {"config": "kivi2", "bits": 3.0, "ratio": 1.21, "kl": 0.2, "top1": 0.8},
    {"config": "kivi2", "bits": 3.0, "ratio": 1.00, "kl": 0.0, "top1": 0.9},
    {"config": "kivi4", "bits": 5.0, "ratio": 1.001, "kl": 0.001, "top1": 0.99},
    {"config": "kivi2", "passkey": 2048, "found": [True, False]},
    {"config": "dense", "passkey": 4096, "found": [True, True]},
]


def test_tables_average_and_rank() -> None:
    best, worst = mean_by_config(ROWS)
    assert (best["config"], worst["config"], worst["texts"]) == ("kivi4", "kivi2", 2)
    assert worst["ratio"] == pytest.approx(1.1)  # the mean of logarithms
    lines = accuracy_table(ROWS).splitlines()
    assert lines[2].startswith("| kivi4 | 5.00 | 1.0010 | 99% |")
    assert lines[3].startswith("| kivi2 | 3.00 | 1.1000 | 0% |")
    assert passkey_table(ROWS).splitlines()[0] == "| config | 2,048 tokens | 4,096 tokens |"
    assert "| kivi2 | 1/2 |  |" in passkey_table(ROWS)


def test_the_tradeoff_is_a_picture(tmp_path: Path) -> None:
    plot_tradeoff(ROWS, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_real_caches_agree_with_the_simulation(tmp_path: Path) -> None:
    model, records = make_model("llama"), Records(tmp_path / "results.jsonl")
    known = catalog(model.config.num_hidden_layers)
    configs = {name: known[name] for name in ("residual 32", "rotated V")}
    for _ in range(2):  # the second run finds everything done
        run_texts(model, Letters(), "tiny", {"a": FILLER}, configs, 600, records)
        run_real(model, Letters(), "tiny", {"a": FILLER}, configs, 600, records)
    (real,) = [r for r in records.rows if r.get("real")]
    simulated = next(r for r in records.rows if r["config"] == "residual 32" and "ratio" in r)
    assert real["config"] == "residual 32"  # no page holds a rotated V
    assert real["real_ratio"] == pytest.approx(simulated["ratio"], rel=1e-3)  # fp32 sums in another order
    assert real["real_top1"] == pytest.approx(simulated["top1"], abs=2 / 599)  # ties may fall the other way
    assert f"| residual 32 | a | {real['real_ratio']:.4f} |" in real_table(records.rows)
