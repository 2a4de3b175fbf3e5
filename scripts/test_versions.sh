#!/usr/bin/env bash
# Tests the package with several versions of PyTorch, and prints a table for docs/reference/versions.md.
#   scripts/test_versions.sh 2.11 2.15         every version from 2.11 to 2.15
#   scripts/test_versions.sh 2.11 2.15 2.14    only 2.14 of them
#   KEEP=1 scripts/test_versions.sh 2.11 2.15  and leaves the environments for the next time
# The oldest, 2.13 and the newest run all tests; the others a smoke run: imports, private parts, the
# examples, a model of transformers. Environments are made one at a time in .versions/ and removed
# afterwards, for one with CUDA has 6 GB. PYTHON (python3) makes them; pip's settings hold, so that
# PIP_INDEX_URL may name another index. WORKERS (2) is how many tests run at once.
set -eu
cd "$(dirname "$0")/.."
if [ $# -lt 2 ]; then
    echo "usage: scripts/test_versions.sh OLDEST NEWEST [VERSION...]" >&2
    exit 2
fi
oldest=$1 newest=$2
shift 2
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

make_environment() { # VERSION FOLDER
    if [ -e "$2/.ready" ]; then return; fi
    "${PYTHON:-python3}" -m venv --clear "$2"
    # first, and held by the constraint, or a dependency may bring another release
    "$2/bin/python" -m pip install -qq "torch==$1.*"
    "$2/bin/python" -m pip list --format=freeze | grep '^torch==' >"$2/constraint"
    "$2/bin/python" -m pip install -qq -c "$2/constraint" -e ".[test,examples]"
    : >"$2/.ready"
}

run_tests() { # PYTHON RUN LOG
    case $2 in
    all) "$1" -m pytest -p no:cacheprovider -n "${WORKERS:-2}" >"$3" 2>&1 ;;
    smoke)
        "$1" -W error -c 'import torchremat' >"$3" 2>&1 &&
            "$1" -m torchremat env --check >>"$3" 2>&1 &&
            "$1" -m pytest -p no:cacheprovider tests/_torch tests/test_examples.py \
                tests/integrations/test_transformers.py >>"$3" 2>&1
        ;;
    esac
}

failed=0
mkdir -p .versions
table=$(mktemp)
trap 'rm -f "$table"' EXIT
[ $# -gt 0 ] || set -- $(seq -f 2.%g "${oldest#2.}" "${newest#2.}")
for version in "$@"; do
    folder=.versions/$version log=.versions/$version.log
    case $version in "$oldest" | 2.13 | "$newest") run=all ;; *) run=smoke ;; esac
    echo "torchremat: PyTorch $version, $run, in $folder; output in $log" >&2
    result="does not install"
    if make_environment "$version" "$folder" >"$log" 2>&1; then
        if run_tests "$folder/bin/python" "$run" "$log"; then status=0; else status=$? failed=1; fi
        # its last such line: "3 failed, 4210 passed, 12 skipped in 801.22s"
        result=$(grep -E '[0-9]+ (passed|failed|errors?)' "$log" | tail -1 | sed 's/=//g; s/ in [0-9].*//; s/^ *//')
        if [ "$status" -ne 0 ] && [ -z "$result" ]; then result="failed before the tests"; fi
        installed=$("$folder/bin/python" -c 'import platform, torch; print(torch.__version__, "|", platform.python_version())')
    else
        failed=1 installed="$version | -"
    fi
    echo "| $installed | $run | $result | $(date -u +%F) |" >>"$table"
    [ -n "${KEEP-}" ] || rm -rf "$folder"
done
printf '| PyTorch | Python | run | result | date |\n|---|---|---|---|---|\n'
cat "$table"
exit $failed
