"""`docs/ops.md`, written from the op descriptions: `python -m deepinfer_core.conformance.op_docs > docs/ops.md`."""

from __future__ import annotations

from deepinfer_core.conformance.describe import Geometry, OpDescription, descriptions

_HEAD = """# Ops: what the conformance suite asks of each

Written by `python -m deepinfer_core.conformance.op_docs` from the descriptions in `deepinfer_core/conformance/ops/`; a test keeps it
current. What an op computes is said by the docstrings of `deepinfer_core.backend.kernels.Kernels`; how bounds are made, by
[conformance.md](conformance.md). Geometries in *italics* are left out by `--quick`.
"""


def page() -> str:
    """The text of docs/ops.md."""
    return _HEAD + "".join(_section(description) for description in descriptions().values())


def _section(description: OpDescription) -> str:
    lines = [f"\n## `{description.op}`\n", f"Bound: {description.bound}.\n"]
    if description.mutates:
        lines.append(f"May change: {', '.join(f'`{path}`' for path in sorted(description.mutates))}.\n")
    if description.rows is None:
        lines.append("Rows are not compared for batch invariance: the op has no result rows of its own.\n")
    lines.append("| geometry | why | only with |")
    lines.append("|---|---|---|")
    lines += [_row(geometry) for geometry in description.geometries]
    return "\n".join(lines) + "\n"


def _row(geometry: Geometry) -> str:
    needs = [str(value) for value in (geometry.numerics, geometry.weights, geometry.window, geometry.entry, geometry.index) if value]
    name = geometry.name if geometry.quick else f"*{geometry.name}*"
    return f"| {name} | {geometry.why} | {', '.join(dict.fromkeys(needs))} |"


if __name__ == "__main__":
    print(page(), end="")
