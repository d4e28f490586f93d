"""The measurements of benchmarks/decoding.py."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from deepinfer_core import LLM, SamplingParams

DRAFTS, PROMPT, OUTPUT = 5, 24, 330
WARM, STEPS = 20, 5  # steps before the first timed window of a batch, and steps of a window
LONG = 4000  # tokens of a long prompt
VARIANTS = {"plain": {}, "static": {"num_draft_tokens": DRAFTS}, "scheduled": {"num_draft_tokens": DRAFTS, "enable_varlen": True}}


def cpu_name() -> str:
    """The processor's name, where the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown processor")


def engine(checkpoint: str | None, **options: Any) -> LLM:
    """An engine as a user would configure it, on the CPU reference."""
    return LLM(model=checkpoint, **{"backend": "cpu_ref", "max_num_seqs": 64, "max_model_len": 512, **options})


def prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of ordinary ids."""
    return np.random.default_rng(seed).integers(3, vocab - 64, (count, length)).tolist()


class ControlledDrafts:
    """Lets the drafter run, then replaces its drafts by the known continuation with probability p at each position."""

    def __init__(self, llm: LLM, known: np.ndarray) -> None:
        self._inputs: Any = None
        self.known = torch.from_numpy(known)  # int64 [requests, positions]
        self.p, self.right = 1.0, torch.ones(known.shape, dtype=torch.bool)
        self.drafted = 0  # steps that drafted
        runner, drafter = llm.engine.runner, llm.parts.loaded.drafter
        assert drafter is not None
        self._draft, self._forward = runner._draft, drafter.forward
        runner._draft, drafter.forward = self._replace, self._watch  # type: ignore[method-assign]

    def set(self, p: float) -> None:
        """Chooses p."""
        self.p, self.right = p, torch.rand(self.known.shape, generator=torch.Generator().manual_seed(7)) < p

    def _watch(self, inputs: Any, length: int, caches: Any) -> Any:
        self._inputs = inputs
        return self._forward(inputs, length, caches)

    def _replace(self, handle: Any, host: Any, batch: Any, sampled: np.ndarray, stops: Any, outputs: Any) -> None:
        self._draft(handle, host, batch, sampled, stops, outputs)
        row = torch.tensor([int(handle.plan.requests[s].split("-")[-1]) for s in sampled])[:, None]
        chosen = torch.from_numpy(sampled)
        at = (self._inputs.position[:, None] + torch.arange(2, 2 + DRAFTS)).clamp_max(self.known.shape[1] - 1)
        outputs.drafts[chosen] = torch.where(self.right[row, at], self.known[row, at], (self.known[row, at] + 1) % 64 + 3)
        outputs.confidences[chosen] = self.p
        self.drafted += 1


class DraftingBench:
    """The variants side by side in one process."""

    def __init__(self, checkpoint: str | None, most: int) -> None:
        self.engines = {}
        for name, options in VARIANTS.items():
            self.engines[name] = engine(checkpoint, max_num_seqs=most, batch_size_interval=32, **options)
        plain = self.engines["plain"]
        self.prompts = prompts(most, PROMPT, plain.parts.limits.vocab_size)
        params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
        outputs = plain.generate(self.prompts, params, progress=False)
        known = np.array([prompt + output.token_ids for prompt, output in zip(self.prompts, outputs, strict=True)])
        self.controls = {name: ControlledDrafts(self.engines[name], known) for name in ("static", "scheduled")}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for llm in self.engines.values():
            llm.close()

    def measure(self, p: float, batch: int, rounds: int) -> dict[str, Any]:
        """Ratios of tokens/s at one p and batch."""
        for control in self.controls.values():
            control.set(p)
        for name, llm in self.engines.items():
            for i in range(batch):
                params = SamplingParams(temperature=0, max_tokens=OUTPUT - 12, ignore_eos=True)
                llm.submit(self.prompts[i], params, f"{p}-{batch}-{i}")
            self._window(name, WARM if name == "scheduled" else 3)
        before, drafted = self.engines["scheduled"].stats(), self.controls["scheduled"].drafted
        speeds: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for _ in range(rounds):
            for name in VARIANTS:
                speeds[name].append(self._window(name, STEPS))
        after = self.engines["scheduled"].stats()
        ratios = {name: statistics.median(a / b for a, b in zip(speeds[name], speeds["plain"], strict=True)) for name in VARIANTS}
        row = {"p": p, "requests": batch, "static": ratios["static"], "scheduled": ratios["scheduled"]}
        row["tokens_per_s"] = {name: statistics.median(values) for name, values in speeds.items()}
        verified = after["verified_tokens"] - before["verified_tokens"]
        row["rows_per_request"] = 1 + verified / (rounds * STEPS * batch)
        row["steps_that_draft"] = (self.controls["scheduled"].drafted - drafted) / (rounds * STEPS)
        for llm in self.engines.values():
            for i in range(batch):
                llm.abort(f"{p}-{batch}-{i}")
            while llm.engine.has_unfinished:
                llm.poll()
            llm.engine.settle()
        return row

    def _window(self, name: str, steps: int) -> float:
        """Tokens per second of `steps` steps. The device is idle before and after."""
        llm = self.engines[name]
        counted = llm.engine.scheduler.stats().output_tokens
        begin = time.perf_counter()
        for _ in range(steps):
            llm.poll()
        llm.parts.runtime.synchronize()  # else the step in flight would run beside the next variant's
        return (llm.engine.scheduler.stats().output_tokens - counted) / (time.perf_counter() - begin)


def idle_share(checkpoint: str | None, drafts: int, batch: int) -> dict[str, Any]:
    """Time between the end of one piece of device work and the start of the next, as a share of the run, in steady decoding."""
    with engine(checkpoint, max_num_seqs=batch, num_draft_tokens=drafts) as llm:
        for prompt in prompts(batch, PROMPT, llm.parts.limits.vocab_size):
            llm.submit(prompt, SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True))
        for _ in range(4):
            llm.poll()
        llm.record_timeline()
        for _ in range(22):
            llm.poll()
        llm.engine.settle()
        spans = sorted((span["ts"], span["ts"] + span["dur"]) for span in llm.engine.times.timeline or [] if span["tid"] == 2)[2:]
        total = spans[-1][1] - spans[0][0]
        gaps = sum(max(after[0] - before[1], 0) for before, after in itertools.pairwise(spans))
        return {
            "drafts": drafts,
            "requests": batch,
            "idle": gaps / total,
            "step_ms": total / 1e3 / (len(spans) / 2),
            "summary": llm.engine.times.summary(),
        }


def prefix_hit(checkpoint: str | None, snapshots: int, rounds: int) -> dict[str, Any]:
    """Time to first token of a prompt whose first `LONG` tokens were seen before, and of one that was never seen."""
    options = {"prefix_caching": True, "window_snapshots": snapshots, "max_model_len": 4096, "max_num_seqs": 4}
    with engine(checkpoint, **options) as llm:
        vocab = llm.parts.limits.vocab_size
        shared, suffix = prompts(1, LONG, vocab, 1)[0], LONG // 100
        first_token(llm, shared)
        hits, colds, cached = [], [], 0
        for i in range(rounds):
            seconds, output = first_token(llm, shared + prompts(1, suffix, vocab, 100 + i)[0])
            hits.append(seconds)
            cached = output.samples[0].cached_tokens
            colds.append(first_token(llm, prompts(1, LONG + suffix, vocab, 200 + i)[0])[0])
    ratio = statistics.median(hit / cold for hit, cold in zip(hits, colds, strict=True))
    result = {"snapshots": snapshots, "prompt": LONG + suffix, "cached_tokens": cached}
    return result | {"hit_s": statistics.median(hits), "cold_s": statistics.median(colds), "ratio": ratio}


def first_token(llm: LLM, prompt: list[int], **fields: Any) -> tuple[float, Any]:
    """Seconds from arrival to the first token, and the output."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, **fields})
    (output,) = llm.generate([prompt], params, progress=False)
    return output.timing.first_token, output


