"""Runs the Ascend tests in an environment of their own: torch_npu on a CANN stub, no NPU.

    python tests/ascend/run.py [--venv DIR] [pytest arguments]

torch_npu must not share an environment with other backends (it hooks into `import torch`). The environment is made once and reused. On
a machine that cannot have it (no Linux, no gcc, no wheel for its Python) the run is skipped: the reason is printed and the status is 0,
or 1 with DEEPINFER_ASCEND_TESTS=require. Any other failure is a failure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("gcc", "nm", "readelf")
NO_WHEEL = ("No matching distribution found for torch-npu", "Could not find a version that satisfies the requirement torch-npu")
NEEDS = ("pytest>=8", "pytest-xdist>=3", "hypothesis>=6.100", "setuptools>=77")


def why_not() -> str:
    """Why this machine cannot build the environment, "" if it may."""
    if not sys.platform.startswith("linux"):
        return f"torch_npu exists for Linux only, this is {sys.platform}"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"the CANN stub needs {', '.join(absent)}: install a C compiler with binutils" if absent else ""


def install(python: Path) -> str:
    """Installs the project with the extra `ascend950`. "" if done, else why there is no torch_npu here. Raises on any other failure."""
    command = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}[ascend950]", *NEEDS]
    done = subprocess.run(command, text=True, stderr=subprocess.PIPE)
    if done.returncode == 0:
        return ""
    if any(words in done.stderr for words in NO_WHEEL):
        return f"no torch-npu wheel for Python {sys.version_info.major}.{sys.version_info.minor} on this machine's package index"
    sys.stderr.write(done.stderr)
    raise SystemExit(f"ascend tests: pip failed with status {done.returncode}")


def skip(reason: str) -> int:
    """Says why nothing was tested."""
    required = os.environ.get("DEEPINFER_ASCEND_TESTS") == "require"
    print(f"ascend tests: {'FAILED, because they are required' if required else 'SKIPPED'}: {reason}")
    return int(required)


def main() -> int:
    """Makes the environment where it is missing, and runs pytest in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / "build" / "ascend-venv", help="the environment (default: build/ascend-venv)")
    options, arguments = parser.parse_known_args()
    reason = why_not()
    if reason:
        return skip(reason)
    python = options.venv / "bin" / "python"
    if not (options.venv / "complete").exists():
        venv.create(options.venv, with_pip=True)
        reason = install(python)
        if reason:
            return skip(reason)
        (options.venv / "complete").touch()
    named = any(not argument.startswith("-") for argument in arguments)
    paths = [] if named else [str(ROOT / "tests" / "ascend")]
    # One thread each: pytest-xdist already uses every core.
    settings = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "DEEPINFER_ASCEND_TESTS": "require", "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "pytest", "-q", "-n", "auto", *arguments, *paths]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}).returncode


if __name__ == "__main__":
    sys.exit(main())
