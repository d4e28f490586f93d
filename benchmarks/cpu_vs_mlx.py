"""Decode and prefill on the CPU against mlx-vlm, which runs the same checkpoints.

    python benchmarks/cpu_vs_mlx.py MODEL_DIR --peer-python PEER/bin/python [--backends cpu_ref cpu_simd] [--json result.json]

The peer lives in an environment of its own: python -m venv PEER && PEER/bin/pip install "mlx[cpu]" mlx-vlm. Without it only this engine
is measured. Both engines get the same token ids and take turns, round by round, so that whatever else the machine does hits both. The
peer works on a copy of the checkpoint, because its loader rewrites shard headers in place.

Two figures for each: wall time (the least of all rounds), and CPU time (all threads of the process), which a busy machine disturbs less.
Ratios are ours / peer in tokens per second: above 1 we are faster. `batch 1` is a ratio to the peer's own decode at batch 1, since a
total at batch 64 can be meant either way.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from deepinfer_core import LLM, SamplingParams

INSTALL = 'python -m venv PEER && PEER/bin/pip install "mlx[cpu]" mlx-vlm, then --peer-python PEER/bin/python'
PROMPT = 16  # tokens before decoding starts


class Engine(Protocol):
    """What is measured. Each call returns {"wall": seconds, "cpu": seconds}."""

    def call(self, name: str, **arguments: Any) -> dict[str, float]: ...


class Ours:
    """This engine through its public front, on one backend."""

    def __init__(self, model: Path, backend: str, batch: int, tokens: int) -> None:
        self.llm = LLM(model=model, backend=backend, max_num_seqs=batch, max_model_len=tokens, prefix_caching=False)
        self.running: list[str] = []

    def call(self, name: str, **arguments: Any) -> dict[str, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        getattr(self, name)(**arguments)
        self.llm.engine.parts.runtime.synchronize()  # the step that is scheduled ahead belongs to this turn, not to the next engine's
        return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}

    def start(self, prompts: list[list[int]]) -> None:
        """Prefills a batch and ends what ran before."""
        for request in self.running:
            self.llm.abort(request)
        room = self.llm.parts.limits.max_model_len - PROMPT
        params = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True)
        self.running = [self.llm.submit(prompt, params) for prompt in prompts]
        self.decode(2)

    def decode(self, steps: int) -> None:
        """`steps` tokens for each running request."""
        wanted = steps * len(self.running)
        while wanted > 0:
            wanted -= sum(len(delta.token_ids) for delta in self.llm.engine.step().deltas if delta.request_id in self.running)

    def prefill(self, prompt: list[int]) -> None:
        """The first token after one prompt."""
        self.llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), progress=False)


class MlxPeer:
    """mlx-vlm in a process of another Python."""

    def __init__(self, python: str, model: Path) -> None:
        worker = Path(__file__).with_name("mlx_peer.py")
        self.process = subprocess.Popen([python, str(worker), str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions = self._answer()

    def call(self, name: str, **arguments: Any) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"call": name, "arguments": arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer ended with status {self.process.wait()}; its messages are above")
        return json.loads(line)

    def close(self) -> None:
        """Lets the peer end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def peer_problem(python: str | None) -> str | None:
    """Why the peer cannot run; None if it can."""
    if python is None:
        return f"no peer: --peer-python was not given. To compare with mlx-vlm: {INSTALL}"
    try:
        found = subprocess.run([python, "-c", "import mlx.core, mlx_vlm"], capture_output=True, text=True)
    except OSError as error:
        return f"no peer: {python} does not run ({error.strerror}). To compare with mlx-vlm: {INSTALL}"
    if found.returncode:
        reason = (found.stderr.strip().splitlines() or ["no message"])[-1]
        return f"no peer: {python} cannot import mlx and mlx_vlm ({reason}). To compare with mlx-vlm: {INSTALL}"
    return None


@dataclass
class Case:
    """One line of the table."""

    name: str
    tokens: int  # of one round
    rounds: dict[str, list[dict[str, float]]]  # engine -> rounds

    def rate(self, engine: str, clock: str) -> float | None:
        """Tokens per second of the best round."""
        rounds = self.rounds.get(engine)
        return self.tokens / min(r[clock] for r in rounds) if rounds else None


