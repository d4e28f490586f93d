"""A fresh virtual environment with the built wheels of the core and of the example backend, as a vendor's user would have it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "third_party_backend"
_SOURCES = ("deepinfer_core", "backends", "plugins", "pyproject.toml", "README.md", "LICENSE", "NOTICE")


def why_not() -> str:
    """Why this machine cannot build the example; "" if it can."""
    if shutil.which("g++") is None:
        return "the example backend is C++: g++ is not installed"
    try:
        major = int(version("setuptools").split(".")[0])
    except PackageNotFoundError:
        major = 0
    return "" if major >= 77 else "wheels are built without a network: setuptools 77 or newer must be installed (pip install -e '.[dev]')"


@dataclass(frozen=True)
class Environment:
    """The environment at `root`. Commands run in `work`, a folder from which nothing of the checkout can be imported."""

    root: Path
    work: Path

    def run(self, *command: str, status: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """A finished command, found in the environment's bin first. Fails unless it ends with `status`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "DEEPINFER_", "PYTEST_"))}
        variables = {
            **kept,
            "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "160",
            "PIP_NO_INDEX": "1",
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "false",  # pip reads it as: no isolation
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        done = subprocess.run(command, cwd=cwd or self.work, env=variables, text=True, capture_output=True)
        text = f"{' '.join(command)} ended with {done.returncode}, expected {status}:\n{done.stdout}{done.stderr}"
        assert done.returncode == status, text
        return done


def build(folder: Path) -> None:
    """Builds both wheels and installs them. Other packages (torch ...) are those of the running interpreter: nothing is downloaded."""
    core, example, wheels, root, work = (folder / name for name in ("core", "example", "wheels", "venv", "work"))
    core.mkdir()
    work.mkdir()
    for name in _SOURCES:  # copies: a build leaves files behind, and may find those of an earlier one
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, core / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, core / name)
    shutil.copytree(EXAMPLE, example, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info", "*.so"))
    for package in (core, example):
        _pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(package))
    venv.create(root, with_pip=False)
    python = root / "bin" / "python"
    _pip("--python", str(python), "install", "--no-deps", "--no-index", *map(str, sorted(wheels.glob("*.whl"))))
    # After the environment's own packages on sys.path. Editable installs of the running interpreter do not come along.
    shared = [path for path in sys.path if path.endswith("site-packages")]
    site = next(root.glob("lib/python*/site-packages"))
    (site / "shared.pth").write_text("\n".join(shared) + "\n")


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"
