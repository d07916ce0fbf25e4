"""Run many configs over many texts, keeping every result as soon as it is there."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .evaluate import Reference
from .fidelity import teacher_forced
from .passkey import finds_passkeys, passkey_prompt
from .remedies import SimConfig

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


class Records:
    """A JSON-lines file of results; what it already holds is not computed again."""

    def __init__(self, file: Path) -> None:
        self.file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.strip()]

    def has(self, field: str, **keys: Any) -> bool:
        """Whether a row with these keys has that field."""
        return any(field in row and all(row.get(key) == value for key, value in keys.items()) for row in self.rows)

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def run_texts(
    model: Any,
    tokenizer: Any,
    name: str,
    texts: Mapping[str, str],
    configs: Mapping[str, SimConfig],
    tokens: int,
    records: Records,
    progress: Callable[[str], object] = lambda done: None,
) -> None:
    """Perplexity, divergence and agreement of every config on the first `tokens` tokens of every text.

    Rows have model, text, tokens, config, bits (of an element of a long cache), bits_here (at this length, sinks
    and residual included), dense_perplexity and the fields of evaluate.Result. progress gets the name of each
    config when it is done.
    """
    layers, head_dim = shape_of(model)
    for text_name, text in texts.items():
        keys = {"model": name, "text": text_name, "tokens": tokens}
        missing = [c for c in configs if not records.has("ratio", **keys, config=c)]
        if missing:
            reference = Reference(model, first_ids(model, tokenizer, text_name, text, tokens))
        for config_name in missing:
            config = configs[config_name]
            records.add(
                **keys,
                config=config_name,
                bits=config.bits_per_element(layers, head_dim),
                bits_here=config.bits_per_element(layers, head_dim, tokens),
                dense_perplexity=reference.perplexity,
                **reference.compare(config).asdict(),
            )
            progress(config_name)


def run_real(
    model: Any,
    tokenizer: Any,
    name: str,
    texts: Mapping[str, str],
    configs: Mapping[str, SimConfig],
    tokens: int,
    records: Records,
    progress: Callable[[str], object] = lambda done: None,
) -> None:
    """Perplexity and agreement through real caches, beside a dense one fed in the same chunks.

    Rows have real=True, real_ratio, real_top1 and nbytes, as allocated. Configs that no page can hold are left out.
    """
    from transformers import DynamicCache

    from ..integrations.transformers import cache_for

    for text_name, text in texts.items():
        keys = {"model": name, "text": text_name, "tokens": tokens, "real": True}
        missing = [c for c in configs if configs[c].is_real and not records.has("real_ratio", **keys, config=c)]
        if not missing:
            continue
        ids = first_ids(model, tokenizer, text_name, text, tokens)
        dense = teacher_forced(model, ids, DynamicCache(config=model.config))
        for config_name in missing:
            config = configs[config_name].cache
            cache = cache_for(model, config, max_tokens=tokens)
            scores = teacher_forced(model, ids, cache, config)
            ratio, top1 = scores.perplexity / dense.perplexity, scores.agreement(dense)
            records.add(**keys, config=config_name, real_ratio=ratio, real_top1=top1, nbytes=cache.nbytes)
            progress(config_name)


def run_passkey(
    model: Any,
    tokenizer: Any,
    name: str,
    filler: str,
    configs: Mapping[str, SimConfig | None],
    lengths: tuple[int, ...],
    records: Records,
    progress: Callable[[str], object] = lambda done: None,
    seeds: int = 4,
) -> None:
    """Whether each config finds the keys: at every length, `seeds` of them at each depth, all different.

    A config of None is dense. Rows have model, passkey (the length), config, depths and found, by key.
    """
    depths = list(DEPTHS) * seeds
    ids = tokenizer(filler, add_special_tokens=False).input_ids
    for tokens in lengths:
        keys = {"model": name, "passkey": tokens, "depths": depths}
        missing = [c for c in configs if not records.has("found", **keys, config=c)]
        if not missing:
            continue
        prompts = [passkey_prompt(tokenizer, ids, tokens, depth, seed) for seed, depth in enumerate(depths)]
        for config_name in missing:
            found = finds_passkeys(model, prompts, configs[config_name])
            records.add(**keys, config=config_name, found=found)
            progress(config_name)


def first_ids(model: Any, tokenizer: Any, name: str, text: str, tokens: int) -> Tensor:
    """The first `tokens` token ids of a text, [1, tokens], on the model's device."""
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens].to(model.device)
    if ids.shape[1] < tokens:
        raise ValueError(f"text {name}: expected at least {tokens} tokens, got {ids.shape[1]}")
    return ids


def shape_of(model: Any) -> tuple[int, int]:
    """(layers, head_dim) of a model."""
    from ..integrations.transformers import head_dim_of

    config = model.config.get_text_config(decoder=True)
    return config.num_hidden_layers, head_dim_of(config)