def measure(engines: dict[str, Engine], options: argparse.Namespace) -> list[Case]:
    """All cases; within a round the engines take turns."""
    rng = np.random.default_rng(0)
    cases = []
    for batch in options.batches:
        prompts = rng.integers(10, options.vocabulary, (batch, PROMPT)).tolist()
        for engine in engines.values():
            engine.call("start", prompts=prompts)
            engine.call("decode", steps=2)
        case = Case(f"decode, batch {batch}", batch * options.steps, {name: [] for name in engines})
        for _ in range(options.rounds):
            for name, engine in engines.items():
                case.rounds[name].append(engine.call("decode", steps=options.steps))
        cases.append(case)
    for engine in engines.values():
        engine.call("start", prompts=[])
    case = Case(f"prefill, {options.prompt} tokens", options.prompt, {name: [] for name in engines})
    for _ in range(options.rounds):
        prompt = rng.integers(10, options.vocabulary, options.prompt).tolist()
        for name, engine in engines.items():
            case.rounds[name].append(engine.call("prefill", prompt=prompt))
    return [*cases, case]


def rows(cases: list[Case], backends: list[str]) -> list[dict[str, Any]]:
    """The table: rates in tokens per second, and ratios, case by case and backend by backend."""
    alone = {clock: cases[0].rate("mlx-vlm", clock) for clock in ("wall", "cpu")}
    table = []
    for case, backend in itertools.product(cases, backends):
        row: dict[str, Any] = {"case": case.name, "backend": backend}
        for clock in ("wall", "cpu"):
            ours, peer = case.rate(backend, clock), case.rate("mlx-vlm", clock)
            assert ours is not None
            row |= {f"ours_{clock}": ours, f"peer_{clock}": peer, f"ratio_{clock}": ours / peer if peer else None}
            to_one = alone[clock]
            row[f"ratio_{clock}_to_batch_1"] = ours / to_one if to_one and case.name.startswith("decode") else None
        table.append(row)
    return table


def show(table: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    names = ("case", "backend", "ours_wall", "peer_wall", "ratio_wall", "ratio_wall_to_batch_1", "ours_cpu", "peer_cpu", "ratio_cpu")
    titles = ("case", "backend", "ours tok/s", "mlx-vlm tok/s", "ratio", "to its batch 1", "ours tok/CPU s", "mlx-vlm tok/CPU s", "ratio")

    def cell(value: Any) -> str:
        return value if isinstance(value, str) else "-" if value is None else f"{value:.1f}"

    lines = [titles, tuple("---" for _ in titles), *(tuple(cell(row[name]) for name in names) for row in table)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    info = Path("/proc/cpuinfo")
    models = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    )
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="a checkpoint folder")
    parser.add_argument("--peer-python", help=f"a Python with mlx-vlm: {INSTALL}")
    parser.add_argument("--backends", nargs="+", default=["cpu_ref"], help="backends of this engine (default: cpu_ref)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=8, help="decode steps of a round (default: 8)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of each case (default: 4)")
    parser.add_argument("--prompt", type=int, default=400, help="tokens of the prefilled prompt (default: 400)")
    parser.add_argument("--threads", type=int, help="threads of this engine (default: torch's choice)")
    parser.add_argument("--json", type=Path, help="also write all rounds here")
    return parser.parse_args()


def main() -> None:
    """Measures and prints."""
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    text = json.loads((options.model / "config.json").read_text())["text_config"]
    options.vocabulary = text["vocab_size"] - 64  # the last ids are special
    before, versions = machine(), {}
    with ExitStack() as stack:
        tokens = max(PROMPT + options.steps * (options.rounds + 2) + 8, options.prompt + 8)
        engines: dict[str, Engine] = {}
        for backend in options.backends:
            ours = Ours(options.model, backend, max(options.batches), tokens)
            stack.callback(ours.llm.close)
            engines[backend] = ours
        if (problem := peer_problem(options.peer_python)) is not None:
            print(problem, file=sys.stderr)
        else:
            copy = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
            shutil.copytree(options.model, copy)
            peer = MlxPeer(options.peer_python, copy)
            stack.callback(peer.close)
            engines["mlx-vlm"], versions = peer, peer.versions
        cases = measure(engines, options)
    table = rows(cases, options.backends)
    print(show(table))
    if options.json:
        rounds = {case.name: {"tokens": case.tokens, **case.rounds} for case in cases}
        result = {"machine": before, "load_average_after": os.getloadavg(), "peer": versions, "table": table, "rounds": rounds}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
