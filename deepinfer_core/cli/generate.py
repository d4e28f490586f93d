"""Generate text for a prompt and stream it to the terminal."""

from __future__ import annotations

import json as jsonlib
import sys
from typing import Annotated, Any

import typer

from deepinfer_core.cli._options import BackendName, ConfigFile, Json, Model, Settings, resolve_from_options
from deepinfer_core.errors import EngineError, RequestError

NONSENSE = (
    "note: no model was given, so this is the small checkpoint that ships with the package. Its weights are random: what it writes is "
    "nonsense. Give a DeepSeek-V4.1 checkpoint with --model DIR."
)

Prompt = Annotated[str, typer.Argument(help="The prompt; '-' reads it from standard input.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Stop after this many tokens.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; unset: the checkpoint's recommendation, else 1.")]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this mass.")]
TopK = Annotated[int | None, typer.Option(help="Keep this many most likely tokens; -1 is off.")]
Seed = Annotated[int | None, typer.Option(help="Seed of this request.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop at this text; may be repeated.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")]


def command(
    prompt: Prompt,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    config: ConfigFile = None,
    model: Model = None,
    backend: BackendName = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Generate text for a prompt and stream it to the terminal. Text goes to standard output, everything else to standard error.

    Example: deepinfer generate "Once upon a time" --model DIR --max-tokens 64 --temperature 0
    """
    # A prompt on a small machine: few sequences, so that little memory is set aside. Any setting may say otherwise.
    resolved = resolve_from_options(config, model, backend, settings, **_few_sequences(settings))
    from deepinfer_core import LLM, SamplingParams

    given: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed, "stop": stop}
    params = SamplingParams(
        max_tokens=max_tokens, ignore_eos=ignore_eos, **{name: value for name, value in given.items() if value is not None}
    )
    if resolved.config.model.path is None:
        print(NONSENSE, file=sys.stderr)
    text = _standard_input() if prompt == "-" else prompt
    with LLM(config=resolved, progress=True) as llm:
        print(_banner(llm), file=sys.stderr)
        if json:
            output = llm.generate(text, params, progress=False)[0]
            print(jsonlib.dumps(output.as_dict()))
            _check(output.finish_reason, output.error)
            return
        count, last = 0, None
        for last in llm.stream(text, params):
            print(last.text, end="", flush=True)
            count += len(last.token_ids)
        assert last is not None
        print()
        print(f"[{count} tokens, finish reason: {last.finish_reason}]", file=sys.stderr)
        _check(last.finish_reason, last.error)


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        message = f"prompt: standard input is not {error.encoding.upper()} (byte {error.start}: {error.reason}); convert it first"
        raise RequestError(message, parameter="prompt") from None


def _check(reason: Any, error: str) -> None:
    """Raises what ended the request, unless it ended well."""
    if reason in ("invalid_request", "prompt_length_exceeded"):
        raise RequestError(error, parameter="prompt")
    if error:
        raise EngineError(error)


def _few_sequences(settings: list[str] | None) -> dict[str, Any]:
    return {} if any("max_num_seqs" in setting for setting in settings or []) else {"scheduler.max_num_seqs": 4}


def _banner(llm: Any) -> str:
    """What runs, in one block: version, backend and why, model, arithmetic, memory."""
    from deepinfer_core import __version__

    parts = llm.parts
    layout, sizes = parts.loaded.layout, parts.sizes
    return (
        f"deepinfer {__version__} | backend {parts.selected.backend.name}: {parts.selected.why} | model {parts.model_path.name} | "
        f"numerics {parts.config.model.numerics} | cache {sizes.pages} pages x {layout.page_stride} bytes + {sizes.state_slots} slots x "
        f"{layout.slot_bytes} bytes | up to {parts.limits.max_model_len} tokens a request"
    )
