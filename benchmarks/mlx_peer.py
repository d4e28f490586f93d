"""mlx-vlm as a measured peer: reads one JSON request a line, answers one JSON line. Run by `cpu_vs_mlx.py` in the peer's own Python.

Its arithmetic is not changed, except that `mx.gather_mm` is computed in float32, because MLX's CPU backend has no other kernel for it.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.utils import load_model

_gather_mm = mx.gather_mm


def gather_mm_in_float32(a: mx.array, b: mx.array, *args: Any, **options: Any) -> mx.array:
    """`mx.gather_mm` on float32 operands, rounded to a's dtype."""
    return _gather_mm(a.astype(mx.float32), b.astype(mx.float32), *args, **options).astype(a.dtype)


class Peer:
    """Greedy decoding of equally long prompts, in lockstep: the form that suits the peer best."""

    def __init__(self, model: Path) -> None:
        self.model = load_model(model).language_model

    def start(self, prompts: list[list[int]]) -> None:
        """Prefills a batch."""
        self.cache = self.model.make_cache()
        if prompts:
            self.tokens = self.forward(mx.array(prompts), self.cache)

    def forward(self, ids: mx.array, cache: Any) -> mx.array:
        """The next token of each row, [B, 1]."""
        tokens = mx.argmax(self.model(ids, cache=cache).logits[:, -1:], axis=-1)
        mx.eval(tokens)
        return tokens

    def decode(self, steps: int) -> None:
        """`steps` tokens for each row."""
        for _ in range(steps):
            self.tokens = self.forward(self.tokens, self.cache)

    def prefill(self, prompt: list[int]) -> None:
        """The first token after one prompt."""
        self.forward(mx.array([prompt]), self.model.make_cache())


def main() -> None:
    """Serves requests {"call": method, "arguments": {...}} until end of file; answers with the seconds that the call took."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever the libraries print is no answer
    mx.set_default_device(mx.cpu)
    mx.gather_mm = gather_mm_in_float32
    peer = Peer(Path(sys.argv[1]))
    print(json.dumps({"mlx": version("mlx"), "mlx-vlm": version("mlx-vlm")}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        getattr(peer, request["call"])(**request["arguments"])
        print(json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}), file=answers, flush=True)


if __name__ == "__main__":
    main()
