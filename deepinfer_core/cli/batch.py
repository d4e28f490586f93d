"""Run a file of requests and append each result as it finishes."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from deepinfer_core.cli._options import BackendName, ConfigFile, Model, Settings, resolve_from_options
from deepinfer_core.engine.batch_file import BatchProgress, BatchRun, open_batch
from deepinfer_core.errors import DeepInferError


def command(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="OpenAI batch lines, or {'prompt': …} with sampling fields.")],
    output: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Result lines, keyed by custom_id, in order of completion.")],
    resume: Annotated[bool, typer.Option("--resume", help="Continue OUT.jsonl: run only what has no result yet.")] = False,
    config: ConfigFile = None,
    model: Model = None,
    backend: BackendName = None,
    settings: Settings = None,
) -> None:
    """Run a file of requests. After a crash or Ctrl-C the same command with --resume does what is missing, nothing twice.

    A line that is no request becomes an error record. The exit code is 1 if any line failed.

    Example: deepinfer batch prompts.jsonl results.jsonl --model DIR
    """
    resolved = resolve_from_options(config, model, backend, settings)
    total, results = open_batch(source, output, resume)
    with results, open_target(resolved) as target, _stop_on_signals() as stopped:
        run = BatchRun(
            source,
            results,
            target,
            resolved.config.sampling.request_defaults,
            Path(str(resolved.config.model.path or "deepinfer")).name,
            max_in_flight=2 * resolved.config.scheduler.max_num_seqs,
            stop=lambda: bool(stopped),
            progress=BatchProgress(total=total),
        )
        began = time.monotonic()
        try:
            with _progress_bar(run):
                run.run()
        except DeepInferError as error:
            if "--resume" not in str(error):  # most say it themselves
                print(_hint(output), file=sys.stderr)
            raise
    sys.exit(_summary(run.progress, time.monotonic() - began, output))


@contextmanager
def open_target(resolved: Any) -> Iterator[Any]:
    """The engine that runs the requests."""
    from deepinfer_core.engine.llm import LLM

    with LLM(config=resolved, progress=True) as llm:
        yield llm


@contextmanager
def _stop_on_signals() -> Iterator[list[int]]:
    """The list gets the number of a signal that asks to stop; the second such signal ends the process at once."""
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _progress_bar(run: BatchRun) -> Iterator[None]:
    with tqdm(total=run.progress.total, unit=" lines", file=sys.stderr, disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar:

        def report(progress: BatchProgress) -> None:
            if bar.disable:
                return
            bar.initial = progress.skipped  # keeps the rate, and with it the ETA, that of lines really run
            bar.n = progress.skipped + progress.done
            elapsed = bar.format_dict["elapsed"] or 1e-9
            bar.set_postfix_str(f"{progress.tokens / elapsed:.1f} tokens/s, {progress.failed} failed", refresh=False)
            bar.update(0)

        run.report = report
        yield


def _hint(output: Path) -> str:
    return f"Finished results are in {output}. Run the same command with --resume to do the rest."


def _summary(progress: BatchProgress, seconds: float, output: Path) -> int:
    """Prints the end of a run and returns the exit code."""
    rate = progress.tokens / max(seconds, 1e-9)
    counts = f"{progress.done} done, {progress.skipped} skipped, {progress.failed} failed of {progress.total} lines"
    print(f"{counts}; {progress.tokens} tokens, {rate:.1f} tokens/s", file=sys.stderr)
    if progress.stopped:
        print(f"Stopped. {_hint(output)}", file=sys.stderr)
    return int(progress.stopped or progress.failed > 0)
