"""Run by test_two_gpus.py under torchrun: generate with a model that is split over the processes' GPUs.

torchrun --nproc-per-node 2 two_gpus.py MODEL_DIR DTYPE: the first process prints the tokens.
"""

import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from kivi_kv import cache_for
from test_two_gpus import CONFIG, NEW, PROMPTS
from tiny_models import generate, left_padded


def main(folder: str, dtype: str) -> None:
    rank = int(os.environ["RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), tp_plan="auto").eval()
    cache = cache_for(model, CONFIG, max_tokens=400)
    tokens = generate(model, left_padded(PROMPTS), cache, max_new_tokens=NEW)
    heads = cache.packed_layers[0].cache.storage.heads
    if rank == 0:
        print("heads", heads, "backends", sorted(cache.stats()["attend_calls"]))
        print("tokens", tokens.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
