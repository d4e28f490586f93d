"""Engram: gather of stored fp8 rows, which are a quantised activation already."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_backends.ascend950.kernels.calls import Mx
from deepinfer_backends.ascend950.kernels.linears import LinearOps
from deepinfer_backends.ascend950.layout import paired_scales
from deepinfer_core.backend.types import Activation, QuantTensor, Weight


class EngramOps(LinearOps):
    """Ops of the contract's group "Engram". Hash and gate are inherited: int64 and float32 arithmetic of plain operators."""

    def prepare_engram_table(self, table: QuantTensor) -> Weight:
        assert table.scale is not None
        # Bytes: CANN's gather takes int8, not fp8.
        return table.weight.to(self.device).view(torch.int8), table.scale.to(self.device).view(torch.int8)

    def engram_gather(self, table: Weight, rows: Tensor) -> Activation:
        values, scales = table
        index = rows.clamp_min(0)
        data = torch.where((rows >= 0)[..., None], values[index], 0)
        return Mx(data.flatten(1).view(torch.float8_e4m3fn), paired_scales(scales[index].flatten(1)))
