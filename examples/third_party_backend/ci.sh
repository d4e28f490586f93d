#!/usr/bin/env bash
# What this package's CI runs: a fresh environment, its own tests, the whole conformance suite. Usage: ci.sh [where the core comes from]
# The core may be a requirement ("deepinfer-core==0.1.0") or a folder; the default is the checkout around this example.
set -euo pipefail
cd "$(dirname "$0")"
core=${1:-$PWD/../..}
constraints=()
if [ -f "$core/constraints.txt" ]; then constraints=(-c "$core/constraints.txt"); fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
python="$work/venv/bin/python"

"$python" -m pip install -q "${constraints[@]}" "$core" pytest
"$python" -m pip wheel -q --no-deps -w "$work/wheels" .
"$python" -m pip install -q --no-deps "$work"/wheels/*.whl

tests=$PWD/tests
cd "$work" # so that nothing is imported from the checkout
"$python" -m pytest -q "$tests"
"$work/venv/bin/deepinfer" conformance --backend cpu_simd --report report.md
