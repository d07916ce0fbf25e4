"""What the benchmarks share: medians of graph replays, bandwidths of the same run, the correctness gate, tables."""

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_IN_GRAPH = 16
CACHE_BYTES = 256 << 20  # inputs are rotated through at least this much, so that no cache serves them


def graph_us(calls: Sequence[Callable[[], object]]) -> float:
    """Median microseconds of one call: all are captured in one CUDA graph, which is replayed.

    The graph holds at least _IN_GRAPH calls, as that of a model with so many layers does: what it costs to start a
    graph is a small part of a call.
    """
    calls = list(calls) * math.ceil(_IN_GRAPH / len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    ms = triton.testing.do_bench(graph.replay, warmup=10, rep=60, return_mode="median")
    return 1e3 * ms / len(calls)


def eager_us(call: Callable[[], object]) -> float:
    """Median microseconds of a call that a graph cannot hold, since it waits for the device."""
    return 1e3 * triton.testing.do_bench(call, warmup=5, rep=40, return_mode="median")


def copies(nbytes: int, most: int = 64) -> int:
    """Sets of inputs of nbytes each that exceed the caches."""
    return max(1, min(most, math.ceil(CACHE_BYTES / nbytes)))


def relative_error(out: Tensor, expected: Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm()).item()


def gate(name: str, error: float, limit: float) -> None:
    """A fast wrong answer has no speed. NaN does not pass."""
    if not error <= limit:
        raise SystemExit(f"{name}: relative error {error:.1e}, allowed {limit:.1e}; not timed")


@triton.jit
def _copy(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < n), mask=at < n)


def read_bandwidth() -> float:
    """Bytes per second that a sum over 4 GiB of random fp16 reads."""
    x = torch.randn(2 << 30, device="cuda", dtype=torch.float16)
    return x.nbytes / graph_us([lambda: x.sum()]) * 1e6


def copy_bandwidth() -> float:
    """Bytes read and written per second by a kernel that copies 2 GiB. A captured memcpy is slower."""
    x = torch.randn(1 << 30, device="cuda", dtype=torch.float16)
    y = torch.empty_like(x)
    us = graph_us([lambda: _copy[(triton.cdiv(x.numel(), 8192),)](x, y, x.numel(), BLOCK=8192, num_warps=8)])
    assert torch.equal(x, y)
    return 2 * x.nbytes / us * 1e6


def write_csv(file: Path | None, rows: list[dict[str, Any]]) -> None:
    if file is not None and rows:
        names = list(dict.fromkeys(name for row in rows for name in row))
        with file.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, names)
            writer.writeheader()
            writer.writerows(rows)


def pyplot() -> Any:
    """matplotlib's, without a display; imported by those that draw."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_lengths(panels: dict[str, dict[str, list[tuple[int, float]]]], file: Path, unit: str) -> None:
    """Time over tokens, logarithmic: one panel for each title, one line for each name, of (tokens, time)."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(panels), figsize=(4.8 * len(panels), 4), squeeze=False)
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
        for name, points in lines.items():
            axis.loglog(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name)
        axis.set(title=title, xlabel="tokens", ylabel=unit)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
