"""Host cost of planning and committing one step, without a model.

    python benchmarks/host_cost.py [--steps 300] [--json]

Every request decodes; the device's answer is prepared beforehand, so only `plan` and `commit` are timed. Prints the median in
milliseconds per step for each number of running requests. Bar: at most 0.5 ms at 256 requests, growing no faster than linearly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from deepinfer_core.cache import PagePool, SlotPool, state_slots
from deepinfer_core.engine.limits import SchedulerLimits
from deepinfer_core.engine.plan import StepPlan, StepResult
from deepinfer_core.engine.request import RequestSpec
from deepinfer_core.engine.scheduler import Scheduler
from deepinfer_core.engine.verification import ProfiledCost

PROMPT, LIMIT_MS, AT = 100, 0.5, 256


def answer(plan: StepPlan, drafts: int, rng: np.random.Generator) -> StepResult:
    """Random tokens; on average half of the drafts are accepted."""
    size = plan.num_sequences
    counts = 1 + rng.integers(0, plan.num_drafts + 1)
    tokens = rng.integers(2, 100, (size, 1 + drafts)).astype(np.int32)
    new = rng.integers(2, 100, (size, drafts)).astype(np.int32) if drafts else None
    return StepResult(tokens, counts, new, rng.random((size, drafts), np.float32) if drafts else None)


def measure(requests: int, drafts: int, asynchronous: bool, varlen: bool, steps: int) -> float:
    """Median milliseconds of plan + commit."""
    limits = SchedulerLimits(
        max_model_len=PROMPT + 2 + (steps + 60) * (1 + drafts),
        max_num_batched_tokens=max(8192, requests * (1 + drafts)),
        max_num_seqs=requests,
        vocab_size=129280,
        num_draft_tokens=drafts,
        asynchronous=asynchronous,
        varlen_verification=varlen,
        prefix_cache=True,
    )
    cost = ProfiledCost({8 * i: 10 + 0.05 * i for i in range(1, requests * (1 + drafts) // 8 + 2)}) if varlen else None
    pages = requests * -(-limits.max_positions // limits.page_tokens) * 10 // 8 + 2
    scheduler = Scheduler(limits, PagePool(pages), SlotPool(state_slots(requests)), cost=cost)
    rng = np.random.default_rng(0)
    for i in range(requests):
        scheduler.add(RequestSpec(f"r{i}", rng.integers(2, 129280, PROMPT), limits.max_model_len, stop_ids=frozenset({1})))
    queue: list[tuple[StepPlan, StepResult]] = []
    times = []
    for step in range(steps + 50):
        begin = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        assert plan is not None
        queue.append((plan, answer(plan, drafts, rng)))
        spent = planned - begin
        if len(queue) > int(asynchronous):
            oldest = queue.pop(0)
            begin = time.perf_counter()
            scheduler.commit(*oldest)
            spent += time.perf_counter() - begin
        if step >= 50:
            assert plan.num_sequences == requests
            assert not plan.is_prefill.any()
            times.append(1e3 * spent)
    return statistics.median(times)


def main() -> None:
    """Prints the table, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for drafts, asynchronous, varlen in ((0, False, False), (0, True, False), (5, False, False), (5, True, False), (5, True, True)):
        cells = {n: measure(n, drafts, asynchronous, varlen, options.steps) for n in (1, 64, 128, 256, 512)}
        name = f"drafts={drafts} async={int(asynchronous)} varlen={int(varlen)}"
        if options.json:
            print(json.dumps({"case": name, "ms": cells}))
        else:
            verdict = "ok" if cells[AT] <= LIMIT_MS else f"above {LIMIT_MS} ms"
            print(f"{name}:  " + "  ".join(f"{n}: {ms:.3f} ms" for n, ms in cells.items()) + f"  ({AT}: {verdict})")


if __name__ == "__main__":
    main()
