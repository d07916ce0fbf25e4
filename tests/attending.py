"""Caches to attend, their values in fp64, and the values that a kernel with less care gets wrong."""

import torch
from torch import Tensor

from kivi_kv import KiviConfig, LayerCache
from kivi_kv.ops import attend
from oracle import randn
from test_attention import represented

FP16, BF16 = torch.float16, torch.bfloat16
TOLERANCE = {FP16: 2e-3, BF16: 5e-3}  # of an output, relative, in the Euclidean norm
# of a log-sum-exp, absolute and relative: fp32 rounds logits of 10,000 to 1e-3, and a matrix unit cuts each sum
# behind a logit to 2^-23 of its largest part; beside a large key subnormal codes count as if they were 2^-14, at a
# cost of up to 10 bits: 8e-6 seen at keys of 60,000, 3e-7 with codes as normal numbers (docs/kernel-notes.md)
LSE = 1e-3, 1e-5


def exact(q, k, v, position, scale=None, softcap=None, sink_logits=None, window=None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in fp64 of queries [1, HQ, M, D] at the given positions [M], of one row."""
    group, token = q.shape[1] // k.shape[1], torch.arange(k.shape[2], device=q.device)
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    logits = q.double() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    seen = token <= position[:, None]
    if window is not None:
        seen &= token > position[:, None] - window
    logits = logits.masked_fill(~seen, -torch.inf)
    lse = logits.logsumexp(-1)
    if sink_logits is not None:
        lse = torch.logaddexp(lse, sink_logits.double()[None, :, None])
    weights = torch.exp(logits - lse[..., None])
    return weights.nan_to_num(0.0) @ v, lse  # NaN: nothing seen


class Case:
    """A cache of one length or of ragged rows, and for every row the K and V that it represents."""

    def __init__(self, config: KiviConfig, k: Tensor, v: Tensor, lengths=None, **options) -> None:
        B, H, T, D = k.shape
        lengths = [T] * B if lengths is None else lengths
        self.cache = LayerCache(config, B, H, D, k.dtype, k.device, **{"backend": "reference", **options})
        valid = torch.arange(T) < torch.tensor(lengths)[:, None]
        self.cache.append(k, v, valid.to(k.device))
        bits = ((k, config.k_bits, "tokens"), (v, config.v_bits, "channels"))
        self.rows = [
            [represented(x[b : b + 1, :, :n], config, *how) for x, *how in bits] for b, n in enumerate(lengths)
        ]

    @classmethod
    def random(cls, config, B, H, T, D, dtype=FP16, lengths=None, device="cpu", **options) -> "Case":
        k, v = (randn(B, H, T, D, dtype=dtype, seed=seed).to(device) for seed in (1, 2))
        return cls(config, k, v, lengths, **options)

    def check(
        self, q: Tensor, new: tuple[Tensor, Tensor] | None = None, backend="triton", attend=attend, **options
    ) -> float:
        """Compare output and log-sum-exp with fp64; -> the largest relative error of a row."""
        out, lse = attend(q, self.cache.storage, *(new or ()), return_lse=True, backend=backend, **options)
        assert (out.dtype, out.shape) == (q.dtype, q.shape)
        assert (lse.dtype, lse.shape) == (torch.float32, q.shape[:3])
        worst = 0.0
        for row, (k, v) in enumerate(self.rows):
            at, M = slice(row, row + 1), q.shape[2]
            position = torch.full((M,), k.shape[2] - 1, device=q.device)
            if new is not None:
                k, v = (torch.cat([x, y[at].float()], dim=2) for x, y in zip((k, v), new, strict=True))
                position += 1 + torch.arange(M, device=q.device)
            expected, expected_lse = exact(q[at], k, v, position, **options)
            unseen = expected_lse == -torch.inf
            assert torch.equal(unseen, lse[at] == -torch.inf)
            assert not out[at][unseen].any()
            off = (lse[at] - expected_lse).abs() / (LSE[0] + LSE[1] * expected_lse.abs())
            assert not (off > 1).any(), f"row {row}, log-sum-exp: {off.max().item()} times what is allowed"
            error = ((out[at].double() - expected).norm() / expected.norm().clamp(min=1e-300)).item()
            # a weight is off by as much as its logit, relatively: what LSE allows of 10,000 is 10%, of 100 0.1%
            largest = expected_lse.masked_fill(unseen, 0.0).abs().max().item()
            allowed = TOLERANCE[q.dtype] + LSE[1] * largest
            assert error <= allowed, f"row {row}: {error}"
            worst = max(worst, error)
        return worst


def queries(B: int, HQ: int, M: int, D: int, dtype=FP16, seed: int = 3, device="cpu") -> Tensor:
    return randn(B, HQ, M, D, dtype=dtype, seed=seed).to(device)


def new_tokens(B: int, H: int, M: int, D: int, dtype=FP16, device="cpu") -> tuple[Tensor, Tensor]:
    return queries(B, H, M, D, dtype, 5, device), queries(B, H, M, D, dtype, 6, device)


def hard_cases(dtype: torch.dtype, T: int, D: int, device: str):
    """(name, q, k, v) of the values that a kernel with less care gets wrong."""
    k, v = (randn(1, 2, T, D, seed=seed) for seed in (1, 2))
    q, turn = randn(1, 8, 1, D, seed=3), torch.arange(T).float()

    def made(name, q=q, k=k, v=v):
        return name, *(x.to(dtype).to(device) for x in (q, k, v))

    yield made("normal")
    for bias in (300, 900):
        biased = k.clone()
        biased[..., 3] += bias * turn.cos()
        biased[..., D // 2 + 1] -= bias * turn.sin()
        yield made(f"rotary bias {bias}", k=biased)
        yield made(f"bias {bias}", k=k + bias * (torch.arange(D) % 16 == 3))
    whole = k.clone()
    whole[..., 7] = 60_000 * randn(1, 2, T, seed=4).sign()
    small = q.clone()
    small[..., 7] *= 1e-4
    yield made("keys of +-60,000", small, whole)
    yield made("keys of +-60,000 that decide", q, whole)
    yield made("value range 2,000", v=2000 * v)
    yield made("value range 60,000", v=(20_000 * v).clamp(-60_000, 60_000))
    yield made("value scale 1e-3", v=1e-3 * v)
    yield made("values with an offset", v=v + 100)
    yield made("small keys, large queries", 100 * q, 1e-2 * k)
    yield made("no queries", 0 * q)
    for name, constant in (("values of 1", torch.ones_like(v)), ("constant values", v[..., :1].expand_as(v))):
        yield made(name, v=constant)
    peaked = k.clone()
    peaked[:, :, T // 3] = 3 * q[0, ::4, 0]
    yield made("one token decides", k=peaked)
    if dtype == BF16:
        yield made("values of 1e-35", v=1e-35 * v)  # scales below 2^-114, outputs that are normal numbers
        yield made("values of 1e30", v=1e30 * v)
