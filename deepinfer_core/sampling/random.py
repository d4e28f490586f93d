"""Seeds and sampling positions: which random numbers belong to which token.

A random number is a pure function of (seed, sampling position, case), see `deepinfer_core.backend.canonical`. So the same request draws
the same tokens whatever shares its batch, and a preempted request goes on as if nothing had happened.
"""

from __future__ import annotations

import hashlib

import numpy as np

from deepinfer_core.backend.canonical import philox_words_numpy

SEED_MASK = (1 << 64) - 1
DRAFT_SEED_OFFSET = 1000000007
"""Added to a request's seed for the drafter's draws (DeepInfer 0.1.0, "mtp" stream), so that drafts and target share no numbers."""
ROW_STRIDE = 10000019
"""Distance of the sampling positions of a request's consecutive verify rows (DeepInfer 0.1.0)."""
CASES = 3
FRESH, RESIDUAL, ACCEPT = range(CASES)


def request_seed(engine_seed: int, request_id: str, sample: int = 0, seq_seed: int | None = None) -> int:
    """The 64-bit seed of sample number `sample` (0 .. n-1) of a request.

    An explicit `seq_seed` is used as given by sample 0; every other seed is derived, so that two requests, or two samples of one
    request, never draw the same numbers by accident, and a rerun with the same engine seed and ids draws the same ones.
    """
    if seq_seed is not None and sample == 0:
        return seq_seed & SEED_MASK
    origin = f"engine:{engine_seed & SEED_MASK}:{request_id}" if seq_seed is None else f"request:{seq_seed & SEED_MASK}"
    digest = hashlib.blake2b(f"{origin}:{sample}".encode(), digest_size=8, person=b"deepinfer-seed").digest()
    return int.from_bytes(digest, "little")


def signed(seed: int) -> int:
    """The seed's 64 bits as the signed number that an int64 tensor holds."""
    seed &= SEED_MASK
    return seed - (1 << 64) if seed >> 63 else seed


def draft_seed(seed: int) -> int:
    """Seed of the drafter's draws of a request whose target draws use `seed`."""
    return (seed + DRAFT_SEED_OFFSET) & SEED_MASK


def random_words(seed: int, position: int, case: int) -> tuple[int, int]:
    """Words 0 and 1 of one draw, on the host (tools and tests; kernels compute their own)."""
    words = philox_words_numpy(np.array([seed & SEED_MASK], np.uint64), np.array([position * CASES + case], np.uint64))
    return int(words[0, 0]), int(words[1, 0])


def uniform(word: int) -> float:
    """The float32 in (0, 1] that stands for a random word: word * 2^-32 + 2^-33."""
    return float(np.float32(word) * np.float32(2.0**-32) + np.float32(2.0**-33))
