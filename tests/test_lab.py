"""The evaluation runs: passkey prompts, resuming, tables, pictures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kivi_kv.analysis import passkey
from kivi_kv.analysis.catalog import catalog
from kivi_kv.analysis.evaluate import Reference, distance_bins
from kivi_kv.analysis.lab import Records, run_passkey, run_real, run_texts
from kivi_kv.analysis.passkey import finds_passkeys, passkey_prompt
from kivi_kv.analysis.plots import plot_tradeoff
from kivi_kv.analysis.report import accuracy_table, distance_table, mean_by_config, passkey_table, real_table
from kivi_kv.analysis.simulation import simulate
from tiny_models import make_model


class Letters:
    """A tokenizer of characters."""

    class Encoding:
        def __init__(self, ids: list[int], tensors: str | None) -> None:
            self.input_ids = torch.tensor([ids]) if tensors else ids

    def __call__(self, text: str, add_special_tokens: bool = True, return_tensors: str | None = None) -> Encoding:
        return self.Encoding([3 + ord(c) % 90 for c in text], return_tensors)


class Words(Letters):
    """A tokenizer that keeps a space with the digit after it."""

    def __call__(self, text: str, **kwargs: Any) -> Letters.Encoding:
        whole = super().__call__(text, **kwargs)
        joined = [c for i, c in enumerate(text) if not (c == " " and text[i + 1 : i + 2].isdigit())]
        whole.input_ids = [3 + ord(c) % 90 for c in joined]
        return whole


FILLER = "the quick brown fox jumps over the lazy dog; " * 40
FILLER_IDS = Letters()(FILLER).input_ids
NEEDLE, QUESTION = (
    Letters()(text).input_ids
    for text in (
        "\n\nThe pass key is 12345. Remember it. 12345 is the pass key.\n\n",
        "\n\nWhat is the pass key? The pass key is ",
    )
)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_key_lies_at_its_depth_and_is_asked_for(depth: float) -> None:
    prompt, answer = passkey_prompt(Letters(), FILLER_IDS, 600, depth, seed=4)
    assert len(prompt) + len(answer) == 600
    ids, key = prompt.tolist(), answer.tolist()
    assert len(key) == 5  # the digits alone
    assert ids[-len(QUESTION) :] == QUESTION  # the space before them is given
    found = [i for i in range(len(ids)) if ids[i : i + len(key)] == key]
    assert len(found) == 2  # said twice, never in the question
    filler = 600 - len(answer) - len(NEEDLE) - len(QUESTION)
    assert found[0] == round(depth * filler) + len("\n\nThe pass key is ")


def test_a_space_that_is_part_of_a_digits_token_is_asked_for() -> None:
    prompt, answer = passkey_prompt(Words(), FILLER_IDS, 600, 0.5, seed=4)
    assert len(prompt) + len(answer) == 600
    assert prompt.tolist()[-len(QUESTION) + 1 :] == QUESTION[:-1]


def test_seeds_change_the_key_and_the_filler() -> None:
    prompts, answers = zip(
        *(passkey_prompt(Letters(), FILLER_IDS, 600, 0.5, seed) for seed in range(6)), strict=True
    )
    assert len({tuple(answer.tolist()) for answer in answers}) == 6
    assert len({tuple(prompt[:40].tolist()) for prompt in prompts}) > 3  # of the 45 stretches that the filler has


def test_a_filler_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^tokens: expected from \d+ to \d+, got 99999"):
        passkey_prompt(Letters(), FILLER_IDS, 99999, 0.5, 0)


def test_found_means_greedy_decoding_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    prompts = [torch.randint(3, 99, (200,)) for _ in range(3)]
    answers = [model.generate(p[None], max_new_tokens=6, do_sample=False)[0, 200:] for p in prompts]
    answers[1] = torch.cat([answers[1][:-1], (answers[1][-1:] + 1) % 99])
    pairs = list(zip(prompts, answers, strict=True))
    for tokens in (1, 450):  # one prompt a pass, then two
        monkeypatch.setitem(passkey._BATCH, "cpu", tokens)
        assert finds_passkeys(model, pairs, None) == [True, False, True]
    with pytest.raises(ValueError, match=r"^prompts: expected one length, got \[206, 207\]"):
        finds_passkeys(model, [*pairs, (torch.zeros(201, dtype=torch.long), answers[0])], None)


def test_prompts_that_share_a_pass_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = make_model("llama"), catalog(2)["sinks 32 + boost 1/4 + rotated V"]
    prompts = [torch.randint(3, 99, (400,)) for _ in range(8)]
    answers = []
    for prompt in prompts:
        with simulate(model, config), torch.no_grad():
            answers.append(model(prompt[None], use_cache=False).logits[0, -1:].argmax(-1))
    monkeypatch.setitem(passkey._BATCH, "cpu", 1 << 17)
    assert all(finds_passkeys(model, list(zip(prompts, answers, strict=True)), config))


def test_distances_double() -> None:
    assert distance_bins(100) == [(0, 100)]
    assert distance_bins(256) == [(0, 256)]
    assert distance_bins(1500) == [(0, 256), (256, 512), (512, 1024), (1024, 1500)]


def test_results_by_distance_are_those_by_position() -> None:
    model = make_model("llama")
    reference = Reference(model, torch.randint(3, 99, (1, 600)))
    assert not reference.nll.requires_grad  # or it would hold the logits of the whole text
    result = reference.compare(catalog(2)["kivi2"])
    assert result.distances == [0, 256, 512]
    counts = [256, 256, 599 - 512]
    for by_bin, mean in ((result.kl_by_distance, result.kl), (result.top1_by_distance, result.top1)):
        assert sum(n * x for n, x in zip(counts, by_bin, strict=True)) / 599 == pytest.approx(mean)
    # a query with 256 tokens behind it is the first to see a packed page
    assert result.kl_by_distance[0] == pytest.approx(0, abs=1e-6)
    assert min(result.kl_by_distance[1:]) > 1e-4


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
BY_DISTANCE = [
    {"config": "kivi2", "distances": [0, 256], "kl_by_distance": [0.0, kl], "top1_by_distance": [1.0, 0.5]}
    for kl in (0.1, 0.3)
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
    assert distance_table(ROWS + BY_DISTANCE).splitlines() == [
        "| config: KL (top-1) | 0 to 255 | 256 and more |",
        "|---|---|---|",
        "| kivi2 | 0.0000 (1.000) | 0.2000 (0.500) |",
    ]


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
