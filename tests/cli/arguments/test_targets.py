import re

import click
import pytest
import torch
from click import ClickException, UsageError

from torchremat.cli.arguments.targets import load_target
from torchremat.cli.terminal.exit_codes import UserCodeError

FILE = """
import sys
import torch

def make():
    return torch.nn.Linear(3, 3), (torch.ones(2, 3),)

def make_with_keywords():
    return (lambda x, *, y: x * y), (torch.ones(2),), {"y": torch.ones(2)}

def make_with_one_tensor():
    return torch.sin, torch.ones(2)

def make_loudly():
    print("loading")
    return make()

def function(x, y):
    return torch.sin(x) * y

def example_inputs():
    return (torch.ones(2),), {"y": torch.ones(2)}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(x)

    def example_inputs(self):
        return torch.ones(2, 3)

class Needs(Net):
    def __init__(self, width):
        super().__init__()

net = Net()
number = 3

def make_number():
    return number

def make_badly():
    return torch.ones(2) @ torch.ones(3), ()

def end():
    sys.exit(3)

def make_strangely():
    return torch.sin, (torch.ones(2),), [1]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "model_of_test.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("import torch\nimport no_such_library\n")
    (tmp_path / "package_of_test").mkdir()
    (tmp_path / "package_of_test" / "__init__.py").write_text("")
    (tmp_path / "package_of_test" / "models.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def called(text, device=None):
    target = load_target(text, device)
    return target.fun(*target.args, **target.kwargs)


@pytest.mark.parametrize(
    "name",
    ["make", "make_with_keywords", "make_with_one_tensor", "function", "Net", "net"],
)
@pytest.mark.parametrize(
    "where", ["model_of_test.py", "./model_of_test.py", "package_of_test.models"]
)
def test_loads_what_can_be_called(where, name):
    assert isinstance(called(f"{where}:{name}"), torch.Tensor)


@pytest.mark.parametrize("name", ["make", "Net", "net", "make_with_keywords"])
def test_all_is_on_the_device(name):
    target = load_target(f"model_of_test.py:{name}", "meta")
    tensors = [*target.args, *target.kwargs.values()]
    if isinstance(target.fun, torch.nn.Module):
        tensors += target.fun.parameters()
    assert {t.device.type for t in tensors} == {"meta"}


def test_what_loading_prints_is_no_result(capsys):
    load_target("model_of_test.py:make_loudly")
    assert capsys.readouterr() == ("", "loading\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model_of_tests.py:make", "no such file; nearest: 'model_of_test.py'"),
        ("no/such/folder.py:make", "no such file; there are none"),
        ("model_of_tst:make", "no module 'model_of_tst' here or installed; nearest: 'model_of"),
        ("package_of_test.model:make", "nearest: 'package_of_test.models'"),
        ("model_of_test.py:mak", "has no 'mak'; nearest: 'make'"),
        ("model_of_test.py:Net.forwards", "has no 'Net.forwards'; nearest: 'forward'"),
        ("model_of_test.py", "write model_of_test.py:NAME; there are: "),
        ("package_of_test.models", "write package_of_test.models:NAME"),
        ("", "neither a module's name nor a file"),
        (".:make", "neither a module's name nor a file"),
    ],
)
def test_what_is_not_there_is_told_with_the_nearest(text, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        load_target(text)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("number", "is 3 (int), and not a function or module"),
        ("Needs", "a class that needs arguments"),
        ("make_number", "returned a value of type int. It must return (fun_or_module, args)"),
        ("make_strangely", "returned a tuple of builtin_function_or_method, tuple, list"),
    ],
)
def test_what_cannot_be_used_is_told_with_the_rule(name, said):
    with pytest.raises(ClickException, match=re.escape(said)):
        load_target(f"model_of_test.py:{name}")


def test_without_arguments_it_cannot_be_called():
    with pytest.raises(ClickException, match=r"nothing to call it with.*example_inputs\(\)"):
        load_target("torch.nn:Tanh")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("broken.py:make", "loading broken.py raised ModuleNotFoundError.*at broken.py:2 "),
        ("broken:make", "importing broken raised ModuleNotFoundError"),
        ("model_of_test.py:make_badly", r"raised RuntimeError(.|\n)*at model_of_test.py:\d+ "),
        ("model_of_test.py:end", "raised SystemExit: 3"),
    ],
)
def test_what_the_users_code_raises_is_told_with_its_line(text, said):
    with pytest.raises(UserCodeError, match=re.compile(said, re.DOTALL)):
        load_target(text)


def test_no_such_device():
    with pytest.raises(click.BadParameter, match="gpuu"):
        load_target("model_of_test.py:make", "gpuu")
