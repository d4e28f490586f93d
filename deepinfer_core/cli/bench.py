"""Time a backend's ops at the released model's sizes."""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_core.cli._options import BackendName, ConfigFile, Json, Model, Settings, resolve_from_options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Benchmarks.

    Example: deepinfer bench ops --backend cpu_ref --preset decode-1
    """


@app.command()
def ops(
    backend: Annotated[str, typer.Option("--backend", "-b", help="Backend to time.")],
    preset: Annotated[list[str] | None, typer.Option(help="decode-1, decode-64 or prefill-8k; may be repeated [all].")] = None,
    pattern: Annotated[str, typer.Option("--ops", metavar="PATTERN", help="Op names (shell pattern).")] = "*",
    device: Annotated[str, typer.Option(help="Device, as the backend names it.")] = "",
    emulate: Annotated[bool, typer.Option("--emulate", help="Time the backend's CPU emulation.")] = False,
    max_seconds: Annotated[float, typer.Option(help="Skip what cannot be faster than this.")] = 5.0,
    json: Json = False,
) -> None:
    """Median time of each op, bytes/s, FLOP/s, and the share of the device's measured ceilings.

    Example: deepinfer bench ops --backend cpu_ref --preset decode-1 --ops 'hc_*'
    """
    from deepinfer_core.backend.kernels import OPS
    from deepinfer_core.conformance import bench as benchmark
    from deepinfer_core.conformance.suite import open_subject
    from deepinfer_core.errors import ConfigError, nearest

    presets = preset or list(benchmark.PRESETS)
    for name in presets:
        if name not in benchmark.PRESETS:
            raise ConfigError(f"unknown preset {name!r}{nearest(name, benchmark.PRESETS)}")
    subject = open_subject(backend, device, emulate)
    ceilings = benchmark.measure_ceilings(subject.torch_device)
    timings = []
    for timing in benchmark.run_benchmark(subject, presets, pattern, ceilings, max_seconds):
        timings.append(timing)
        if not json:
            print(_line(timing, ceilings), flush=True)
    if not timings:
        raise ConfigError(f"--ops {pattern!r} matches no op with a preset{nearest(pattern, OPS)}")
    about = f"{backend} on {subject.torch_device}; ceilings: {ceilings.bytes_per_second / 1e9:.1f} GB/s, " + (
        f"{ceilings.flops_per_second / 1e12:.3g} TFLOP/s ({ceilings.how})"
    )
    note = "experts: 384 ids over 8 different sets of weights; a backend that keeps references moves fewer bytes than its formula says"
    if json:
        rows = [{**vars(t), "cost": vars(t.cost), "share": t.share(ceilings)} for t in timings]
        print(json_format.dumps({"backend": backend, "ceilings": vars(ceilings), "note": note, "timings": rows}, indent=1))
    print(f"{about}\n{note}", file=sys.stderr if json else sys.stdout)


@app.command()
def calibrate_confidence(
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="Text, one prompt a line; else random prompts.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Random prompts, or most lines of the file.")] = 64,
    input_len: Annotated[int, typer.Option(help="Tokens of each random prompt.")] = 32,
    output_len: Annotated[int, typer.Option(help="Tokens generated for each.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature of the run.")] = 1.0,
    config: ConfigFile = None,
    model: Model = None,
    backend: BackendName = None,
    settings: Settings = None,
) -> None:
    """Fit the temperatures of the confidence head from a run: one per draft position, for speculative.confidence_temperatures.

    Use prompts like those you will serve. Example: deepinfer bench calibrate-confidence --prompts FILE --set num_draft_tokens=5
    """
    from deepinfer_core.engine.calibration import calibrate

    resolved = resolve_from_options(config, model, backend, settings, **{"speculative.enable_varlen": False})
    lines = None if prompts is None else [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()][:num_prompts]
    shape = (num_prompts, input_len)
    for line in calibrate(resolved, shape if lines is None else lines, output_len, temperature):
        print(line)


def _line(t: Any, ceilings: Any) -> str:
    head = f"{t.op:<21} {t.preset:<11}"
    if t.skipped:
        return f"{head} not run: {t.skipped}"
    seconds, cost = t.seconds, t.cost
    rates = f"{cost.bytes / seconds / 1e9:10.3f} GB/s {cost.flops / seconds / 1e12:10.4f} TFLOP/s"
    return f"{head} {seconds * 1e6:12.1f} us {rates} {100 * t.share(ceilings):7.2f} % of the ceiling"
