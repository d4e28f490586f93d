"""What the attention kernels for Hopper share. They are written in Gluon, Triton with explicit layouts and waits: `tl.dot` neither lets
other work run beside a product nor feeds both products of attention from one buffer.

The plain kernels (`attention`, `prefill`) serve other sizes, other architectures and Triton's interpreter, which does not know Gluon.
A program is two warpgroups; heads are the 64 rows of every product. Of the scores each warpgroup has half the keys of a tile, of the
output half the columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from deepinfer_backends.cuda_sm100.launch import INTERPRETED

LOG2_E = 1.4426950408889634
HEADS, TILE_KEYS = 64, 64
_DIM, _TURNING = 512, 64

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))  # [64 heads, 64 keys]
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))  # [64 heads, 512 columns]
OF_SCORES = gl.constexpr(gl.SliceLayout(1, SCORES.value))  # one number for each head, beside scores
OF_VALUES = gl.constexpr(gl.SliceLayout(1, VALUES.value))  # the same, beside values
OF_KEYS = gl.constexpr(gl.SliceLayout(0, SCORES.value))
OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))  # shared memory that wgmma reads
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
TURNED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # [64 heads, 64 columns] that rotate


def serves(arch: int, heads: int, dim: int, rope_dim: int, scale: float) -> bool:
    """Whether the kernels for Hopper handle these sizes. They take a maximum before they scale: hence scale > 0."""
    return arch == 90 and not INTERPRETED and heads <= HEADS and dim == _DIM and rope_dim == _TURNING and scale > 0


@gluon.jit
def turned_pairs(x, angles, SIGN: gl.constexpr, N: gl.constexpr):
    """bfloat16 [64, 2 * N]: float32 x, its pairs rotated by the last N of 64 angles (SIGN -1: back), rounded once.

    angles: 64 cosines, then 64 sines, in shared memory.
    """
    even, odd = gl.split(gl.reshape(x, (64, N, 2)))
    PAIR: gl.constexpr = gl.SliceLayout(0, even.type.layout)
    cos = angles.slice(64 - N, N).load(PAIR)[None, :]
    sin = angles.slice(128 - N, N).load(PAIR)[None, :] * SIGN
    both = gl.join((even * cos - odd * sin).to(gl.bfloat16), (even * sin + odd * cos).to(gl.bfloat16))
    return gl.reshape(both, (64, 2 * N))


@gluon.jit
def turn(part, angles, SIGN: gl.constexpr):
    """Rotates the pairs of bfloat16 [64, 64] in shared memory, an operand of wgmma. All threads see the result."""
    turned = turned_pairs(part.load(TURNED).to(gl.float32), angles, SIGN, 32)
    gl.thread_barrier()
    part.store(turned)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def fetch_angles(angles, table, position):
    """Starts the copy of a row's 32 cosines and 32 sines to the second halves of `angles`."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    at = table + position * 64 + gl.arange(0, 32, layout=LINE)
    async_copy.async_copy_global_to_shared(angles.slice(32, 32), at)
    async_copy.async_copy_global_to_shared(angles.slice(96, 32), at + 32)


@gluon.jit
def fetch_query(q, query, HEADS: gl.constexpr):
    """Starts the copy of a query [HEADS, 512]; heads from HEADS on are zero."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    d = gl.arange(0, 512, layout=gl.SliceLayout(0, ROWS))
    at = query + (head * 512)[:, None] + d[None, :]
    if HEADS < 64:
        async_copy.async_copy_global_to_shared(q, at, mask=(head < HEADS)[:, None])
    else:
        async_copy.async_copy_global_to_shared(q, at)
