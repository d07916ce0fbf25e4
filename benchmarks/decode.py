"""One decode step of attention over a packed cache beside torch's own attention over a dense one, on a GPU.

    python benchmarks/decode.py [--shapes 1 2 | --lengths | --ragged] [--presets kivi2 ...] [--backends gluon ...]
        [--pages] [--query-heads 64 ...] [--out FILE.csv] [--plot FILE.png]

Each provider is checked against fp64 attention over the values that it reads before it is timed. Medians of graph
replays; GB/s count everything that the launch must read, of which "read" is the share of the bandwidth at which a
sum reads, measured in the same run.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import copies, eager_us, gate, graph_us, plot_lengths, read_bandwidth, relative_error, write_csv
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kivi_kv import KiviConfig, LayerCache
from kivi_kv.config import PAGE
from kivi_kv.format import decode_pages
from kivi_kv.ops import attend
from kivi_kv.reference import attend as exact
from kivi_kv.storage import KVStorage

SHAPES = {  # B, HQ, H, T
    1: (1, 32, 8, 32768),
    2: (1, 32, 8, 131072),
    3: (8, 32, 8, 32768),
    4: (32, 32, 8, 8192),
    5: (64, 32, 8, 4096),
    6: (8, 32, 32, 8192),
    7: (1, 64, 8, 131072),
    8: (32, 32, 8, 32768),
}
LENGTHS = [(B, 32, 8, 1 << n) for B in (1, 8, 64) for n in range(8, 18) if B << n <= 1 << 20]
D = 128
SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def filled(config: KiviConfig, k: Tensor, v: Tensor, valid: Tensor | None = None) -> KVStorage:
    """A storage that holds k and v [B, H, T, D], without the tokens that valid [B, T] marks False."""
    B, H, T, _ = k.shape
    cache = LayerCache(config, B, H, D, k.dtype, "cuda", T)
    cache.append(k, v, valid)
    return cache.storage


def keep_pages(storage: KVStorage) -> None:
    """Forget the residual: what is left is packed, but for sinks."""
    storage.lengths.copy_(storage.packed * PAGE + storage.config.sink_length)


def represented(storage: KVStorage, rows: int) -> tuple[Tensor, Tensor]:
    """K and V of the first rows, equally long, as the storage holds them, in any order of tokens, fp32."""
    stored = (storage.dense_tokens()[0] < storage.lengths[0]).nonzero().flatten()
    k, v = (x[:rows][:, :, stored].float() for x in (storage.dense_k, storage.dense_v))
    pages = int(storage.packed[0])
    if pages:
        packed = decode_pages(storage.pool[storage.table[:rows, :pages].long()], storage.layout, torch.float32)
        k, v = (torch.cat(pair, dim=2) for pair in zip(packed, (k, v), strict=True))
    return k, v


def sdpa(backend: str, by_rows: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """by_rows: the query heads of a kv head as query tokens, which is the same without a mask."""
    with sdpa_kernel(SDPA[backend]):
        if by_rows:
            B, HQ, _, _ = q.shape
            return F.scaled_dot_product_attention(q.view(B, k.shape[1], -1, D), k, v).view(B, HQ, 1, D)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def table_row(
    shape: tuple[int, int, int, int], dtype: torch.dtype, name: str, us: float, nbytes: int, read: float
) -> dict[str, Any]:
    row = dict(zip(("B", "HQ", "H", "T"), shape, strict=True))
    row |= {"dtype": str(dtype)[6:], "provider": name, "us": round(us, 1)}
    return row | {"GB/s": round(nbytes / us / 1e3), "of read": round(nbytes / us * 1e6 / read, 3)}


def measure(shape: tuple[int, int, int, int], read: float, dtype: torch.dtype, args: argparse.Namespace) -> Any:
    B, HQ, H, T = shape
    limit = 2e-3 if dtype == torch.float16 else 5e-3
    q = torch.randn(B, HQ, 1, D, device="cuda", dtype=dtype)
    k, v = torch.randn(2, B, H, T, D, device="cuda", dtype=dtype)
    result: dict[str, tuple[float, int]] = {}

    def add(name: str, calls: list[Callable[[], Tensor]], expected: Tensor, nbytes: int) -> None:
        rows = expected.shape[0]
        gate(f"{name} {shape}", relative_error(calls[0]()[:rows], expected), limit)
        result[name] = graph_us(calls), nbytes

    rows = max(1, min(B, (1 << 19) // T // (HQ // H)))  # fp64 is checked on these
    expected = exact(q[:rows], k[:rows], v[:rows], D**-0.5)
    sets = [(k, v)] + [(k.clone(), v.clone()) for _ in range(copies(2 * k.nbytes) - 1)]
    for backend in SDPA:
        for by_rows in (False, True):
            calls = [lambda kv=kv, b=backend, r=by_rows: sdpa(b, r, q, *kv) for kv in sets]
            try:
                add(f"fp16 {backend}{' rows' if by_rows else ''}", calls, expected, 2 * k.nbytes)
            except RuntimeError as error:
                print(f"{backend}: {str(error).splitlines()[0]}")
    del sets
    for preset in args.presets:
        storages = [filled(KiviConfig.preset(preset), k, v)]
        for _ in range(copies(storages[0].used_nbytes) - 1):
            storages.append(filled(KiviConfig.preset(preset), k, v))
        for what in ("", ", pages only") if args.pages and storages[0].table.shape[1] else ("",):
            if what:
                for storage in storages:
                    keep_pages(storage)
            expected = exact(q[:rows], *represented(storages[0], rows), D**-0.5)
            for backend in args.backends:
                calls = [lambda s=s, b=backend: attend(q, s, backend=b) for s in storages]
                add(f"{preset} {backend}{what}", calls, expected, storages[0].used_nbytes)
        if args.slow and storages[0].table.shape[1]:

            def dequantize_first(s: KVStorage = storages[0]) -> Tensor:
                k, v = decode_pages(s.pool[s.table.long()], s.layout, dtype)
                return sdpa("flash", False, q, k.contiguous(), v.contiguous())

            result[f"{preset}, dequantized first"] = eager_us(dequantize_first), 2 * k.nbytes
        del storages, calls
    dense = min(us for name, (us, _) in result.items() if name.startswith("fp16"))
    rows_out = []
    for name, (us, nbytes) in result.items():
        rows_out.append(table_row(shape, dtype, name, us, nbytes, read) | {"fp16 / this": round(dense / us, 2)})
        print("  ".join(f"{value}" for value in rows_out[-1].values()), flush=True)
    return rows_out


def ragged(read: float, dtype: torch.dtype, args: argparse.Namespace) -> Any:
    """32 sequences in one batch, their lengths log-uniform from 512 to 65,536."""
    B, HQ, H = 32, 32, 8
    lengths = torch.logspace(9, 16, 4096, base=2)[torch.randperm(4096)[:B]].long()
    T = int(lengths.max())
    k, v = torch.randn(2, B, H, T, D, device="cuda", dtype=dtype)
    q = torch.randn(B, HQ, 1, D, device="cuda", dtype=dtype)
    valid = (torch.arange(T) < lengths[:, None]).cuda()
    rows = []
    for preset in args.presets:
        storage = filled(KiviConfig.preset(preset), k, v, valid)
        for backend in args.backends:
            out = attend(q, storage, backend=backend)
            for b in range(0, B, 8):
                expected = exact(q[b : b + 1], *represented(storage.rows(slice(b, b + 1)), 1), D**-0.5)
                gate(f"{preset} {backend} row {b}", relative_error(out[b : b + 1], expected), 5e-3)
            us = graph_us([lambda s=storage, b=backend: attend(q, s, backend=b)])
            shape, name = (B, HQ, H, int(lengths.sum())), f"{preset} {backend}, ragged"
            rows.append(table_row(shape, dtype, name, us, storage.used_nbytes, read))
            print("  ".join(f"{value}" for value in rows[-1].values()), flush=True)
    return rows


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        lines = panels.setdefault(f"batch {row['B']}, 32 query heads, 8 kv heads, D 128", {})
        lines.setdefault(row["provider"], []).append((row["T"], row["us"]))
    plot_lengths(panels, file, "µs per decode step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--lengths", action="store_true", help="256 to 131,072 tokens at batch 1, 8 and 64 instead")
    parser.add_argument("--ragged", action="store_true", help="a batch of sequences of all lengths instead")
    parser.add_argument("--backends", nargs="*", default=["gluon"])
    parser.add_argument("--pages", action="store_true", help="packed pages alone, too")
    parser.add_argument("--query-heads", type=int, nargs="*", help="these numbers of query heads, for each shape")
    parser.add_argument("--presets", nargs="*", default=["kivi2", "kivi4", "balanced"])
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--slow", action="store_true", help="also dequantize first, then attend")
    parser.add_argument("--out", type=Path, help="write the rows to this CSV file")
    parser.add_argument("--plot", type=Path, help="time over length, with --lengths")
    args = parser.parse_args()
    torch.manual_seed(0)
    read = read_bandwidth()
    print(f"read bandwidth {read / 1e12:.2f} TB/s; {torch.cuda.get_device_name()}, torch {torch.__version__}")
    dtype, rows = getattr(torch, args.dtype), []
    shapes = LENGTHS if args.lengths else [SHAPES[n] for n in args.shapes]
    if args.query_heads:
        shapes = [(B, HQ, H, T) for B, _, H, T in shapes for HQ in args.query_heads]
    if args.ragged:
        rows = ragged(read, dtype, args)
        write_csv(args.out, rows)
        return
    for shape in shapes:
        rows += measure(shape, read, dtype, args)
        write_csv(args.out, rows)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
