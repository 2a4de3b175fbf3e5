"""The script that runs suites of other projects: how it adapts their imports."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from conformance_plugin import Adapter
from conformance_suites import SUITES, TORCH_NAMES

SOURCE = '''"""Tests."""
from __future__ import annotations
import torch
from functorch import (
    make_fx,
    vmap as map_it,
    grad,
)
from torch.utils.checkpoint import checkpoint

text = "torch.func.vmap"
y = torch.vmap(torch.func.grad(f))
z = torch.func.functional_call
'''


def adapt(source, names):
    return Adapter(names).visit(ast.parse(source))


def test_only_imports_change():
    found = ast.unparse(adapt(SOURCE, TORCH_NAMES))
    assert "from conformance_torch import vmap as map_it" in found
    assert "from functorch import make_fx\n" in found
    assert "from conformance_torch import checkpoint as checkpoint" in found
    assert "text = 'torch.func.vmap'" in found
    assert "y = conformance_torch.vmap(conformance_torch.grad(f))" in found
    assert found.splitlines()[-1] == "z = torch.func.functional_call"


def test_lines_keep_their_numbers():
    tree = compile(adapt(SOURCE, TORCH_NAMES), "tests.py", "exec")
    lines = [line for _, _, line in tree.co_lines() if line]
    assert max(lines) == len(SOURCE.splitlines())


def test_a_source_without_the_names_stays():
    assert ast.unparse(adapt(SOURCE, {})) == ast.unparse(ast.parse(SOURCE))


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_reasons_are_sentences(suite):
    assert all(why and not why.endswith(".") for why in suite.not_applicable.values())
