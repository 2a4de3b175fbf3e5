#!/usr/bin/env bash
# Tests and measures everything that needs a GPU, and writes one page of Markdown about it.
#
#   scripts/gpu_evidence.sh                     sets itself up; docs/measured/gpu.md, about 8 minutes
#   scripts/gpu_evidence.sh page.md             another page
#   PYTHON=python3 scripts/gpu_evidence.sh      in an environment that has PyTorch and the package
#
# It runs on one GPU (CUDA or ROCm). Without one the same parts run on the CPU, where there is
# nothing to check of kernels and allocators, and say so. The exit status is 1 if a part failed.
set -eu
cd "$(dirname "$0")/.."
page=${1:-docs/measured/gpu.md}
if [ -z "${PYTHON:-}" ]; then
    . scripts/_venv.sh
    setup_venv test,triton
    PYTHON=.venv/bin/python
fi
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
failed=()

run() { # NAME LIMIT COMMAND...: runs a part for at most LIMIT seconds, its output to a file
    local name=$1 limit=$2
    shift 2
    local begun=$SECONDS
    if timeout "$limit" "$@" >"$parts/$name" 2>"$parts/$name.log"; then
        echo "$name: passed, $((SECONDS - begun)) s"
    else
        echo "$name: FAILED ($?), $((SECONDS - begun)) s"
        failed+=("$name")
        tail -n 30 "$parts/$name.log" >>"$parts/$name"
    fi
}

show() { # NAME LINES TITLE COMMAND: a section of the page, with the last LINES of a part
    printf '\n## %s\n\n`%s`\n\n' "$3" "$4"
    if [ "$1" = steps ]; then cat "$parts/$1"; else
        echo '```text'
        tail -n "$2" "$parts/$1"
        echo '```'
    fi
}

echo "each part, with its time:"
run tests 180 "$PYTHON" -m pytest -p no:cacheprovider -m "gpu and not slow" tests/planning tests/kernels tests/remat/offload
run memory 120 "$PYTHON" scripts/check_cuda_memory.py
run steps 180 "$PYTHON" scripts/bench_steps.py
run kernels 150 "$PYTHON" scripts/check_gpu_kernels.py
run offload 180 "$PYTHON" scripts/bench_offload.py
run compile 300 "$PYTHON" scripts/bench_compile.py --seconds 150 --json "$parts/compile.json"

{
    cat <<TEXT
# On a GPU

Made by \`bash scripts/gpu_evidence.sh\`, which writes this page anew.

$("$PYTHON" scripts/describe_machine.py)

Parts that failed: ${failed[*]:-none}.
TEXT
    show tests 3 "Tests that need a GPU" "pytest -m 'gpu and not slow'"
    show steps 40 "Training steps: time and peak" "python scripts/bench_steps.py"
    show memory 40 "Simulated peaks beside the allocator" "python scripts/check_cuda_memory.py"
    show offload 20 "Offloading" "python scripts/bench_offload.py"
    show kernels 20 "Kernels in Triton beside plain PyTorch" "python scripts/check_gpu_kernels.py"
    show compile 60 "Under torch.compile, beside its own budgets" \
        "python scripts/bench_compile.py --seconds 150"
} >"$page"
echo "written: $page"
[ ${#failed[@]} -eq 0 ]
