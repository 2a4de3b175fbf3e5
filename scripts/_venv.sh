# Sourced, from the root of the repository, by the other scripts (POSIX sh, bash; set -eu or not).
# setup_venv EXTRAS: makes .venv here and installs PyTorch and the package, editable, with EXTRAS.
# ALL_EXTRAS are those of the tests and the documentation.
# Once done for these EXTRAS and this setup.cfg, it returns at once.

# what no test of the package is skipped for
ALL_EXTRAS=test,triton,lightning,plot,examples,dev,docs

_is_fit() { # PYTHON: does it run, and is it new enough?
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

_make_venv() { # makes .venv with the first Python that is new enough
    for python in python3 python3.13 python3.12 python3.11; do
        _is_fit "$python" || continue
        echo "torchremat: making .venv with $("$python" -V)"
        # Debian splits ensurepip off: without it the outer pip fills the environment
        "$python" -m venv --clear .venv >/dev/null 2>&1 || {
            "$python" -m venv --clear --without-pip .venv &&
                "$python" -m pip --python .venv/bin/python install -qq pip
        }
        return
    done
    echo "torchremat: needs Python 3.11 or newer; tried python3, python3.13, .12, .11" >&2
    return 1
}

setup_venv() ( # a subshell: leaves no variables behind
    set -eu
    extras=$1
    key=$( (pwd && cat setup.cfg pyproject.toml scripts/_venv.sh) | cksum | tr ' ' '-')
    ready=.venv/.ready
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    _is_fit .venv/bin/python || _make_venv
    if grep -qsxF "$key $extras" "$ready"; then return; fi
    # first and pinned, or a dependency may bring another release
    echo "torchremat: installing PyTorch 2.13 (a large download, once)"
    .venv/bin/python -m pip install -qq "torch==2.13.*"
    echo "torchremat: installing the package with $extras"
    .venv/bin/python -m pip install -qq -e ".[$extras]"
    grep -qs "^$key " "$ready" || : >"$ready"
    echo "$key $extras" >>"$ready"
)
