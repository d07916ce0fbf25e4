"""Every kernel once or twice on small ragged shapes, to run under a sanitizer on a GPU.

compute-sanitizer --tool memcheck python tests/sanitizing.py
compute-sanitizer --tool racecheck python tests/sanitizing.py
"""

import torch

from attending import Case, new_tokens, queries
from kivi_kv import KiviConfig, packed_matmul, quantize_k, quantize_v

DEVICE = {"device": "cuda"}
LENGTHS = [0, 4, 161, 700]
ATTEND = [
    # config, D, dtype, query heads per kv head, query tokens (0: one, stored already), options
    (KiviConfig(2, 2, 32), 128, torch.float16, 4, 0, {}),
    (KiviConfig(4, 2, 128, sink_length=32), 128, torch.bfloat16, 4, 0, {}),
    (KiviConfig(4, 4, 64, residual_length=7), 64, torch.float16, 7, 2, {}),
    (KiviConfig(2, 2, 32, sink_length=5), 128, torch.bfloat16, 4, 3, {}),
    (KiviConfig(2, 2, 32), 128, torch.float16, 4, 1, {"window": 200}),
    (KiviConfig(4, 2, 32), 20, torch.float16, 5, 40, {"softcap": 20.0}),
]


def main() -> None:
    for config, D, dtype, ratio, M, options in ATTEND:
        case = Case.random(config, len(LENGTHS), 3, max(LENGTHS), D, dtype, LENGTHS, **DEVICE)
        q = queries(len(LENGTHS), 3 * ratio, max(M, 1), D, dtype, **DEVICE)
        new = new_tokens(len(LENGTHS), 3, M, D, dtype, **DEVICE) if M else None
        gluon = D in (64, 128) and not options
        for backend in ("gluon", "triton") if gluon else ("triton",):
            case.check(q, new, backend=backend, **options)
        # packed by kernels, too
        Case.random(config, 2, 3, 700, D, dtype, [700, 300], backend="triton", **DEVICE).check(q[:2, :, :1])
    for bits in (2, 4):
        x = torch.randn(2, 3, 352, 80, dtype=torch.float16, device="cuda")
        for packed in (quantize_k(x, bits, 32), quantize_v(x, bits, 32)):
            a = torch.randn(2, 12, 2, packed.code.shape[2], dtype=torch.float16, device="cuda")
            out = packed_matmul(32, a, packed.code, packed.scale, packed.zero, bits)
            dense = packed.dequantize(torch.float64)
            dense = dense.mT if packed.axis == "tokens" else dense
            expected = a.double() @ dense.repeat_interleave(4, dim=1)
            assert (out.double() - expected).norm() <= 2e-3 * expected.norm()
    torch.cuda.synchronize()
    print("all values right")


if __name__ == "__main__":
    main()
