"""Temperatures of the confidence head, fitted from verified drafts (sequential temperature scaling).

The planner uses the product of the confidences of drafts 0 .. j as the probability that all of them are accepted. Temperatures are fitted
from the first position on: T_j minimises the calibration error of that product with T_0 .. T_(j-1) fixed. A positive temperature keeps the
order of the confidences at its position.

Source: calibration of DSpark's confidence head (model notes, runtime section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from deepinfer_core.config import ResolvedConfig
from deepinfer_core.engine.drafting import DraftRecords
from deepinfer_core.errors import ConfigError
from deepinfer_core.sampling import SamplingParams

BINS = 10  # of equal width, over predicted probability
LIMIT = 60.0  # the head clamps its logits so
SPAN = (0.02, 50.0)  # temperatures that are tried
LEAST = 50  # verified drafts that a position needs; with fewer its temperature stays


@dataclass(frozen=True)
class Calibration:
    """Result of a fit; one entry for each draft position."""

    temperatures: tuple[float, ...]
    counts: tuple[int, ...]  # verified drafts it was fitted on
    before: tuple[float, ...]  # calibration error of the product up to the position, with the temperatures of the run
    after: tuple[float, ...]


def calibration_error(predicted: np.ndarray, happened: np.ndarray) -> float:
    """Mean over all cases of |mean prediction - frequency| of their bin; predicted [n] in [0, 1], happened bool [n]."""
    bins = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    difference = np.bincount(bins, predicted - happened, BINS)
    return float(np.abs(difference).sum() / max(len(predicted), 1))


def fit_temperatures(records: DraftRecords, used: tuple[float, ...]) -> Calibration:
    """Fits one temperature per position. `used`: those of the run, by which its confidences are already scaled."""
    drafts = records.confidences.shape[1]
    used = used * drafts if len(used) == 1 else used
    known = ~np.isnan(records.confidences)
    confidences = np.where(known, records.confidences, 0.5).astype(np.float64)
    plain = product = np.ones(len(records.verified))
    fitted, counts, before, after = [], [], [], []
    for j in range(drafts):
        rows = np.flatnonzero(known[:, : j + 1].all(axis=1) & (records.verified > j))
        position = _Position(product, used[j] * _logit(confidences[:, j]), rows, records.accepted > j)
        plain = plain * confidences[:, j]
        best = position.fit() if len(rows) >= LEAST else used[j]
        fitted.append(best)
        counts.append(len(rows))
        before.append(calibration_error(plain[rows], position.happened[rows]))
        after.append(position.error(best))
        product = position.product(best)
    return Calibration(tuple(fitted), tuple(counts), tuple(before), tuple(after))


def calibrate(config: ResolvedConfig, prompts: list[str] | tuple[int, int], max_tokens: int, temperature: float) -> Iterator[str]:
    """Runs prompts (texts, or count and length of random ones), fits, and yields the lines of the report.

    Raises ConfigError if nothing would be drafted or there is no prompt.
    """
    from deepinfer_core.engine.llm import LLM

    section = config.config.speculative
    if not section.num_draft_tokens:
        raise ConfigError(["speculative.num_draft_tokens = 0: nothing is drafted; --set speculative.num_draft_tokens=5"])
    if not prompts:
        raise ConfigError(["no prompts to run: the file has no line with text"])
    with LLM(config=config) as llm:
        chosen = prompts if isinstance(prompts, list) else _random_prompts(prompts, llm.parts.limits.vocab_size, config.config.model.seed)
        llm.engine.drafting.record()
        llm.generate(chosen, SamplingParams(max_tokens=max_tokens, temperature=temperature))
        llm.engine.settle()
        records = llm.engine.drafting.records()
    fit = fit_temperatures(records, section.confidence_temperatures)
    yield f"{len(records.verified)} blocks of {section.num_draft_tokens} drafts from {len(chosen)} prompts"
    yield "calibration error of the probability that all drafts up to a position are accepted:"
    for j, (t, count, before, after) in enumerate(zip(fit.temperatures, fit.counts, fit.before, fit.after, strict=True)):
        kept = "" if count >= LEAST else f"  (kept: {count} of the {LEAST} drafts a fit needs)"
        yield f"  position {j}: {before:.4f} before, {after:.4f} after, temperature {t}{kept}"
    values = [str(t) for t in fit.temperatures]
    yield f"speculative.confidence_temperatures: [{', '.join(values)}]"
    yield f"DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE={','.join(values)}"


def _random_prompts(shape: tuple[int, int], vocab: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, vocab, shape).tolist()


@dataclass(frozen=True)
class _Position:
    """One draft position: what is fixed while its temperature is fitted."""

    before: np.ndarray  # float64 [n] product of the calibrated confidences before it
    logits: np.ndarray  # float64 [n] of its own confidence, unscaled
    rows: np.ndarray  # int64: blocks in which it was verified
    happened: np.ndarray  # bool [n]: all drafts up to it were accepted

    def product(self, temperature: float) -> np.ndarray:
        return self.before / (1 + np.exp(-np.clip(self.logits / temperature, -LIMIT, LIMIT)))

    def error(self, temperature: float) -> float:
        return calibration_error(self.product(temperature)[self.rows], self.happened[self.rows])

    def fit(self) -> float:
        """The temperature of the smallest error, nearest to 1 among equals: over a grid in the logarithm, then over a finer one."""
        low, high = np.log(SPAN)
        for points in (81, 41):
            grid = np.linspace(low, high, points)
            errors = np.array([self.error(t) for t in np.exp(grid)])
            best = min(np.flatnonzero(errors == errors.min()).tolist(), key=lambda i: abs(float(grid[i])))
            low, high = grid[max(best - 1, 0)], grid[min(best + 1, points - 1)]
        return round(float(np.exp(grid[best])), 4)


def _logit(probability: np.ndarray) -> np.ndarray:
    clipped = np.clip(probability, 1e-7, 1 - 1e-7)
    return np.log(clipped) - np.log1p(-clipped)
