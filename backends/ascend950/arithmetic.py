"""A few numbers run through the quantisation operator, to learn whether its kernel knows this model's rules.

torch_npu picks an older kernel without a word where the newer one is missing; that one ignores the floor and truncates exponents.
"""

from __future__ import annotations

import torch

_FLOOR_EXPONENT = 127 - 22  # block maxima below 1e-4 count as 1e-4, and ceil(log2(1e-4 / 448)) = -22


def wrong_rules(device: str) -> list[str]:
    """A sentence for each quantisation rule that the operator on `device` gets wrong. Runs a handful of values."""
    from deepinfer_backends.ascend950.kernels import calls

    rows = torch.tensor([[300.0], [1e-7], [5.0]]).expand(3, 64).contiguous().to(torch.bfloat16)
    advice = "the kernel is older than CANN 9.2's: update CANN and its operator package"
    problems = []
    try:
        _, fp8 = calls.quantize_fp8(rows.to(device))
        packed, fp4 = calls.quantize_fp4(rows[2:].to(device) * torch.tensor([1.0, 0.1]).repeat(32).to(device).bfloat16())
    except RuntimeError as error:
        return [f"npu_dynamic_mx_quant refuses this model's arguments ({str(error).splitlines()[0]}): {advice}"]
    up, floored = int(fp8[0, 0, 0]), int(fp8[1, 0, 0])
    scale, pair = int(fp4[0, 0, 0]), int(packed[0, 0])
    if up != 127:  # ceil(log2(300 / 448)) = 0; the rule that truncates and saturates gives 2^8 / 2^8
        problems.append(f"fp8 scale of a block with maximum 300 is 2^{up - 127}, expected 2^0: {advice}")
    if floored != _FLOOR_EXPONENT:
        problems.append(f"fp8 scale of a block with maximum 1e-7 is 2^{floored - 127}, expected 2^-22: max_low_bound is ignored; {advice}")
    if scale != 127:
        problems.append(f"fp4 scale of a block with maximum 5 is 2^{scale - 127}, expected 2^0: scale_alg 2 is not honoured; {advice}")
    elif pair != 0x16:  # 5 rounds to 4 (code 6), 0.5 is code 1
        problems.append(f"fp4 values 5 and 0.5 are packed as {pair:#04x}, expected 0x16 (even value in the low nibble): report this device")
    return problems
