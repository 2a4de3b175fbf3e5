#!/usr/bin/env bash
# Runs the tests and examples that use transformers, peft, accelerate or lightning, with other releases
# of them than .venv has, in an environment of its own (.venv-trainers, made anew where they differ).
#   scripts/test_trainers.sh                                the lower bounds of setup.cfg
#   scripts/test_trainers.sh transformers==5.0.0 peft==0.18 these releases, and the newest of the others
#   scripts/test_trainers.sh --slow ...                     the slow tests too
set -eu
cd "$(dirname "$0")/.."
venv=.venv-trainers
marker="not slow"
if [ "${1-}" = --slow ]; then
    marker="slow or not slow"
    shift
fi
# [transformers], [peft] and [lightning] of setup.cfg, each `name>=1.2` as `name==1.2`
read_bounds() {
    sed -n '/^transformers =/,/^plot =/s/^ *\([a-z]*\)>=\([0-9.]*\)$/\1==\2/p' setup.cfg
}
wanted=$([ $# -gt 0 ] && printf '%s\n' "$@" || read_bounds)
if [ "$(cat $venv/.wanted 2>/dev/null)" != "$wanted" ]; then
    echo "torchremat: making $venv with" $wanted
    . scripts/_venv.sh
    _is_fit .venv/bin/python || _make_venv
    rm -rf $venv
    .venv/bin/python -m venv $venv 2>/dev/null || {
        .venv/bin/python -m venv --without-pip $venv
        .venv/bin/python -m pip --python $venv/bin/python install -qq pip
    }
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    # first and pinned, or a dependency may bring another release
    $venv/bin/python -m pip install -qq "torch==2.13.*"
    $venv/bin/python -m pip install -qq -e ".[test,examples,lightning]" $wanted
    printf '%s\n' "$wanted" >$venv/.wanted
fi
$venv/bin/python -m pip list 2>/dev/null | grep -E '^(torch|transformers|accelerate|peft|lightning) '
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
exec $venv/bin/python -m pytest -m "$marker" tests/integrations tests/nn/test_architectures.py \
    tests/nn/test_wrap.py tests/report/test_explain.py tests/planning/memory/test_simulate.py tests/test_examples.py
