"""The import rules of docs/architecture.md, and what importing costs."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import deepinfer_core

ROOT = Path(__file__).parents[2]
HEAVY = "torch", "triton", "torch_npu", "tokenizers", "safetensors", "huggingface_hub"


def imported_by(statement: str) -> set[str]:
    """Heavy modules that a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint('loaded', *(name for name in {HEAVY!r} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.splitlines()[-1].split()) - {"loaded"}


def test_import_contracts():
    """In a process of its own: the linter switches off every logger that exists, and later tests look at logs."""
    call = f"lint_imports(config_filename={str(ROOT / 'pyproject.toml')!r}, no_cache=True)"
    code = f"from importlinter.cli import lint_imports; raise SystemExit({call})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "statement",
    [
        "import deepinfer_core",
        "import deepinfer_core.backend",
        "from deepinfer_core import EngineConfig, resolve_config; resolve_config(env={})",
        "from deepinfer_core.backend.registry import discover; assert not discover().problems; discover().auto_order()",
        "from deepinfer_core.cli._app import run; run(['--help'])",
        "from deepinfer_core.cli._app import run; run(['config'])",
    ],
)
def test_nothing_heavy_is_imported(statement):
    assert imported_by(statement) == set()


def test_every_public_name_is_declared_once():
    assert set(deepinfer_core._LAZY) < set(deepinfer_core.__all__)
    assert set(dir(deepinfer_core)) == set(deepinfer_core.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        deepinfer_core.nothing  # noqa: B018


def test_version_is_the_distribution_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert deepinfer_core.__version__ == project["version"]


def test_declared_packages_are_the_packages_on_disk():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    on_disk = set()
    for name, folder in settings["package-dir"].items():
        for path in (ROOT / folder).rglob("__init__.py"):
            on_disk.add(".".join([name, *path.parent.relative_to(ROOT / folder).parts]))
    assert sorted(settings["packages"]) == sorted(on_disk)


def test_the_core_names_no_vendor_module():
    """import-linter sees imports; this sees imports by name too."""
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "deepinfer_core").rglob("*.py")}
    named = [str(path) for path, text in texts.items() if any(re.search(r"deepinfer_(backends|plugins)\.\w", s) for s in strings(text))]
    assert named == []


def strings(text: str) -> list[str]:
    """String constants of a source text, docstrings not included."""
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and ast.get_docstring(node)}
    return [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs]
