"""Bits for single layers: by a rule (the first and last) or by the measured error of the attention output.

    python benchmarks/layers.py MODEL.gguf --choose TEXT --report TEXT [TEXT ...] [--tokens 4096]

Layers are chosen on one text and reported on others; every cache has 32 sinks.
"""

import argparse
from pathlib import Path

import torch

from kivi_kv import KiviConfig
from kivi_kv.analysis.catalog import ends, worst
from kivi_kv.analysis.evaluate import Reference
from kivi_kv.analysis.lab import shape_of
from kivi_kv.analysis.remedies import SimConfig
from kivi_kv.integrations.transformers import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--choose", type=Path, required=True)
    parser.add_argument("--report", type=Path, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    model, tokenizer = load(args.model, device=args.device, progress=False)
    layers, head_dim = shape_of(model)

    def dense(file: Path) -> Reference:
        text = file.read_text(encoding="utf-8")[: 8 * args.tokens]
        return Reference(model, tokenizer(text, return_tensors="pt").input_ids[:, : args.tokens].to(args.device))

    errors = dense(args.choose).compare(SimConfig(KiviConfig(sink_length=32))).output_error
    choices = {
        "all 2 bits": (),
        "first 2 and last 2 in 4 bits": ends(layers, 2),
        "worst 4 in 4 bits": worst(errors, 4),
        "worst quarter with 4-bit keys": worst(errors, layers // 4, 4, 2),
    }
    for file in args.report:
        reference = dense(file)
        for name, layer_bits in choices.items():
            config = SimConfig(KiviConfig(sink_length=32, layer_bits=layer_bits))
            result, bits = reference.compare(config), config.bits_per_element(layers, head_dim)
            print(f"{file.stem:16}  {name:30}  {bits:.2f} bits  {result.ratio:.4f}  top-1 {result.top1:.3f}")


if __name__ == "__main__":
    main()
