"""A vector of queries or weights times packed keys or values, on a GPU: beside fp16 and dequantize-then-multiply.

    python benchmarks/packed_matmul.py [--out FILE.csv] [--plot FILE.png]

Each provider is checked against fp64 on the values that it reads before it is timed. Medians of graph replays over
inputs that exceed the caches; GB/s count codes, scales and zeros (or fp16 values).
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from timing import copies, gate, graph_us, plot_lengths, read_bandwidth, relative_error, write_csv
from torch import Tensor

from kivi_kv import packed_matmul, quantize_k, quantize_v
from kivi_kv.format import Packed

H, HQ, D, GROUP = 8, 32, 128, 32
LENGTHS = [1 << n for n in range(8, 18)]


def fp16(a: Tensor, matrix: Tensor) -> Tensor:
    """The query heads of a kv head as rows: torch's fastest for grouped heads."""
    B, _, M, K = a.shape
    return torch.matmul(a.reshape(B, H, HQ // H * M, K), matrix).view(B, HQ, M, -1)


def dense(packed: Packed) -> Tensor:
    """The packed matrix [B, H, K, N] in fp16."""
    x = packed.dequantize()
    return x.transpose(-1, -2) if packed.axis == "tokens" else x


def measure(B: int, T: int, side: str, bits: int, read: float) -> list[dict[str, Any]]:
    x = torch.randn(B, H, T, D, device="cuda", dtype=torch.float16)
    if side == "q K^T":
        packed, a = quantize_k(x, bits, GROUP, checked=False), torch.randn(B, HQ, 1, D, device="cuda").half()
    else:
        packed, a = quantize_v(x, bits, GROUP, checked=False), torch.rand(B, HQ, 1, T, device="cuda").half()
    args = (GROUP, a, packed.code, packed.scale, packed.zero, bits)
    matrix = dense(packed)
    expected = fp16(a.double(), matrix.double())
    rows = []

    def add(name: str, nbytes: int, us: float) -> None:
        row = {"B": B, "T": T, "side": side, "bits": bits, "provider": name, "us": round(us, 1)}
        rows.append(row | {"GB/s": round(nbytes / us / 1e3), "of read": round(nbytes / us * 1e6 / read, 3)})

    gate(f"packed {side} {B} {T}", relative_error(packed_matmul(*args), expected), 2e-3)
    parts = (packed.code, packed.scale, packed.zero)
    sets = [parts] + [tuple(y.clone() for y in parts) for _ in range(copies(packed.nbytes) - 1)]
    us = graph_us([lambda s=s: packed_matmul(GROUP, a, *s, bits) for s in sets])
    add("packed_matmul", packed.nbytes, us)
    gate(f"fp16 {side} {B} {T}", relative_error(fp16(a, matrix), expected), 2e-3)
    matrices = [matrix] + [matrix.clone() for _ in range(copies(matrix.nbytes) - 1)]
    add("fp16 matmul", matrix.nbytes, graph_us([lambda m=m: fp16(a, m) for m in matrices]))
    add("dequantize, then fp16 matmul", packed.nbytes, graph_us([lambda: fp16(a, dense(packed))]))
    for row in rows:
        print("  ".join(f"{value}" for value in row.values()), flush=True)
    return rows


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        lines = panels.setdefault(f"{row['side']}, batch {row['B']}", {})
        lines.setdefault(f"{row['provider']}, {row['bits']} bits", []).append((row["T"], row["us"]))
    plot_lengths(panels, file, "µs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--bits", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--out", type=Path, help="write the rows to this CSV file")
    parser.add_argument("--plot", type=Path, help="time over length")
    args = parser.parse_args()
    torch.manual_seed(0)
    read = read_bandwidth()
    print(f"read bandwidth {read / 1e12:.2f} TB/s; {torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows = []
    for B in (1, 8):
        for side in ("q K^T", "p V"):
            for bits in args.bits:
                for T in args.lengths:
                    rows += measure(B, T, side, bits, read)
                    write_csv(args.out, rows)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
