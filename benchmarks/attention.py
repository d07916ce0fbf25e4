"""Time one decode step of attention over a packed cache beside torch's attention over a dense one.

    python benchmarks/attention.py [--device cpu] [--csv FILE]

Each provider is checked against fp64 attention over the values that it reads before it is timed: a fast wrong
answer has no speed. Medians; bytes are those that the step must read.
"""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from kivi_kv import KiviConfig, LayerCache
from kivi_kv.ops import attend
from kivi_kv.reference import attend as exact

SHAPES = [(1, 9, 3, 1024, 64), (1, 9, 3, 4096, 64), (1, 32, 8, 4096, 128), (1, 32, 8, 16384, 128)]
REPEATS = 15


def median_us(run: Callable[[], object], device: str) -> float:
    if device != "cpu":
        from triton.testing import do_bench

        return 1e3 * do_bench(run, return_mode="median")
    times = []
    for _ in range(REPEATS + 3):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times[3:])  # the first ones warm up


def check(name: str, out: torch.Tensor, expected: torch.Tensor) -> None:
    error = ((out.double() - expected).norm() / expected.norm()).item()
    if not error <= 5e-3:  # bf16 output: half a unit in the last place is 2e-3 of a value
        raise SystemExit(f"{name}: relative error {error:.1e} against fp64; not timed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for B, HQ, H, T, D in SHAPES:
        q = torch.randn(B, HQ, 1, D, device=args.device, dtype=torch.bfloat16)
        k, v = torch.randn(2, B, H, T, D, device=args.device, dtype=torch.bfloat16)

        def dense(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        providers = {"dense sdpa": (dense, (k, v), k.nbytes + v.nbytes)}
        for preset in ("kivi4", "kivi2"):
            layer = LayerCache(KiviConfig.preset(preset), B, H, D, k.dtype, args.device)
            layer.append(k, v)
            providers[preset] = (
                lambda q=q, s=layer.storage: attend(q, s),
                layer.dequantize(),
                layer.storage.used_nbytes,
            )
        for name, (run, kv, nbytes) in providers.items():
            check(name, run(), exact(q, *kv, scale=D**-0.5))
            us = median_us(run, args.device)
            rows.append(
                {
                    "B": B,
                    "HQ": HQ,
                    "H": H,
                    "T": T,
                    "D": D,
                    "provider": name,
                    "us": round(us, 1),
                    "GB/s": round(nbytes / us / 1e3, 2),
                }
            )
            print(*(f"{key} {value}" for key, value in rows[-1].items()), sep="  ")
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    print(f"device {args.device}, threads {torch.get_num_threads()}, torch {torch.__version__}", file=sys.stderr)


if __name__ == "__main__":
    main()
