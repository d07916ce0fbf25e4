"""Passkey retrieval: can the model still find a number that it read long ago?"""

import random
from typing import Any

import torch

from .evaluate import hidden_states
from .remedies import SimConfig

_NEEDLE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
_QUESTION = "\n\nWhat is the pass key? The pass key is"


def passkey_prompt(
    tokenizer: Any, filler: str, tokens: int, depth: float, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(prompt ids [1, <= tokens], ids of the answer) with the key at `depth` (0 first, 1 last) of the filler."""
    key = str(random.Random(seed).randint(10000, 99999))
    needle = tokenizer(_NEEDLE.format(key=key), add_special_tokens=False).input_ids
    question = tokenizer(_QUESTION, add_special_tokens=False).input_ids
    answer = tokenizer(f" {key}", add_special_tokens=False).input_ids
    room = tokens - len(needle) - len(question) - len(answer)
    text = tokenizer(filler, add_special_tokens=False).input_ids[:room]
    if room < 1 or len(text) < room:
        raise ValueError(f"tokens: expected from {tokens - room + 1} to {tokens - room + len(text)}, got {tokens}")
    cut = round(depth * room)
    return torch.tensor([text[:cut] + needle + text[cut:] + question]), torch.tensor(answer)


@torch.no_grad()
def finds_passkey(model: Any, prompt: torch.Tensor, answer: torch.Tensor, config: SimConfig | None) -> bool:
    """Whether greedy decoding after the prompt gives the answer.

    One pass over prompt and answer tells: greedy decoding gives it if each of its tokens is the most likely one
    after those before.
    """
    ids = torch.cat([prompt, answer[None].to(prompt.device)], dim=1)
    hidden = hidden_states(model, ids, config)[prompt.shape[1] - 1 : -1]
    return torch.equal(model.lm_head(hidden).argmax(-1).cpu(), answer.cpu())
