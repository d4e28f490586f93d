"""Write a timeline of host and device work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from deepinfer_core.cli._options import BackendName, ConfigFile, Model, Settings, resolve_from_options

Out = Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the timeline: open it in chrome://tracing or Perfetto.")]
Prompts = Annotated[int, typer.Option(help="Prompts that run at a time.")]
InputLen = Annotated[int, typer.Option(help="Tokens of each prompt.")]
OutputLen = Annotated[int, typer.Option(help="Tokens generated for each.")]


def command(
    out: Out,
    num_prompts: Prompts = 8,
    input_len: InputLen = 32,
    output_len: OutputLen = 16,
    config: ConfigFile = None,
    model: Model = None,
    backend: BackendName = None,
    settings: Settings = None,
) -> None:
    """Run random prompts and write a timeline of host and device work, so that their overlap can be seen.

    Example: deepinfer trace timeline.json --num-prompts 8 --set speculative.num_draft_tokens=5
    """
    import numpy as np

    from deepinfer_core import LLM, SamplingParams

    if not out.resolve().parent.is_dir():
        raise typer.BadParameter(f"{out.parent} is no directory; choose a file in one that exists", param_hint="FILE")
    resolved = resolve_from_options(config, model, backend, settings)
    with LLM(config=resolved, progress=True) as llm:
        random = np.random.default_rng(llm.parts.config.model.seed)
        prompts = random.integers(3, llm.parts.limits.vocab_size, (num_prompts, input_len)).tolist()
        llm.record_timeline()
        llm.generate(prompts, SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True))
        llm.write_timeline(out)
        print(f"{out}: {len(llm.engine.times.timeline or [])} spans", file=sys.stderr)
        for name, value in llm.stats().items():
            print(f"{name} = {value}")
