"""A PyTorch that nobody has tested, and that lacks private parts: each use of one names it."""

import importlib
import subprocess
import sys
import warnings
from types import ModuleType

import pytest
import torch

from torchremat._torch.versions import missing, tested
from torchremat.errors import PyTorchVersionError, PyTorchVersionWarning

FILES = {
    "imports.py": "from torch._functorch.vmap import no_such_name\n",
    "module.py": "from torch._no_such_module.inner import thing\n",
    "reads.py": "import torch\nvalue = torch._C._no_such_attribute\n",
    "annotates.py": (
        "from torch.fx import NoSuchClass\n"
        "def look(x: NoSuchClass | None) -> bool:\n    return isinstance(x, NoSuchClass)\n"
    ),
    "own.py": "from torchremat.errors import no_such_error\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "room_without_parts"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "__init__.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder.name
    for name in [name for name in sys.modules if name.startswith(folder.name)]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("file", "part", "use"),
    [
        ("imports", "torch._functorch.vmap.no_such_name", lambda m: m.no_such_name(1)),
        ("imports", "torch._functorch.vmap.no_such_name", lambda m: m.no_such_name.attribute),
        ("imports", "torch._functorch.vmap.no_such_name", lambda m: m.no_such_name.__enter__()),
        ("module", "torch._no_such_module", lambda m: m.thing()),
        ("reads", "torch._C._no_such_attribute", lambda m: m.value()),
        ("annotates", "torch.fx.NoSuchClass", lambda m: m.look(1)),
    ],
)
def test_a_part_that_is_missing_is_named_where_it_is_used(package, file, part, use):
    modules = set(sys.modules)
    found = missing.supply_missing(package, [file])
    assert found[0] == part
    module = importlib.import_module(f"{package}.{file}")
    with pytest.raises(PyTorchVersionError, match=part) as caught:
        use(module)
    assert torch.__version__ in str(caught.value)
    assert tested.NEWEST in str(caught.value)
    left = {name for name in set(sys.modules) - modules if name.startswith("torch._no_such")}
    assert not left
    assert not hasattr(torch, "_no_such_module")
    assert not hasattr(torch._C, "_no_such_attribute")


def test_a_mistake_of_our_own_is_no_missing_part(package):
    with pytest.raises(ImportError, match="no_such_error"):
        missing.supply_missing(package, ["own"])


def _module_of_the_room(text):
    """A module that seems to stand in the room."""
    module = ModuleType("torchremat._torch.planted")
    path = f"{missing._ROOM}/planted.py"
    exec(compile(text, path, "exec"), vars(module))
    return module


def test_a_part_that_is_missing_inside_of_a_function_is_named():
    module = _module_of_the_room(
        "import torch\n"
        "from contextlib import contextmanager\n"
        "from pkgutil import resolve_name\n"
        "def read(): return torch._C._no_such_attribute\n"
        "def load():\n    from torch._functorch.vmap import no_such_name\n"
        "def resolve(): return resolve_name('torch._functorch.vmap:no_such_name')\n"
        "@contextmanager\ndef enter():\n    torch._C._no_such_attribute\n    yield\n"
        "@contextmanager\ndef block(): yield 3\n"
        "def own(): return ''.no_such_attribute\n"
        "def call(function): return function()\n"
    )
    missing.guard_functions(vars(module))
    for use in (module.read, module.load, module.resolve, lambda: module.enter().__enter__()):
        with pytest.raises(PyTorchVersionError, match=r"torch\._.*no_such_"):
            use()
    with pytest.raises(AttributeError, match="no_such_attribute"):
        module.own()
    with pytest.raises(AttributeError):  # of a user's function
        module.call(lambda: torch.no_such_function)
    with pytest.raises(AttributeError), module.block() as found:
        assert found == 3
        torch.no_such_function  # noqa: B018


def test_versions_that_are_newer():
    names = ("2.11.0", "2.15.1+cu132", "2.16.0a0+git12", "3.0.0")
    assert [tested.is_newer(name) for name in names] == [False, False, True, True]
    assert not tested.is_newer()


def test_a_newer_version_is_warned_of(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.warns(PyTorchVersionWarning, match=r"2\.99\.0 .*2\.11 to 2\.15"):
        tested.warn_of_newer()
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tested.warn_of_newer()


SCRIPT = """
import warnings, torch
torch.__version__ = "2.99.0"
del torch._functorch.vmap.restore_vmap
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torchremat as tr
print([w.category.__name__ for w in caught if "torchremat" in str(w.message)])
x = torch.ones(3, requires_grad=True)
tr.checkpoint(torch.sin)(x).sum().backward()
print(torch.equal(x.grad, torch.cos(x)))
print(tr._torch.MISSING_PARTS, hasattr(torch._functorch.vmap, "restore_vmap"))
try:
    tr._torch.restore_vmap(torch.sin, (0,), 1, "error")
except tr.errors.PyTorchVersionError as error:
    print(error)
"""


def test_a_newer_pytorch_without_a_part_works_but_for_that_part():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert lines[:3] == [
        "['PyTorchVersionWarning']", "True", "['torch._functorch.vmap.restore_vmap'] False"
    ]  # fmt: skip
    assert lines[3].startswith("torchremat needs torch._functorch.vmap.restore_vmap, which PyTorch")
