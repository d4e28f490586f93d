"""docs/ascend.md names every op and every operator."""

from __future__ import annotations

import re
from pathlib import Path

from deepinfer_backends.ascend950 import emulation, environment
from deepinfer_core.backend.kernels import OPS

PAGE = (Path(__file__).parents[2] / "docs" / "ascend.md").read_text()


def test_every_op_has_one_row() -> None:
    table = PAGE.split("## Ops")[1].split("## How it was verified")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(name for cell in first for name in re.findall(r"`(\w+)`", cell)) == sorted(OPS)


def test_every_operator_is_named() -> None:
    assert [name for name in emulation.OPERATORS if f"`{name}`" not in PAGE] == []


def test_every_variable_that_is_set_is_documented() -> None:
    for name, value in environment.DEFAULTS.items():
        assert re.search(rf"\| `{name}` \| `{re.escape(value)}`", PAGE), name
