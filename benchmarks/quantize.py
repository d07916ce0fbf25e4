"""Quantize and pack K and V into pages: bytes read and written per second beside a copy, on a GPU.

    python benchmarks/quantize.py [--out FILE.csv] [--plot FILE.png]

Pages are compared with the reference, bit for bit, before anything is timed.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from timing import copy_bandwidth, graph_us, pyplot, write_csv

from kivi_kv import KiviConfig
from kivi_kv.format import PageLayout, to_pages
from kivi_kv.ops.kernels.quantize import write_k_pages, write_v_pages

SHAPE = (8, 8, 32768, 128)


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Shares of the copy's bandwidth, one bar for each row."""
    plt = pyplot()
    names = [f"{r['of']} {r['dtype']}, {r['bits']} bits, groups of {r['group']}" for r in rows]
    figure, axis = plt.subplots(figsize=(6.4, 3.6))
    axis.barh(names, [float(r["of copy"]) for r in rows], color=["C0" if r["of"] == "K" else "C1" for r in rows])
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set(xlabel="bytes read and written per second, beside a copy's", xlim=(0, 1.05))
    axis.tick_params(axis="y", labelsize=7)
    axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows to this CSV file")
    parser.add_argument("--plot", type=Path, help="shares of a copy's bandwidth")
    args = parser.parse_args()
    B, H, T, D = SHAPE
    copy = copy_bandwidth()
    print(f"copy bandwidth {copy / 1e12:.2f} TB/s; {torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows = []
    for dtype in (torch.float16, torch.bfloat16):
        # strided as a projection leaves it: [B, T, H, D]
        k, v = (torch.randn(B, T, H, D, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(2))
        for bits, group_size in ((2, 32), (4, 32), (4, 128)):
            layout = PageLayout.of(KiviConfig(bits, bits, group_size), D, dtype)
            P = T // 128
            slots = torch.randperm(B * P, device="cuda", dtype=torch.int32).view(B, P)
            pool = torch.full((B * P, H, layout.words), -1, dtype=torch.int32, device="cuda")
            write_k_pages(k, pool, slots, layout)
            write_v_pages(v, pool, slots, layout)
            part = slice(T - 1024, T)
            expected = to_pages(k[:, :, part], v[:, :, part], layout)
            if not torch.equal(pool[slots[:, -8:].long()], expected):
                raise SystemExit(f"{bits} bits, group {group_size}: differs from the reference; not timed")
            half = sum(layout.sizes[:3]), sum(layout.sizes[3:])
            for name, write, x, words in (("K", write_k_pages, k, half[0]), ("V", write_v_pages, v, half[1])):
                us = graph_us([lambda w=write, x=x, p=pool, s=slots, la=layout: w(x, p, s, la)])
                nbytes = x.nbytes + B * P * H * words * 4
                rows.append(
                    {"of": name, "dtype": str(dtype)[6:], "bits": bits, "group": group_size, "us": round(us, 1)}
                    | {"GB/s": round(nbytes / us / 1e3), "of copy": round(nbytes / us * 1e6 / copy, 3)}
                )
                print("  ".join(f"{value}" for value in rows[-1].values()), flush=True)
    write_csv(args.out, rows)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
