"""An error that says that memory ran out says what the plan was, and what to change."""

import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchremat as tr
from tests.helpers import in_kib
from tests.planning.models import GPT


@torch.library.custom_op("torchremat_tests::hungry", mutates_args=())
def hungry(x: torch.Tensor) -> torch.Tensor:
    if full[0]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return x * 2


@torch.library.custom_op("torchremat_tests::hungry_back", mutates_args=())
def hungry_back(x: torch.Tensor) -> torch.Tensor:
    if full[1]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return x * 2


hungry.register_fake(torch.empty_like)
hungry_back.register_fake(torch.empty_like)
hungry.register_autograd(lambda ctx, g: hungry_back(g))
full = [False, False]
"""Whether there is no memory left: in the forward pass, in the backward pass."""


@pytest.fixture(autouse=True)
def memory():
    full[:] = [False, False]
    yield
    full[:] = [False, False]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == 3:
                x = hungry(x)
        return x.sum()


X = torch.randn(512, 64)


def failing_step(model, policy, phase):
    fun = tr.checkpoint(model, policy=policy)
    fun(X).backward()
    full[phase == "backward"] = True
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fun(X).backward()
    return caught.value


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_it_is_told_where_and_what_is_alive_by_the_plan(phase):
    model = Model()
    plan = tr.plan(model, X, budget="70%")
    (note,) = failing_step(model, "budget:70%", phase).__notes__
    op = "hungry" if phase == "forward" else "hungry_back"
    assert f"in the {phase} pass of a step under memory_budget('70%')" in note
    assert f"at torchremat_tests.{op}.default" in note
    assert f"By the plan the peak is {in_kib(plan.peak_bytes)}, at" in note
    found = re.search(r"at operator (\d+) of (\d+), ([\d.]+ KiB) are alive:", note)
    timeline = plan.timeline()
    at = int(found[1]) - 1
    assert (timeline.points[at].phase, int(found[2])) == (phase, len(timeline))
    assert in_kib(timeline.live[at]) == found[3]
    shown = re.findall(r"^    ([\d.]+) KiB \w+ \(\w+\)(?: from (.*))?$", note, re.MULTILINE)
    sizes = [float(size) for size, _ in shown]
    assert sizes == sorted(sizes, reverse=True)
    assert any("test_out_of_memory.py" in source for _, source in shown)


def test_the_budget_that_it_names_is_below_what_is_alive_and_can_be_given():
    (note,) = failing_step(Model(), "budget:90%", "backward").__notes__
    named = re.search(r"'(budget:(\d+)B)'", note)
    tr.policy(named[1])
    alive = float(re.search(r"([\d.]+) KiB are alive", note)[1])
    assert 0.8 * alive < int(named[2]) / 2**10 < alive


def test_a_plan_that_is_replayed_tells_too(tmp_path):
    model, path = Model(), tmp_path / "plan.json"
    tr.plan(model, X, budget="70%").save(path)
    (note,) = failing_step(model, f"plan:{path}", "backward").__notes__
    assert f"under from_plan({str(path)!r})" in note


def test_what_the_allocator_of_the_cpu_says_counts():
    model = GPT()
    x = torch.randint(0, 64, (2, 32))
    fun = tr.checkpoint(model, policy="budget:80%")
    fun(x)

    class Full(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.gelu.default:
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
            return func(*args, **(kwargs or {}))

    with pytest.raises(RuntimeError, match="can't allocate memory") as caught, Full():
        fun(x)
    assert "at aten.gelu.default from models.py:" in caught.value.__notes__[0]


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_without_a_plan_there_is_nothing_to_tell(policy):
    assert not hasattr(failing_step(Model(), policy, "forward"), "__notes__")


def test_other_errors_have_no_note():
    fun = tr.checkpoint(Model(), policy="budget:70%")
    fun(X)

    class Broken(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken") as caught, Broken():
        fun(X)
    assert not hasattr(caught.value, "__notes__")
