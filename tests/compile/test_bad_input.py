"""What cannot be compiled: policies that fail, devices that are not there, no Triton."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torchremat as tr
from tests.helpers import skip_in_2_11
from torchremat import _torch
from torchremat.compile import device_support
from torchremat.compile.lowering import lower
from torchremat.errors import (
    CompilerWarning,
    DeviceError,
    OptionError,
    PolicyError,
    PolicyFailedError,
    UnmatchedWarning,
)
from torchremat.graph.codegen import source_of


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def f(x: Tensor) -> Tensor:
    return torch.sin(torch.sin(x @ x)).sum()


def by_backend(policy: Any) -> Callable[[Tensor], Tensor]:
    options = {"policy": policy, "codegen": "eager"}
    return torch.compile(f, backend="torchremat", options=options)  # type: ignore[no-any-return]


def inside(policy: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(tr.checkpoint(f, policy=policy), backend="aot_eager")  # type: ignore[no-any-return]


def skip_where_checkpoints_stay_entered(compiled: Any) -> None:
    if compiled is inside:
        skip_in_2_11("torch.utils.checkpoint does not leave its contexts when a function raises")


def jitted(policy: Any) -> Callable[[Tensor], Tensor]:
    return tr.jit(f, policy=policy, backend="aot_eager")  # type: ignore[no-any-return]


# --- policies ------------------------------------------------------------------------------------


def raises(op: Any, *avals: Any, **params: Any) -> bool:
    raise KeyError("boom")


def reads_values(op: Any, *avals: Any, **params: Any) -> bool:
    return bool(avals[0].sum() > 0)


def answers_text(op: Any, *avals: Any, **params: Any) -> Any:
    return "yes"


def takes_no_avals(op: Any) -> bool:
    return True


@pytest.mark.parametrize("compiled", [by_backend, inside])
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (raises, r"raises\), called for aten.mm.*raised KeyError at .*input.py:\d+ .*: 'boom'"),
        (reads_values, r"raised AttributeError .*there are no values of tensors yet"),
    ],
)
def test_a_policy_that_raises_is_named(compiled: Any, policy: Any, message: str) -> None:
    skip_where_checkpoints_stay_entered(compiled)
    with pytest.raises(PolicyFailedError, match=message):
        compiled(policy)(torch.ones(3, 3, requires_grad=True))


@pytest.mark.parametrize("compiled", [by_backend, inside, jitted])
@pytest.mark.parametrize(
    ("policy", "message"),
    [(answers_text, "answered 'yes'"), (takes_no_avals, "cannot be called for aten.mm.default")],
)
def test_a_policy_that_is_none_is_told(compiled: Any, policy: Any, message: str) -> None:
    skip_where_checkpoints_stay_entered(compiled)
    with pytest.raises((PolicyError, PolicyFailedError), match=message):
        compiled(policy)(torch.ones(3, 3, requires_grad=True))


@pytest.mark.parametrize("compiled", [by_backend, jitted])
def test_operators_that_do_not_exist_are_told(compiled: Any) -> None:
    with pytest.warns(UnmatchedWarning, match="'aten.sim' matches nothing.* nearest: .*'aten.sin'"):
        compiled("ops:aten.sim")(torch.ones(3, 3, requires_grad=True))


def test_the_file_of_a_plan_that_is_not_there_is_told() -> None:
    with pytest.raises(OptionError, match=r"'plan:nowhere.json'\} cannot be read: .*No such file"):
        by_backend("plan:nowhere.json")(torch.ones(3, 3, requires_grad=True))


# --- devices -------------------------------------------------------------------------------------


def to_a_gpu(x: Tensor) -> Tensor:
    return torch.sin(x.to("cuda") * 2).sum()


def graph_on_a_gpu() -> torch.fx.GraphModule:
    """A graph that was traced for a GPU, whether there is one or not."""
    module = tr.make_graph(lambda x: torch.sin(x) * 2)(torch.ones(4)).graph_module
    with _torch.FakeTensorMode():
        fake = torch.ones(4).to("meta")
    for node in module.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            node.meta["val"] = _torch.FakeTensor(
                node.meta["val"].fake_mode, fake, torch.device("cuda:0")
            )
    return module


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@without_gpu
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="PyTorch is built for GPUs")
@pytest.mark.parametrize("transform", [tr.checkpoint, tr.jit])
def test_a_function_that_wants_a_gpu_is_told_where(transform: Any) -> None:
    with pytest.raises(DeviceError, match=r"to_a_gpu.* at .*test_bad_input.py:\d+.*no such device"):
        transform(to_a_gpu)(torch.ones(3, requires_grad=True))


@without_gpu
def test_code_for_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "has_triton", lambda: True)
    run = lower(graph_on_a_gpu(), "inductor")
    with pytest.raises(DeviceError, match="tensors on cuda:0 .*this machine has none of that kind"):
        run([torch.ones(4)])


def test_a_device_is_no_option() -> None:
    options = {"policy": "full", "device": "cuda"}
    with pytest.raises(OptionError, match="'device': ...} is not an option of the backend"):
        torch.compile(f, backend="torchremat", options=options)(torch.ones(3, 3))


# --- Triton --------------------------------------------------------------------------------------


def test_without_triton_a_gpus_operators_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "has_triton", lambda: False)
    with pytest.warns(CompilerWarning, match="inductor needs Triton .*pip install triton"):
        run = lower(graph_on_a_gpu(), "inductor")
    assert "def run(inputs)" in source_of(run)
    torch.testing.assert_close(run([torch.ones(4)])[0], torch.sin(torch.ones(4)) * 2)


def test_without_triton_the_backend_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "has_triton", lambda: False)
    monkeypatch.setattr(device_support, "_BY_TRITON", ("cpu",))
    g = torch.compile(f, backend="torchremat", options={"policy": "full"})
    x = torch.rand(3, 3, requires_grad=True)
    with pytest.warns(CompilerWarning, match="the backend 'torchremat' needs Triton"):
        y = g(x)
    assert torch.equal(y, f(x))
    assert torch.equal(*(torch.autograd.grad(v, x)[0] for v in (y, f(x))))
