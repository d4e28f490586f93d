"""The number-theoretic constants of the Engram hash: multipliers, table primes, offsets.

Source: DeepSeek reference inference code, Engram module (model notes, sections 7.2 and 7.3).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from deepinfer_core.checkpoint.schema import TextConfig

SEED_STRIDE = 10007  # seed of a layer's multipliers is SEED_STRIDE * layer id


def table_primes(text: TextConfig) -> list[np.ndarray]:
    """Sizes of the sub-tables of each Engram layer: int64 [C], n-gram size major, head minor, C = (max n-gram size - 1) * heads.

    Every (layer, size) starts again just above `engram_vocab_size - 1`; no prime is used twice in the model.
    """
    used: set[int] = set()
    tables = []
    for _ in text.engram_layer_ids:
        row = []
        for _ in range(text.engram_max_ngram_size - 1):
            fresh = (prime for prime in primes_above(text.engram_vocab_size - 1) if prime not in used)
            row += [next(fresh) for _ in range(text.engram_n_heads)]
            used.update(row)
        tables.append(np.array(row, dtype=np.int64))
    return tables


def primes_above(number: int) -> Iterator[int]:
    """All primes greater than `number`, ascending."""
    return (candidate for candidate in count(max(number + 1, 2)) if _is_prime(candidate))


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    return number % 2 != 0 and all(number % divisor for divisor in range(3, int(number**0.5) + 1, 2))


def table_offsets(primes: np.ndarray) -> np.ndarray:
    """First row of each sub-table: exclusive running sum of `primes` int64 [C]."""
    return np.cumsum(primes) - primes


def multipliers(layer_id: int, vocab: int, count: int) -> np.ndarray:
    """`count` odd int64 multipliers of one layer; products with token numbers below `vocab` stay under 2**63."""
    bound = max(1, (2**63 - 1) // vocab // 2)
    return np.random.default_rng(SEED_STRIDE * layer_id).integers(0, bound, size=count, dtype=np.int64) * 2 + 1
