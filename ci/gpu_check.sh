#!/usr/bin/env bash
# All that needs an NVIDIA GPU, in one run that needs no network: builds the CUDA backend, runs its tests, and measures the
# pipeline on a 0.6B-shaped model with 152k pieces (all-logits prefill, decoding, where a step's time goes), sampling in
# its graph, and the engine against llama-server and llama-batched-bench on 0.6B- and 8B-shaped models.
#
#   ci/gpu_check.sh OUT [WHEELS]
#
# OUT: folder for logs and figures. WHEELS: a folder of wheels where there is no package index; it needs nox and what the
# dependency group `test` and the build of pyproject.toml name. LLAMAPIPE_LLAMA_CPP_DIR: the llama.cpp source, else it is
# fetched; of its models/ only ggml-vocab-qwen2.gguf is needed, and its tools/, common/ and vendor/ only by `compare`.
# BACKEND: for a rehearsal without a GPU, `cpu`; PRESET and LARGE: other models ("15m").
# STAGES: which parts to run ("build test measure compare"), for machines where one command may not take long.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
out=$(mkdir -p "$1" && cd "$1" && pwd)
backend=${BACKEND:-cuda}
preset=${PRESET:-0.6b}
large=${LARGE:-8b}
python=${PYTHON:-python3}
stages=${STAGES:-build test measure compare}
state=${STATE:-$out}  # what later parts need: the environment and the models
if [ $# -gt 1 ]; then
    PIP_FIND_LINKS=$(cd "$2" && pwd)
    export PIP_FIND_LINKS PIP_NO_INDEX=1
fi
export LLAMAPIPE_CACHE_DIR=${LLAMAPIPE_CACHE_DIR:-$state/cache}
nvidia-smi 2>/dev/null | tee "$out/nvidia-smi.txt" || true
git rev-parse HEAD >"$out/commit.txt" 2>/dev/null || true

if [[ $stages == *build* ]]; then
    "$python" -m venv "$state/venv"
    "$state/venv/bin/python" -m pip install --quiet "scikit-build-core>=1.0" cffi numpy cmake ninja pip gguf hypothesis pytest \
        pytest-benchmark pytest-timeout tqdm
    # Without build isolation: the build's own requirements are installed above.
    time "$state/venv/bin/python" -m pip install --no-build-isolation . -C "backend=$backend" 2>&1 | tee "$out/build.log"
fi
bin=$state/venv/bin
if [[ $stages == *test* ]]; then
    if "$python" -m nox --version >/dev/null 2>&1; then
        "$python" -m nox -s "tests($backend)" 2>&1 | tee "$out/tests.log"
    else
        # Away from the clone, so that the installed package is tested.
        (cd "$state" && LLAMAPIPE_TEST_BACKEND=$backend "$bin/python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" \
            -m device "$root/tests") 2>&1 | tee "$out/tests.log"
    fi
    "$bin/llamapipe" doctor | tee "$out/doctor.txt"
fi
if [[ $stages == *measure* ]]; then
    model=$state/$preset-f16.gguf
    [ -f "$model" ] || "$bin/python" tools/make_model.py --preset "$preset" --type f16 "$model"
    cd "$state"
    measure() { "$bin/python" "$root/benchmarks/bench_pipeline.py" "$model" "$@" 2>&1 | tee -a "$out/figures.txt"; }
    measure overlap --rows 512 --steps 12 --json "$out/overlap.json"
    measure stages --rows 512 --json "$out/stages.json"
    measure decode engine --sequences 1 16 64 --repeats 7 --json "$out/decode.json"
    measure memory --json "$out/memory.json"
    "$bin/python" "$root/benchmarks/bench_sampling.py" "$model" start graph engine --n-vocab 151936 --rows 1 16 64 2>&1 |
        tee "$out/sampling.txt"
fi
if [[ $stages == *compare* ]]; then
    cd "$root"
    cuda=$([ "$backend" = cuda ] && echo --cuda || true)
    "$bin/python" benchmarks/compare/peers.py $cuda
    for name in "$preset" "$large"; do
        model=$state/$name-f16.gguf
        [ -f "$model" ] || "$bin/python" tools/make_model.py --preset "$name" --type f16 "$model"
        compare() {
            "$bin/python" benchmarks/compare "$model" $cuda --n ${N:-1 16 64} --json "$out/compare-$name-$1.json" "${@:2}" 2>&1 |
                tee -a "$out/compare.txt"
        }
        compare callers --prompt 64 --generate 128 --repeats "${REPEATS:-3}" --processes 1 --only "llamapipe whole" "llamapipe asyncio" \
            "llama-server whole" "llama-server streaming" "llama-server backend-sampling" batched-bench
        compare decoding --prompt 1 --generate 127 --repeats "${REPEATS:-3}" --processes 1 --only "llamapipe whole" batched-bench
    done
fi
