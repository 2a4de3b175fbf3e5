"""`import torchremat` is quick: each name brings its room, and what the room registers, alone."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchremat as tr
from torchremat.core.upper_rooms import REGISTERING

PACKAGE = Path(tr.__file__).parent


def run(program: str, **variables: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, env=os.environ | variables, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


HELP = """
import sys
from torchremat.cli.app import main
try:
    main({}, prog_name="torchremat")
except SystemExit as end:
    assert not end.code
print("torch" in sys.modules, "rich" in sys.modules)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["--version"]])
def test_help_imports_no_torch(arguments):
    assert run(HELP.format(arguments)).endswith("False False\n")


def test_completion_imports_no_torch():
    found = run(
        HELP.format([]), _TORCHREMAT_COMPLETE="bash_complete", COMP_WORDS="torchremat pl",
        COMP_CWORD="1",
    )  # fmt: skip
    assert found == "plain,plan\nFalse False\n"


def test_import_brings_no_torch_and_lists_all_names():
    found = run("import sys, torchremat as tr; print('torch' in sys.modules, *dir(tr))")
    assert found.split() == ["False", *sorted(tr.__all__)]


ALONE = """
import os, sys
import torch, torch.export, torch.fx.experimental.symbolic_shapes  # once, for all children
import torchremat as tr
for program in sys.stdin.read().splitlines():
    child = os.fork()
    if not child:
        try:
            exec(program, {"tr": tr, "torch": torch})
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(child, 0)[1]:
        print(program)
"""


def find_failing(*programs: str) -> list[str]:
    """Those that fail, each in a process in which nothing but PyTorch is imported."""
    result = subprocess.run(
        [sys.executable, "-c", ALONE],
        input="\n".join(programs), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return result.stdout.splitlines()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_what_other_rooms_register_is_found_without_them(tmp_path):
    """Each room alone, and what needs a room above it; the last one loads what one before saved."""
    rooms = {home.partition(".")[0]: names.split()[0] for home, names in tr._HOMES.items()}
    modules = set(tr.__all__) - set(tr._home_of) - set(rooms) - {"remat"}
    path = str(tmp_path / "model.pt")
    wrapped = "tr.nn.wrap(torch.nn.Linear(2, 2), 'budget:1GiB', compile='aot_eager')"
    failing = find_failing(
        *(f"assert tr.{name} is tr.{name}" for name in [*rooms.values(), *sorted(modules)]),
        "import torchremat.remat; assert tr.remat is tr.checkpoint",
        "from torchremat.policies.policy import policy; policy('budget:1GiB')",
        "from torchremat.policies.policy import as_policy; as_policy(None)",
        "from torchremat.remat.program.compilers import compiler_named as c; c('inductor')",
        f"torch.save({wrapped}, {path!r})",
        f"torch.load({path!r}, weights_only=False)(torch.ones(1, 2)).sum().backward()",
    )
    assert failing == []


def test_homes_are_those_that_type_checkers_see():
    tree = ast.parse(Path(tr.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    assert block.test.id == "TYPE_CHECKING"
    seen = {
        alias.asname or alias.name: statement.module.partition(".")[2]
        for statement in block.body
        for alias in statement.names
    }
    modules = {name: "" for name in tr.__all__ if name not in tr._home_of}
    assert seen == {**tr._home_of, **modules, "remat": "remat.checkpoint"}


def test_an_unknown_name_is_an_error():
    with pytest.raises(AttributeError, match="module 'torchremat' has no attribute 'chekpoint'"):
        tr.chekpoint  # noqa: B018


REGISTERS = {
    "register_spelling": "policies",
    "register_compiler": "compilers",
    "let_processes_share": "shared plans",
    "register_mesh_axes": "mesh axes",
    "over_processes": "collectives over processes",
}


def find_registering():
    """What each module registers when it is imported: by a call, or by setting an attribute."""
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                continue
            for node in ast.walk(statement):
                if isinstance(node, ast.Call):
                    name = getattr(node.func, "id", None)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    name = node.attr
                else:
                    continue
                if name in REGISTERS:
                    yield REGISTERS[name], module


def test_each_module_that_registers_has_a_row():
    rows = {(what, module) for what, modules in REGISTERING.items() for module in modules}
    assert set(find_registering()) == rows
