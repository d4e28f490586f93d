#!/bin/sh
# Every check and measurement of the NVIDIA backend on one GPU, in about seven minutes; then `results.py` makes the page for docs/results/.
#
#   OUT=some/folder [LIMIT=seconds] sh benchmarks/cuda/measure_device.sh [PART...]
#
# PARTs: correctness ops end_to_end peers; all of them if none is given. LIMIT: what begins too late is cut short or left out [540].
# Run it in the root of a checkout; `deepinfer_core` must be importable (prepare_device.sh says how on a machine without a network), the
# peers too if they are to be measured (benchmarks/README.md). Correctness runs share the GPU, timed runs have it to themselves. Each run
# has a time limit of its own, so that one that hangs costs no other; what it wrote by then is kept.
set -u
out=$(mkdir -p "${OUT:-.}" && cd "${OUT:-.}" && pwd)
export OUT="$out" PYTHONUNBUFFERED=1 PYTHONPATH="tests/cuda:${PYTHONPATH:-}" TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$HOME/.triton/cache}"
parts=${*:-correctness ops end_to_end peers}
end=$(($(date +%s) + ${LIMIT:-540}))
say() { echo "[$(date +%T)] $*" | tee -a "$out/times.txt"; }

# run SECONDS NAME COMMAND...: a command with a time limit and a log; $out/NAME.status holds its exit code (124: out of time)
run() {
    seconds=$1 name=$2
    shift 2
    left=$((end - $(date +%s)))
    [ "$seconds" -gt "$left" ] && seconds=$left
    if [ "$seconds" -lt 10 ]; then
        echo "no time left" >"$out/$name.status"
        say "$name is left out"
        return
    fi
    say "$name starts"
    timeout -k 5 "$seconds" "$@" >"$out/$name.log" 2>&1
    echo "$?" >"$out/$name.status"
    say "$name ends with $(cat "$out/$name.status")"
}

correctness() {
    # All at once: most of their time is compiling. One level a process: a level that runs out of time hides no other.
    for level in contract ops model engine claims; do
        jobs=3
        [ "$level" = ops ] && jobs=4
        run 150 "conformance_$level" python3 -c "from deepinfer_core.cli import main; main()" conformance --backend cuda_sm100 \
            --level "$level" --jobs "$jobs" --report "$out/conformance_$level.json" &
    done
    run 150 device_check python3 tests/cuda/device_check.py --seconds 120 &
    run 150 sanitizer compute-sanitizer --tool memcheck python3 tests/cuda/device_check.py --compiled --rows 1,64 --ops store,attention \
        --name sanitized --seconds 120 &
    run 150 golden python3 benchmarks/cuda/end_to_end.py --parts golden --name golden --seconds 100 &
    run 150 precompile python3 benchmarks/cuda/precompile_model.py &
    run 100 peers_compiled python3 benchmarks/cuda/peers.py --rows 8192,64,1,8 --jobs 8 --compile-seconds 90 --seconds 0 --name peers_compiled &
    wait
}

ops() {
    run 110 bench_ops python3 benchmarks/cuda/bench_ops.py --seconds 90
    # Only ops whose code differs in that mode.
    run 70 bench_ops_invariant python3 benchmarks/cuda/bench_ops.py --invariant --seconds 50 --ops linear,attention,hc_pre,moe
}

peers() {
    compiled=
    [ -f "$out/peers_compiled.status" ] && compiled="--jobs 0"
    run 170 peers python3 benchmarks/cuda/peers.py --rows 8192,64,1,8 --seconds 150 $compiled
}

end_to_end() {
    run 190 end_to_end python3 benchmarks/cuda/end_to_end.py --parts ceilings,decode,prefill,profile --seconds 150
}

for part in $parts; do
    "$part"
done
say "done"
