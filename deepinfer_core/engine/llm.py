"""`LLM`: the front for people who run prompts offline."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from tqdm import tqdm

from deepinfer_core.checkpoint.schema import read_json
from deepinfer_core.config import ResolvedConfig, resolve_config
from deepinfer_core.engine.engine import Engine, StepOutputs, token_ids
from deepinfer_core.engine.outputs import Delta, RequestOutput, SampleOutput
from deepinfer_core.engine.request import FinishReason
from deepinfer_core.engine.scoring import score
from deepinfer_core.engine.startup import start
from deepinfer_core.errors import EngineError, RequestError
from deepinfer_core.sampling import SamplingParams, defaults_from

Prompt = str | Sequence[int] | np.ndarray


class LLM:
    """A model on a device. Use it as a context manager, or call `close`.

        with LLM(model="DIR", backend="cpu_ref", max_num_seqs=8) as llm:
            for output in llm.generate(["Hello", "Bonjour"], SamplingParams(max_tokens=32)):
                print(output.text)

    `options` are configuration keys ("scheduler.max_num_seqs", or `max_num_seqs` where one section has it); `config_file` is a YAML file.
    Raises ConfigError, CheckpointError, BackendError or EngineError before any request is taken.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        backend: str | None = None,
        config_file: str | Path | None = None,
        config: ResolvedConfig | None = None,
        progress: bool = False,
        **options: Any,
    ) -> None:
        keywords = {"model": model, "backend": backend, **options}
        self.resolved = config or resolve_config({k: v for k, v in keywords.items() if v is not None}, config_file)
        with tqdm(desc="loading weights", unit=" parts", disable=not (progress and sys.stderr.isatty())) as bar:
            self.parts = start(self.resolved.config, lambda part: bar.update())
        self.engine = Engine(self.parts)
        try:
            self.default_params = {**_generation_defaults(self.parts.model_path), **self.resolved.config.sampling.request_defaults}
        except BaseException:
            self.engine.close()
            raise
        self._ids = itertools.count()
        self._pending: dict[str, RequestOutput] = {}
        self._streams: dict[str, list[Delta]] = {}  # what open streams have not shown yet
        self._abandoned: set[str] = set()  # requests of streams that were closed early: nobody waits for their outputs

    # ------------------------------------------------------------------ generate

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """One output for each prompt, in input order. A prompt is text or a list of token ids; `params` is one for all or one for each.

        A prompt that cannot run has an output with a finish reason and an `error`; it does not stop the others.
        Raises RequestError if the arguments do not fit together, EngineError if the device fails.
        """
        several = _as_list(prompts)
        chosen = self._params_for(several, params)
        outputs: dict[str, RequestOutput] = {}
        order = [self.submit(prompt, one) for prompt, one in zip(several, chosen, strict=True)]
        wanted, others = set(order), []
        with tqdm(total=len(order), unit=" prompts", disable=not (progress and sys.stderr.isatty())) as bar:
            tokens = 0
            while len(outputs) < len(order):
                for output in self.poll():
                    if output.request_id not in wanted:
                        others.append(output)
                        continue
                    outputs[output.request_id] = output
                    tokens += sum(len(sample.token_ids) for sample in output.samples)
                    bar.update()
                    elapsed = bar.format_dict["elapsed"] or 1e-9
                    bar.set_postfix_str(f"{tokens / elapsed:.1f} tok/s", refresh=False)
        self._keep(others)
        return [outputs[request_id] for request_id in order]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Output of one prompt as it is made. Raises RequestError if the prompt cannot run. Closing the iterator aborts the request."""
        request_id = self.submit(prompt, params)
        if (refused := self._pending.pop(request_id, None)) is not None:
            raise RequestError(refused.error, parameter="prompt")
        deltas = self._streams[request_id] = []
        output = None
        try:
            while output is None:
                self._keep(self._step().finished)
                output = self._pending.pop(request_id, None)
                if output is not None and output.error and not output.token_ids:
                    raise RequestError(output.error, parameter="prompt")
                while deltas:
                    yield deltas.pop(0)
        finally:
            del self._streams[request_id]
            if output is None and self.engine.abort(request_id):
                self._abandoned.add(request_id)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> str:
        """Queues a prompt and returns its request id. A prompt that cannot run gets its output from `poll` like any other.

        Raises RequestError if an unfinished request has the same id.
        """
        if request_id is None:
            request_id = next(name for name in map(str, self._ids) if not self._is_known(name))
        elif self._is_known(request_id):
            raise RequestError(
                f"request_id {request_id!r}: a request with this id is unfinished, or its output was not fetched; choose another",
                parameter="request_id",
                value=request_id,
            )
        resolved = (params or SamplingParams()).with_defaults(self.default_params)
        try:
            self.engine.add_request(request_id, prompt, resolved)
        except RequestError as error:
            found = None if isinstance(prompt, str) else token_ids(prompt)
            ids = [] if found is None else [int(token) for token in found]
            failed = SampleOutput(0, finish_reason=FinishReason.INVALID, error=str(error))
            self._pending[request_id] = RequestOutput(request_id, prompt if isinstance(prompt, str) else None, ids, [failed])
        return request_id

    def poll(self) -> list[RequestOutput]:
        """Runs one step if there is work, and returns the outputs that are complete.

        If the device fails, the outputs of unfinished requests (reason `error`) are returned, and the next call raises EngineError.
        """
        ready, self._pending = list(self._pending.values()), {}
        try:
            return ready + (self._step().finished if self.engine.has_unfinished or self.engine.failure else [])
        except EngineError:
            lost = ready + self.engine.drain()
            if not lost:
                raise
            return lost

    def abort(self, request_id: str) -> bool:
        """Ends a request with reason `abort`; False if it has ended already."""
        return self.engine.abort(request_id)

    # ------------------------------------------------------------------ evaluation

    def compute_logits(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Logits of every position of each sequence of token ids: float32 [len, vocab_size] on the CPU.

        Raises RequestError if a sequence is empty, too long, or has ids outside the vocabulary; EngineError if requests are running.
        """
        return [score(self.engine, sequence) for sequence in sequences]

    # ------------------------------------------------------------------ what happened

    def stats(self) -> dict[str, Any]:
        """Counters since the start and mean step times of the newest steps, by the names of docs/observability.md."""
        return self.engine.stats()

    def record_timeline(self) -> None:
        """Starts recording every span of host and device work."""
        self.engine.record_timeline()

    def write_timeline(self, path: str | Path) -> None:
        """Writes what `record_timeline` recorded, in the Chrome trace format."""
        self.engine.times.write_timeline(Path(path))

    # ------------------------------------------------------------------ life

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer: `encode`, `decode`."""
        return self.parts.tokenizer

    def close(self) -> None:
        """Frees the device. Idempotent."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _step(self) -> StepOutputs:
        """One engine step; hands deltas to the open streams."""
        step = self.engine.step()
        for delta in step.deltas:
            if (stream := self._streams.get(delta.request_id)) is not None:
                stream.append(delta)
        dropped = {output.request_id for output in step.finished} & self._abandoned
        step.finished = [output for output in step.finished if output.request_id not in dropped]
        self._abandoned -= dropped
        return step

    def _keep(self, outputs: Sequence[RequestOutput]) -> None:
        """Keeps outputs until their stream or `poll` fetches them."""
        self._pending |= {output.request_id: output for output in outputs}

    def _is_known(self, request_id: str) -> bool:
        return request_id in self._pending or self.engine.is_unfinished(request_id)

    def _params_for(self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * len(prompts)
        if not isinstance(params, list | tuple) or not all(isinstance(one, SamplingParams) for one in params):
            raise RequestError(
                f"params is {type(params).__name__}; expected SamplingParams, or a list with one for each prompt",
                parameter="params",
                value=params,
            )
        if len(params) != len(prompts):
            raise RequestError(
                f"params has {len(params)} entries for {len(prompts)} prompts; give one for all or one for each",
                parameter="params",
                value=len(params),
            )
        return list(params)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """`prompts` as a list of prompts; a single prompt, text or ids, becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise RequestError(
            f"prompts is {type(prompts).__name__}; expected text, token ids, or a list of these", parameter="prompts", value=prompts
        )
    several: Any = list(prompts)
    return [several] if several and all(isinstance(item, int | np.integer) for item in several) else several


def _generation_defaults(path: Path) -> Mapping[str, Any]:
    file = path / "generation_config.json"
    return defaults_from(read_json(file)) if file.exists() else {}
