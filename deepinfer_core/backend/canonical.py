"""The arithmetic that makes sampling equal on every device: random words and integer exponentials, exact to the last bit.

`sample` and `verify` are defined on integers, so that equal log-probabilities and equal seeds give equal tokens on every backend. Two
functions carry this: Philox4x32-10 (counter-based, no state) and `integer_exp` (a library `exp` differs between devices in its last
bit, and one unit in one weight changes the whole draw). A backend with its own sampling kernels must reproduce both exactly;
`docs/sampling.md` restates them as formulas, `exp_table` is the table they need.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_MASK = 0xFFFFFFFF
_LOW, _HALF = np.uint64(_MASK), np.uint64(32)
_MULTIPLIERS = np.array(MULTIPLIERS, np.uint64)[:, None]  # [2, 1]
_WEYL_STEPS = np.arange(ROUNDS, dtype=np.uint64)[:, None, None] * np.array(WEYL, np.uint64)[:, None]  # [rounds, 2, 1]

WEIGHT_BITS = 31
ACCEPT_BITS = 33
EXP_FRACTION_BITS = 24
EXP_COARSE_BITS = 10
_FINE_BITS = EXP_FRACTION_BITS - EXP_COARSE_BITS
_LOWEST = -23.0  # exp(-23) * 2^33 < 1


def philox_words(seeds: Tensor, subsequences: Tensor) -> Tensor:
    """Words 0 and 1 of Philox4x32-10 as int64 [2, n], each in [0, 2^32).

    seeds int64 [n]: the 64 bits of the key (low word first); subsequences int64 [n]: words 2 and 3 of the counter, words 0 and 1 are 0.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    # A chain of small operations: on the host numpy dispatches it in a quarter of the time that torch needs.
    if seeds.device.type == "cpu":
        return torch.from_numpy(philox_words_numpy(seeds.numpy(), subsequences.numpy()))
    return philox_words_torch(seeds, subsequences)


def philox_words_torch(seeds: Tensor, subsequences: Tensor) -> Tensor:
    """`philox_words` in torch integer operations on any device.

    A multiplier m is applied as m - 2^32, which keeps every product inside int64: x*m = x*(m - 2^32) + x*2^32.
    """
    key0, key1 = seeds & _MASK, (seeds >> 32) & _MASK
    c0 = torch.zeros_like(subsequences)
    c1, c2, c3 = c0, subsequences & _MASK, (subsequences >> 32) & _MASK
    for step in range(ROUNDS):
        product0, product1 = c0 * (MULTIPLIERS[0] - 2**32), c2 * (MULTIPLIERS[1] - 2**32)
        round0, round1 = (key0 + step * WEYL[0]) & _MASK, (key1 + step * WEYL[1]) & _MASK
        c0, c2 = ((product1 >> 32) + c2) ^ c1 ^ round0, ((product0 >> 32) + c0) ^ c3 ^ round1
        c1, c3 = product1 & _MASK, product0 & _MASK
    return torch.stack((c0, c1))


def philox_words_numpy(seeds: np.ndarray, subsequences: np.ndarray) -> np.ndarray:
    """`philox_words` on numpy arrays of 64-bit integers (signed or unsigned); result int64 [2, n].

    Works on pairs: counter words 0 and 2 are multiplied together, words 1 and 3 are carried beside them.
    """
    key, counter = seeds.astype(np.uint64), subsequences.astype(np.uint64)
    keys = np.stack((key & _LOW, key >> _HALF))
    multiplied, carried = np.stack((np.zeros_like(counter), counter & _LOW)), np.stack((np.zeros_like(counter), counter >> _HALF))
    for round_keys in (keys + _WEYL_STEPS) & _LOW:
        product = multiplied * _MULTIPLIERS
        multiplied = (product >> _HALF)[::-1] ^ carried ^ round_keys
        carried = (product & _LOW)[::-1]
    return np.stack((multiplied[0], carried[0])).astype(np.int64)


def draw_below(words: Tensor, total: Tensor) -> Tensor:
    """`(word1 * 2^32 + word0) mod total` as int64; words int64 [2, n], total int64 [n] in [1, 2^32]."""
    if words.device.type == "cpu":
        low, high = words.numpy().astype(np.uint64)
        return torch.from_numpy(((high << _HALF | low) % total.numpy().astype(np.uint64)).astype(np.int64))
    return _draw_below_torch(words, total)


def _draw_below_torch(words: Tensor, total: Tensor) -> Tensor:
    remainder = words[1] % total
    for limb in (words[0] >> 16, words[0] & 0xFFFF):  # 16 bits at a time: no intermediate passes 2^48
        remainder = (remainder * 65536 + limb) % total
    return remainder


def integer_exp(log_values: Tensor, bits: int = WEIGHT_BITS) -> Tensor:
    """`floor(exp(min(log_value, 0)) * 2^bits)` as int64, computed in integers only; bits is 31 or 33. NaN gives 0.

    z = -log_value truncated to 2^-24, split in i = z >> 14 and f = z & (2^14 - 1); m * 2^-(31 + e) is exp(-i / 1024) with 31 significant
    bits (`exp_table`), b = 2^31 - f*2^7 + (f*f >> 18) is exp(-f * 2^-24) * 2^31; the result is (m * b) >> (62 + e - bits).
    Relative error of the value before the last shift: below 2^-23, nearly all of it from truncating z.
    """
    z = torch.nan_to_num(log_values, nan=_LOWEST).clamp_(_LOWEST, 0).mul_(-float(1 << EXP_FRACTION_BITS)).to(torch.int32)
    packed = exp_table(log_values.device).index_select(0, (z >> _FINE_BITS).flatten()).view(z.shape)
    fine = z.bitwise_and_((1 << _FINE_BITS) - 1)
    delta = (fine * fine).bitwise_right_shift_(18).sub_(fine.bitwise_left_shift_(7))
    shift = (packed & 63).add_(62 - bits)
    return packed.bitwise_right_shift_(6).mul_(delta.to(torch.int64).add_(1 << 31)).bitwise_right_shift_(shift)


@lru_cache(maxsize=8)
def exp_table(device: torch.device) -> Tensor:
    """int64 [23553]: `m * 64 + e` for exp(-i / 1024) = m * 2^-(31 + e), m in [2^30, 2^31] rounded to nearest; 0 below 2^-33.

    Computed in 128-bit integers, so that no math library has a say in it.
    """
    precision = 128
    term = step = 1 << precision
    for k in range(1, 40):  # exp(-1/1024) by its series
        term = -term // (k << EXP_COARSE_BITS)
        step += term
    value, table = 1 << precision, []
    for _ in range(int(-_LOWEST) * (1 << EXP_COARSE_BITS) + 1):
        exponent = max(precision - value.bit_length(), 0)
        shift = precision - 31 - exponent
        table.append(((value + (1 << (shift - 1))) >> shift) * 64 + exponent if exponent <= 32 else 0)
        value = value * step >> precision
    return torch.tensor(table, dtype=torch.int64, device=device)
