#!/usr/bin/env bash
# Tests and measures everything that needs a GPU, and writes one page of Markdown about it.
#
#   scripts/gpu_evidence.sh                     sets itself up; docs/measured/gpu.md, about 8 minutes
#   scripts/gpu_evidence.sh page.md             another page
#   scripts/gpu_evidence.sh --second-device page.md    on the device that the tests compile, 1 minute
#   PYTHON=python3 scripts/gpu_evidence.sh      in an environment that has PyTorch and the package
#
# It runs on one GPU (CUDA or ROCm). Without one the same parts run on the CPU, where there is
# nothing to check of kernels and allocators, and say so. The second device has memory, streams and
# generators of its own, but no compiler: it shows that the parts work, at small sizes. The exit
# status is 1 if a part failed.
set -eu
cd "$(dirname "$0")/.."
on_second=
[ "${1:-}" = --second-device ] && on_second=yes && shift
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
    printf '%q ' "$@" | sed "s#^$PYTHON\( -m tests.second_device.run_script\)\?#python#; s# \$##" \
        >"$parts/$name.command"
    if timeout "$limit" "$@" >"$parts/$name" 2>"$parts/$name.log"; then
        echo "$name: passed, $((SECONDS - begun)) s"
    else
        echo "$name: FAILED ($?), $((SECONDS - begun)) s"
        failed+=("$name")
        tail -n 30 "$parts/$name.log" >>"$parts/$name"
    fi
}

show() { # NAME LINES TITLE: a section of the page, with the last LINES of a part
    printf '\n## %s\n\n`%s`\n\n' "$3" "$(cat "$parts/$1.command")"
    if [ "$1" = steps ]; then cat "$parts/$1"; else
        echo '```text'
        tail -n "$2" "$parts/$1"
        echo '```'
    fi
}

echo "each part, with its time:"
if [ -n "$on_second" ]; then
    export TORCHREMAT_SECOND_DEVICE=1
    script=("$PYTHON" -m tests.second_device.run_script)
    # tests/test_second_device.py runs all of these
    run tests 300 "$PYTHON" -m pytest -p no:cacheprovider tests/second_device/test_the_device.py
    run memory 120 "${script[@]}" scripts/check_device_memory.py --models "gpt dropout" mlp
    run steps 180 "${script[@]}" scripts/bench_steps.py --small --rounds 1 --models gpt
    run kernels 150 "${script[@]}" scripts/check_gpu_kernels.py
    run offload 180 "${script[@]}" scripts/bench_offload.py --width 32 --rows 64
else
    script=("$PYTHON")
    run tests 180 "$PYTHON" -m pytest -p no:cacheprovider -m "gpu and not slow" tests/planning tests/kernels tests/remat/offload
    run memory 120 "$PYTHON" scripts/check_device_memory.py
    run steps 180 "$PYTHON" scripts/bench_steps.py
    run kernels 150 "$PYTHON" scripts/check_gpu_kernels.py
    run offload 180 "$PYTHON" scripts/bench_offload.py
    run compile 300 "$PYTHON" scripts/bench_compile.py --seconds 150 --json "$parts/compile.json"
fi

{
    cat <<TEXT
# On a GPU

Made by \`bash scripts/gpu_evidence.sh${on_second:+ --second-device}\`, which writes this page anew.

$("${script[@]}" scripts/describe_machine.py)

Parts that failed: ${failed[*]:-none}.
TEXT
    show tests 3 "Tests that need a GPU"
    show steps 40 "Training steps: time and peak"
    show memory 40 "Simulated peaks beside the allocator"
    show offload 20 "Offloading"
    show kernels 20 "Kernels in Triton beside plain PyTorch"
    if [ -z "$on_second" ]; then
        show compile 60 "Under torch.compile, beside its own budgets"
    fi
} >"$page"
echo "written: $page"
[ ${#failed[@]} -eq 0 ]
