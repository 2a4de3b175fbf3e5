#!/usr/bin/env bash
# Trains with the clients of the extra `clients` (transformers, TRL, PEFT, Lightning, Opacus), with
# litgpt and torchtitan, in an environment of its own (.venv-clients), and writes
# docs/measured/clients.md of the trainings that ended. It takes about 20 minutes.
#   scripts/test_clients.sh                    all of tests/clients, and the page
#   scripts/test_clients.sh tests/clients/test_trainer.py -k bf16   some of it, and no page
set -eu
cd "$(dirname "$0")/.."
venv=.venv-clients
wanted=$(sed -n '/^clients =/,/^zoo =/p' setup.cfg)
if [ "$(cat $venv/.wanted 2>/dev/null)" != "$wanted" ]; then
    echo "torchremat: making $venv"
    "${PYTHON:-python3}" -m venv --clear $venv
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    # pinned, or a dependency may bring another release
    $venv/bin/python -m pip install -qq "torch==2.13.*"
    $venv/bin/python -m pip install -qq "torch==2.13.*" -e ".[test,clients,triton]"
    $venv/bin/python -m pip install -qq --no-deps litgpt torchtitan
    printf '%s\n' "$wanted" >$venv/.wanted
fi
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
if [ $# -gt 0 ]; then
    exec $venv/bin/python -m pytest -m clients -s "$@"
fi
TORCHREMAT_CLIENTS_ROWS=$(mktemp)
export TORCHREMAT_CLIENTS_ROWS
trap 'rm -f "$TORCHREMAT_CLIENTS_ROWS"' EXIT
failed=0
$venv/bin/python -m pytest -m clients tests/clients || failed=$?
$venv/bin/python scripts/clients_report.py "$TORCHREMAT_CLIENTS_ROWS"
exit $failed
