#!/usr/bin/env bash
# Trains the models of tests/zoo, tiny ones of the libraries of the extra `zoo`, in every way, in an
# environment of its own (.venv-zoo), and writes docs/measured/models.md. It takes about 90 minutes
# on 2 cores.
#   scripts/test_zoo.sh                         all models, and the page
#   scripts/test_zoo.sh -k "llama or mixtral"   some of them, and no page
set -eu
cd "$(dirname "$0")/.."
venv=.venv-zoo
wanted=$(sed -n '/^zoo =/,/^docs =/p' setup.cfg)
if [ "$(cat $venv/.wanted 2>/dev/null)" != "$wanted" ]; then
    echo "torchremat: making $venv"
    "${PYTHON:-python3}" -m venv --clear $venv
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    # pinned, or a dependency may bring another release
    $venv/bin/python -m pip install -qq "torch==2.13.*"
    $venv/bin/python -m pip install -qq "torch==2.13.*" "torchvision==0.28.*" -e ".[test,zoo]"
    printf '%s\n' "$wanted" >$venv/.wanted
fi
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
if [ $# -gt 0 ]; then
    exec $venv/bin/python -m pytest -m zoo tests/zoo "$@"
fi
TORCHREMAT_ZOO_ROWS=$(mktemp)
export TORCHREMAT_ZOO_ROWS
trap 'rm -f "$TORCHREMAT_ZOO_ROWS"' EXIT
failed=0
$venv/bin/python -m pytest -m zoo tests/zoo -n 2 || failed=$?
$venv/bin/python scripts/zoo_report.py "$TORCHREMAT_ZOO_ROWS"
exit $failed
