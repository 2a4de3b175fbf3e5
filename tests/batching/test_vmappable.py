"""Containers of the user's under `vmap`, as JAX's NamedArray."""

from dataclasses import dataclass

import pytest
import torch

import torchremat as tr
from torchremat.batching import is_vmappable, register_vmappable, unregister_vmappable
from torchremat.errors import AxisError, AxisTypeError, RegistrationError


@dataclass(frozen=True)
class Named:
    names: tuple
    data: torch.Tensor


@dataclass(frozen=True)
class Along:
    name: str | None
    axis: int | None


def to_elt(cont, get_idx, x, spec):
    if spec.axis is None:
        return Named(x.names, cont(x.data, None))
    names = list(x.names)
    assert names.pop(spec.axis) == spec.name
    return Named(tuple(names), cont(x.data, spec.axis))


def from_elt(cont, axis_size, x, spec):
    data = cont(axis_size, x.data, spec.axis)
    if spec.axis is None:
        return Named(x.names, data)
    names = list(x.names)
    names.insert(spec.axis, spec.name)
    return Named(tuple(names), data)


@pytest.fixture(autouse=True)
def registered():
    register_vmappable(Named, Along, int, to_elt, from_elt)
    yield
    unregister_vmappable(Named)


def square(x):
    return Named(x.names, x.data * x.data)


X = Named(("i", "j"), torch.arange(12.0).reshape(3, 4))


@pytest.mark.parametrize("axis_size", [3, None])
def test_a_named_array(axis_size):
    mapped = tr.vmap(square, Along("i", 0), Along("i", 1), axis_size=axis_size)
    for _ in range(3):
        out = mapped(X)
        assert out.names == ("j", "i")
        assert torch.equal(out.data, X.data.T.square())


def test_beside_tensors_in_trees():
    def fun(tree, y):
        return tree["x"], Named((), tree["x"].data.sum() * y)

    out, total = tr.vmap(fun, ({"x": Along("j", 1)}, 0), (Along("j", 0), Along("k", 0)))(
        {"x": X}, torch.ones(4)
    )
    assert out.names == ("j", "i")
    assert torch.equal(total.data, X.data.sum(0))


def test_nested_and_with_derivatives():
    def total(data):
        inner = tr.vmap(square, Along("j", 0), Along("j", 0))
        return tr.vmap(inner, Along("i", 0), Along("i", 0))(Named(("i", "j"), data)).data.sum()

    assert torch.equal(torch.func.grad(total)(X.data), 2 * X.data)


def test_in_a_checkpoint():
    fun = tr.checkpoint(lambda data: tr.vmap(square, Along("i", 0), Along("i", 0))(
        Named(("i", "j"), data)).data)  # fmt: skip
    x = X.data.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(fun(x).sum(), x)[0], 2 * X.data)


def test_the_number_of_the_example():
    def numbered(cont, get_idx, x, spec):
        return Named(x.names[1:], cont(x.data, 0) * 0 + get_idx())

    unregister_vmappable(Named)
    register_vmappable(Named, Along, int, numbered, from_elt, lambda n: torch.arange(n) * 10)
    out = tr.vmap(square, Along("i", 0), Along("i", 0))(X)
    assert out.data[:, 0].tolist() == [0, 100, 400]


def test_is_vmappable():
    assert is_vmappable(X)
    assert is_vmappable(Named)
    assert not is_vmappable(torch.ones(2))


def test_an_output_that_varies_needs_an_axis():
    with pytest.raises(AxisError, match="out_axes is None"):
        tr.vmap(square, Along("i", 0), Along(None, None))(X)


def test_a_spec_for_a_tensor():
    with pytest.raises(AxisTypeError, match="an axis of a tensor is an int or None"):
        tr.vmap(lambda x: x, Along("i", 0))(torch.ones(2))
    with pytest.raises(AxisTypeError, match="the axis of an output that is a tensor"):
        tr.vmap(lambda x: x.data, Along("i", 0), Along("i", 0))(X)


def test_registering_twice_and_taking_back_what_is_not_there():
    with pytest.raises(RegistrationError, match="registered already"):
        register_vmappable(Named, Along, int, to_elt, from_elt)
    with pytest.raises(RegistrationError, match="not registered"):
        unregister_vmappable(Along)
    with pytest.raises(RegistrationError, match="is a tensor"):
        register_vmappable(torch.nn.Parameter, Along, int, to_elt, from_elt)


class Box:
    def __init__(self, data):
        self.data = data


@pytest.fixture
def register_box():
    def register(spec_type, axis_size_type, to_elt, from_elt, make_iota=None):
        register_vmappable(Box, spec_type, axis_size_type, to_elt, from_elt, make_iota)

    yield register
    unregister_vmappable(Box)


def test_the_rules_of_a_container_may_compute(register_box):
    register_box(
        int,
        int,
        lambda cont, get_idx, x, spec: Box(cont(x.data + 1, spec)),
        lambda cont, size, x, spec: Box(cont(size, x.data * 2, spec) + 1),
    )
    assert tr.vmap(lambda x: x)(Box(torch.arange(3))).data.tolist() == [3, 5, 7]


def test_an_axis_size_may_be_of_a_type_of_its_own(register_box):
    class Count:
        def __init__(self, number):
            self.number = number

    sizes = []

    def from_elt(cont, size, x, spec):
        sizes.append(size)
        return Box(cont(size, x.data, 0))

    register_box(
        str,
        Count,
        lambda cont, get_idx, x, spec: Box(cont(x.data, 0) * 10 + get_idx()),
        from_elt,
        lambda count: torch.arange(count.number),
    )
    three = Count(3)
    mapped = tr.vmap(lambda x: x, "rows", "rows", axis_size=three)
    assert mapped(Box(torch.arange(3))).data.tolist() == [0, 11, 22]
    assert sizes == [three]
    with pytest.raises(AxisError, match="inconsistent sizes"):
        mapped(Box(torch.arange(4)))


def test_a_container_is_mapped_along_its_spec_alone(register_box):
    register_box(str, int, lambda cont, get_idx, x, spec: x, lambda cont, size, x, spec: x)
    with pytest.raises(AxisTypeError, match=r"0 as the axis of .* type Box: .* along a str"):
        tr.vmap(lambda x: x)(Box(torch.arange(3)))
