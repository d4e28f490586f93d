#!/bin/sh
# Prepares a checkout for a GPU machine that has no network: builds this project's wheel into .whl/, beside wheels of what that machine
# lacks, and prints the command to run there, in the root of a copy of this checkout that includes .whl/.
#
#   sh benchmarks/cuda/prepare_device.sh [PYTHON]
set -e
cd "$(dirname "$0")/../.."
python=${1:-python3}
mkdir -p .whl
rm -f .whl/deepinfer_core-*.whl
"$python" -m pip wheel . -q --no-deps --no-build-isolation -w .whl
rm -rf build ./*.egg-info
du -sh .whl
echo "On the device, in the root of the copy:"
cat <<'COMMANDS'
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target $PWD/.site .whl/*.whl && export PYTHONPATH=$PWD/.site || exit
OUT=results sh benchmarks/cuda/measure_device.sh
COMMANDS
