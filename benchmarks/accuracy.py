"""Evaluate the catalog of simulated caches on a model: every config, every text of a folder, passkey retrieval.

    python benchmarks/accuracy.py MODEL.gguf --name NAME --texts DIR --out FILE.jsonl [--tokens 4096 ...]

Resumable: what FILE.jsonl holds already is not computed again. Needs some hundred MB of GPU memory beside the
model, or patience.
"""

import argparse
import time
from pathlib import Path

import torch

from kivi_kv.analysis.catalog import catalog
from kivi_kv.analysis.lab import Records, run_passkey, run_texts, shape_of
from kivi_kv.integrations.transformers import load

PASSKEY = (
    "kivi2",
    "kivi4",
    "sinks 32 + g64",
    "sinks 32 + K4 V2 g128",
    "sinks 32 + K4 V4 g64",
    "sinks 32 + boost 1/4",
    "sinks 32 + boost 1/4 + rotated V",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--texts", type=Path, required=True, help="a folder of .txt files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="*", default=[4096])
    parser.add_argument("--passkey", type=int, nargs="*", default=[], help="prompt lengths")
    parser.add_argument("--filler", default="report-prose", help="the text that keys are hidden in")
    parser.add_argument("--configs", nargs="*", help="only these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    model, tokenizer = load(args.model, device=args.device, progress=False)
    texts = {file.stem: file.read_text(encoding="utf-8") for file in sorted(args.texts.glob("*.txt"))}
    layers, _ = shape_of(model)
    configs = catalog(layers)
    if args.configs:
        configs = {name: configs[name] for name in args.configs}
    records = Records(args.out)
    start = time.perf_counter()

    def progress(name: str) -> None:
        print(f"{time.perf_counter() - start:7.1f} s  {name}", flush=True)

    for tokens in args.tokens:
        run_texts(model, tokenizer, args.name, texts, configs, tokens, records, progress)
    if args.passkey:
        few = {"dense": None} | {name: configs[name] for name in PASSKEY if name in configs}
        lengths = tuple(args.passkey)
        run_passkey(model, tokenizer, args.name, texts[args.filler], few, lengths, records, progress)


if __name__ == "__main__":
    main()
