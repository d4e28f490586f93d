"""Importing this makes `deepinfer_core` and `deepinfer_backends` importable from a plain checkout, where nothing is installed.

The distribution maps the folder backends/ to the package deepinfer_backends; a checkout on a lent machine has only the folder.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

for _name, _folder in (("deepinfer_core", "deepinfer_core"), ("deepinfer_backends", "backends")):
    if importlib.util.find_spec(_name) is None:
        _init = ROOT / _folder / "__init__.py"
        _spec = importlib.util.spec_from_file_location(_name, _init, submodule_search_locations=[str(ROOT / _folder)])
        assert _spec is not None
        assert _spec.loader is not None
        _module = importlib.util.module_from_spec(_spec)
        sys.modules[_name] = _module
        _spec.loader.exec_module(_module)
