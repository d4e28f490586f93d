"""Peak memory of loading a checkpoint: at most what stays resident, plus one shard.

    python benchmarks/load_memory.py MODEL_DIR

Loads the weights in a fresh process while a thread samples the process's anonymous memory every millisecond, and compares its peak with
what is held afterwards. Exits with 1 if the difference exceeds the largest shard.

Mapped shard pages are reported, not judged: they are the kernel's page cache and are given up under pressure. They stay mapped as long as
any tensor that needs no conversion (embedding, norms) is used, so total RSS cannot show what loading costs. Linux only.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import threading
from pathlib import Path

SLACK = 8 << 20  # bytes; Python's own allocations while loading


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def load(model: Path) -> None:
    """Loads the weights and prints anonymous bytes before, afterwards and at the peak, newly mapped bytes, and the number of layers."""
    import torch

    from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
    from deepinfer_core.checkpoint.engram import engram_tables
    from deepinfer_core.checkpoint.reader import Checkpoint
    from deepinfer_core.model.weights import WeightLoader

    torch.set_num_threads(1)
    source = Checkpoint.open(model)
    engram = engram_tables(source.config, source.path) if source.config.text_config.engram_layer_ids else None
    kernels = ReferenceKernels(torch.device("cpu"))
    gc.collect()
    before, mapped = status("RssAnon"), status("RssFile")
    peak, done = [before], threading.Event()

    def sample() -> None:
        while not done.wait(0.001):
            peak.append(max(peak.pop(), status("RssAnon")))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        weights = WeightLoader(source, kernels, engram).load(True)
    finally:
        done.set()
        sampler.join()
    gc.collect()
    print(before, status("RssAnon"), peak[0], status("RssFile") - mapped, len(weights.layers))


def main() -> int:
    """Measures, prints and judges."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="a checkpoint folder")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        load(options.model)
        return 0
    command = [sys.executable, __file__, str(options.model), "--worker"]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    before, resident, peak, mapped, layers = map(int, report.split())
    shard = max(path.stat().st_size for path in options.model.glob("*.safetensors"))
    above = max(peak - resident, 0)
    held = above <= shard + SLACK
    print(
        f"{layers} layers: {(resident - before) / 2**20:.1f} MiB stay, peak {above / 2**20:.1f} MiB above that, "
        f"largest shard {shard / 2**20:.1f} MiB: {'ok' if held else 'TOO MUCH'}; "
        f"{mapped / 2**20:.1f} MiB of shards stay mapped"
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
