"""CPU stand-ins for the CANN operators that this backend calls, so that the unchanged backend code runs without an NPU.

Written from the operators' documentation, never from the backend; arguments are checked as strictly as documented, undefined results
are poisoned, and what the documentation leaves open (ties, order) is varied by a seed. Off unless asked for: `backend.emulated()`.
"""

from __future__ import annotations

from collections.abc import Callable

from deepinfer_backends.ascend950.emulation import attention, dense, mx, routing
from deepinfer_backends.ascend950.emulation.support import OperatorError, seed

__all__ = ["OPERATORS", "OperatorError", "install", "seed"]

OPERATORS: dict[str, Callable[..., object]] = {
    "npu_anti_mx_quant": mx.anti_mx_quant,
    "npu_clipped_swiglu": dense.clipped_swiglu,
    "npu_dynamic_mx_quant": mx.dynamic_mx_quant,
    "npu_grouped_matmul": mx.grouped_matmul,
    "npu_lightning_indexer": attention.lightning_indexer,
    "npu_mhc_post": dense.mhc_post,
    "npu_mhc_pre": dense.mhc_pre,
    "npu_mhc_sinkhorn": dense.mhc_sinkhorn,
    "npu_moe_init_routing_v2": routing.moe_init_routing_v2,
    "npu_quant_matmul": mx.quant_matmul,
    "npu_rms_norm": dense.rms_norm,
    "npu_rotary_mul": dense.rotary_mul,
    "npu_scatter_nd_update_": dense.scatter_nd_update_,
    "npu_sparse_flash_attention": attention.sparse_flash_attention,
    "npu_transpose_batchmatmul": dense.transpose_batchmatmul,
}
"""Every emulated operator by name. An operator that is not here refuses CPU tensors, so a forgotten one shows itself."""

_libraries: list[object] = []


def install() -> None:
    """Registers the operators for CPU tensors. torch_npu must be imported. Idempotent."""
    if _libraries:
        return
    import torch

    library = torch.library.Library("npu", "IMPL")
    for name, function in OPERATORS.items():
        library.impl(name, function, "CPU")
    _libraries.append(library)
