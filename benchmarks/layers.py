"""Bits for single layers: by a rule (the first and last) or by the measured error of the attention output.

    python benchmarks/layers.py MODEL.gguf --name NAME --choose TEXT ... --report TEXT ... --out FILE.jsonl

Layers are chosen on some texts, by the mean of their errors, and reported on others. Resumable: what FILE.jsonl
holds already is not computed again.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kivi_kv import KiviConfig
from kivi_kv.analysis.catalog import catalog, ends, mildest, worst
from kivi_kv.analysis.evaluate import Reference
from kivi_kv.analysis.lab import Records, first_ids, run_texts, shape_of
from kivi_kv.analysis.remedies import SimConfig
from kivi_kv.analysis.report import accuracy_table
from kivi_kv.integrations.transformers import load

SINKS = KiviConfig(sink_length=32)
WIDE = KiviConfig(k_bits=4, v_bits=2, group_size=128, sink_length=32)  # balanced
BESIDE = ("kivi2", "sinks 32", "sinks 32 + K4 V2 g128", "sinks 32 + boost 1/4")


def errors_by_layer(model: Any, ids: list[torch.Tensor], configs: list[SimConfig]) -> list[list[float]]:
    """For each config, the error of each layer's attention output, averaged over the texts."""
    references = [Reference(model, text) for text in ids]
    by_config = []
    for config in configs:
        by_text = [reference.compare(config).output_error for reference in references]
        by_config.append([sum(layer) / len(layer) for layer in zip(*by_text, strict=True)])
    return by_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--choose", type=Path, nargs="+", required=True)
    parser.add_argument("--report", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    model, tokenizer = load(args.model, device=args.device, progress=False)
    layers, _ = shape_of(model)

    ids = [first_ids(model, tokenizer, f.stem, f.read_text(encoding="utf-8"), args.tokens) for f in args.choose]
    two_bit_keys = replace(WIDE, k_bits=2)
    narrow, wide = errors_by_layer(model, ids, [SimConfig(SINKS), SimConfig(two_bit_keys)])
    tenth = round(layers / 10)
    bits = {
        "sinks 32 + first 2 and last 2 in 4 bits": (SINKS, ends(layers, 2)),
        "sinks 32 + worst 4 in 4 bits": (SINKS, worst(narrow, 4)),
        "sinks 32 + worst quarter with 4-bit keys": (SINKS, worst(narrow, layers // 4, 4, 2)),
        "sinks 32 + K4 V2 g128, mildest tenth with 2-bit keys": (WIDE, mildest(wide, tenth)),
    }
    configs = {
        name: SimConfig(replace(config, layer_bits=layer_bits)) for name, (config, layer_bits) in bits.items()
    }
    for name, (_, layer_bits) in bits.items():
        print(f"{name}: layers {', '.join(str(layer) for layer, _, _ in layer_bits)}", flush=True)
    texts = {file.stem: file.read_text(encoding="utf-8") for file in args.report}
    records = Records(args.out)
    beside = {name: config for name, config in catalog(layers).items() if name in BESIDE}
    run_texts(model, tokenizer, args.name, texts, configs | beside, args.tokens, records)
    print(accuracy_table(r for r in records.rows if r["model"] == args.name))


if __name__ == "__main__":
    main()
