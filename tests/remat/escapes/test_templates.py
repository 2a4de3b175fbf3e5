"""Values of a trace that are looked for in what a function leaves behind."""

import types

import torch

import torchremat as tr
from torchremat.remat.escapes.templates import holds_traced


class SeenOnce(dict):
    """A dict that may be looked at once."""

    num_looks = 0

    def values(self):
        self.num_looks += 1
        return super().values()


def test_objects_that_hold_each_other_are_looked_at_once():
    several = [SeenOnce() for _ in range(6)]
    for one in several:
        one.update(enumerate(several))
    assert not holds_traced(several)
    assert [one.num_looks for one in several] == [1] * 6


def nest(value, levels):
    return nest([value], levels - 1) if levels else value


def test_a_value_of_the_trace_is_found_six_levels_down_and_in_a_module_that_is_changed_itself():
    found = {}

    def f(x):
        y = x.sin()
        inner = types.ModuleType("inner")
        inner.value = y
        found.update(
            here=holds_traced(y),
            nested=[holds_traced(nest(y, levels)) for levels in (1, 6, 7)],
            beside=holds_traced([[[0]], {"a": (1, y)}]),
            module=holds_traced(inner),
            package=holds_traced({"inner": inner}),
        )
        return y.cos()

    tr.checkpoint(f)(torch.ones(3, requires_grad=True)).sum().backward()
    expected = {"here": True, "nested": [True, True, False], "beside": True, "module": True}
    assert found == {**expected, "package": False}


def test_what_an_imported_package_imports_is_not_searched():
    package = types.ModuleType("package")
    package.inner = types.ModuleType("package.inner")
    package.inner.parts = SeenOnce(first=SeenOnce())
    state = {"loaded": types.SimpleNamespace(module=None)}

    def f(x):
        state["loaded"].module = package
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    tr.checkpoint(f)(x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
    assert state["loaded"].module is package
    assert package.inner.parts.num_looks == 0