def decoder_replay(checkpoint: str | None, rounds: int) -> dict[str, Any]:
    """Prefill time of `LONG` tokens of text, and bits per byte of the text that follows, with decoder-side replay and without."""
    with engine(checkpoint, max_model_len=4096, max_num_seqs=2) as off:
        window = off.parts.limits.window
        keep = window + max(window // 10, 4)
        with engine(checkpoint, max_model_len=4096, max_num_seqs=2, prefill_truncation_mode="compact", prefill_keep_tokens=keep) as compact:
            texts = text_ids(off, LONG + 64, rounds)
            seconds: dict[str, list[float]] = {"off": [], "compact": []}
            bits: dict[str, list[float]] = {"off": [], "compact": []}
            for ids in texts:
                for name, llm in (("off", off), ("compact", compact)):
                    forced = tuple(ids[LONG:])
                    spent, output = first_token(llm, ids[:LONG], max_tokens=len(forced), golden_token_ids=forced)
                    seconds[name].append(spent)
                    size = len(llm.tokenizer.decode(list(forced)).encode())
                    bits[name].append(-sum(item.logprob for item in output.logprobs) / math.log(2) / max(size, 1))
    ratio = statistics.median(a / b for a, b in zip(seconds["compact"], seconds["off"], strict=True))
    means = {f"bits_{name}": statistics.mean(values) for name, values in bits.items()}
    medians = {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
    return {"prompt": LONG, "keep": keep, "ratio": ratio, "bits_change": means["bits_compact"] - means["bits_off"], **means, **medians}


def text_ids(llm: LLM, length: int, count: int) -> list[list[int]]:
    """`count` pieces of `length` tokens of the project's own documentation and source, repeated if it is too short."""
    root = Path(__file__).parent.parent
    text = "\n".join(
        path.read_text(encoding="utf-8") for path in sorted(root.glob("docs/*.md")) + sorted(root.glob("deepinfer_core/**/*.py"))
    )
    ids = llm.tokenizer.encode(text[: 8 * length * count])
    while len(ids) < length * count:
        ids = ids + ids
    return [list(ids[i * length : (i + 1) * length]) for i in range(count)]
