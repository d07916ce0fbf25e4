"""Passkey retrieval: can the model still find a number that it read long ago?"""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .remedies import SimConfig
from .simulation import simulate

_NEEDLE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
_QUESTION = "\n\nWhat is the pass key? The pass key is"
# tokens of all prompts of a pass: a GPU is busy with as many, on a CPU one prompt is as fast
_BATCH = {"cuda": 1 << 17}


def passkey_prompt(
    tokenizer: Any, filler: Sequence[int], tokens: int, depth: float, seed: int
) -> tuple[Tensor, Tensor]:
    """(prompt ids, ids of the answer), `tokens` in all, the key at `depth` (0 first, 1 last) of the filler.

    filler: token ids, of which the seed chooses a stretch. The answer is the key's digits: a space before them
    belongs to the prompt if the tokenizer makes it a token of its own, and to the answer otherwise.
    """
    draw = random.Random(seed)
    key = str(draw.randint(10000, 99999))
    needle, question, space, answer, spaced = (
        tokenizer(text, add_special_tokens=False).input_ids
        for text in (_NEEDLE.format(key=key), _QUESTION, " ", key, f" {key}")
    )
    if space + answer == spaced:
        question = question + space
    else:
        answer = spaced
    room = tokens - len(needle) - len(question) - len(answer)
    if not 1 <= room <= len(filler):
        raise ValueError(
            f"tokens: expected from {tokens - room + 1} to {tokens - room + len(filler)}, got {tokens}"
        )
    start = draw.randint(0, len(filler) - room)
    cut = start + round(depth * room)
    prompt = [*filler[start:cut], *needle, *filler[cut : start + room], *question]
    return torch.tensor(prompt), torch.tensor(answer)


@torch.no_grad()
def finds_passkeys(model: Any, prompts: Sequence[tuple[Tensor, Tensor]], config: SimConfig | None) -> list[bool]:
    """Of each (prompt, answer), whether greedy decoding after the prompt gives the answer.

    One pass over prompt and answer tells: greedy decoding gives it if each of its tokens is the most likely one
    after those before. All must be of one length.
    """
    lengths = {len(prompt) + len(answer) for prompt, answer in prompts}
    if len(lengths) != 1:
        raise ValueError(f"prompts: expected one length, got {sorted(lengths)}")
    rows = max(1, _BATCH.get(model.device.type, 1) // lengths.pop())
    found: list[bool] = []
    for i in range(0, len(prompts), rows):
        part = prompts[i : i + rows]
        ids = torch.stack([torch.cat(pair) for pair in part]).to(model.device)
        with simulate(model, config):
            hidden = model.model(ids, use_cache=False).last_hidden_state
        for (_, answer), row in zip(part, hidden, strict=True):
            said = model.lm_head(row[-len(answer) - 1 : -1]).argmax(-1)
            found.append(torch.equal(said.cpu(), answer))
    return found
