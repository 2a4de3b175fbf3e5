"""`pmap` in one process, and of several that talk through gloo: `pmap_programs.py`."""

import pytest
import torch

import torchremat as tr
from tests.parallel.pmap_programs import CHECKS, FAULTS, PLAN_CHECKS, SLOW_CHECKS
from tests.parallel.processes import needs_gloo
from torchremat.batching import Pile, pile_axis
from torchremat.errors import (
    AxisError,
    AxisNameError,
    AxisTypeError,
    DeviceError,
)
from torchremat.parallel import mesh_axes

# processes that start together are slow to start, so a set of them runs many checks
SETS = {
    "values": [tuple(CHECKS)],
    "plans": [tuple(PLAN_CHECKS)],
    "transformed": [tuple(SLOW_CHECKS)],
    "faults": [(name,) for name in FAULTS],
}
CASES = [
    pytest.param(which, size, name, marks=slow, id=f"{name}-{size}")
    for size, which, slow in (
        (2, "values", ()),
        (2, "plans", ()),
        (2, "faults", ()),
        (4, "values", pytest.mark.slow),
        (4, "plans", pytest.mark.slow),
        (4, "transformed", pytest.mark.slow),
        (4, "faults", pytest.mark.slow),
    )
    for names in SETS[which]
    for name in names
]


@needs_gloo
@pytest.mark.parametrize(("which", "size", "name"), CASES)
def test_processes(run_once, which, size, name):
    for found in run_once("tests.parallel.pmap_programs", size, *SETS[which]):
        assert found[name] == "ok", found[name]


# --- one process ---------------------------------------------------------------------------------


@pytest.fixture
def four_devices(monkeypatch):
    monkeypatch.setattr(tr.config, "num_cpu_devices", 4)
    assert [str(device) for device in tr.local_devices(backend="cpu")] == [
        f"cpu:{i} of process 0" for i in range(4)
    ]


def test_one_device_runs_the_function_as_it_is():
    def f(x):
        seen.append(x.sum().item())  # which no `vmap` allows
        return tr.psum(x, "i") + tr.axis_index("i"), tr.axis_size("i"), None

    seen = []
    y, size, nothing = tr.pmap(f, "i")(torch.ones(1, 3))
    assert (y.tolist(), size.tolist(), nothing, seen) == ([[1.0] * 3], [1], None, [3.0])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_several_devices_map(four_devices, size):
    x = torch.arange(3.0 * size).reshape(size, 3).requires_grad_()
    f = lambda x: x / tr.psum(x.exp(), "i")  # noqa: E731
    torch.testing.assert_close(tr.pmap(f, "i")(x), x / x.exp().sum(0))
    assert tr.pmap(torch.sin)(x).shape == (size, 3)


def test_devices_that_nobody_gives_anything_get_zeros(four_devices):
    send = tr.pmap(lambda x: tr.ppermute(x, "i", [(0, 1), (3, 0)]), axis_name="i")
    x = torch.arange(1.0, 5.0, requires_grad=True)
    y = send(x)
    assert y.tolist() == [4.0, 1.0, 0.0, 0.0]
    y.sum().backward()
    assert x.grad.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_a_pmap_inside_takes_the_devices_that_are_left(four_devices):
    x = torch.arange(4.0).reshape(2, 2)
    f = tr.pmap(tr.pmap(lambda a: (tr.psum(a, "i"), tr.psum(a, ("i", "j"))), "j"), "i")
    columns, everything = f(x)
    assert (columns.tolist(), everything.unique().tolist()) == ([[2.0, 4.0]] * 2, [6.0])
    with pytest.raises(AxisError, match="requires 4 logical devices, but only 2 are available"):
        f(torch.ones(2, 4))


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("out", [0, 1, -1])
@pytest.mark.parametrize("outer", [0, 1, 3, -1])
def test_axes_within_vmap(four_devices, axis, out, outer):
    """JAX's arithmetic: the axis of the batch is none for the function that is mapped."""
    x = torch.randn(2, 5, 3, 4).movedim(1, outer)  # 5 calls, of 2, 3 or 4 examples
    f = lambda x: x.sin() + tr.psum(x, "i")  # noqa: E731
    given = {"in_axes": axis, "out_axes": out, "axis_name": "i"}
    found = tr.vmap(tr.pmap(f, **given), in_axes=outer)(x)
    torch.testing.assert_close(found, tr.vmap(tr.vmap(f, **given), in_axes=outer)(x))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tr.pmap(3), TypeError, "pmap takes a function or an nn.Module, but .* 3"),
        (lambda: tr.pmap(abs, in_axes=1.5), AxisTypeError, "pmap in_axes must be an int, None"),
        (lambda: tr.pmap(abs, out_axes="i"), AxisTypeError, "pmap out_axes must be an int"),
        (
            lambda: tr.pmap(abs, devices=[]),
            ValueError,
            "'devices' argument to pmap must be non-empty, or None.",
        ),
        (lambda: tr.pmap(abs, devices=["cpu"] * 2), DeviceError, "process 0 has only 1 of that"),
        (
            lambda: tr.pmap(abs, static_broadcasted_argnums=0, donate_argnums=(0, 1)),
            ValueError,
            r"cannot intersect, and both contain \[0\]",
        ),
        (lambda: tr.pmap(abs, donate_argnums="x"), TypeError, "donate_argnums must be an int"),
        (
            lambda: tr.pmap(lambda x: x)(torch.ones(3, 2)),
            AxisError,
            r"pmap\(<lambda>\) at test_pmap.py:.* requires 3 logical devices, but only 1 is avail",
        ),
        (
            lambda: tr.pmap(lambda x: x, devices=["cpu"])(torch.ones(2)),
            AxisError,
            "must equal the number of local devices passed to pmap. Got axis_size=2, num_local_d",
        ),
        (
            lambda: tr.pmap(lambda x, y: x)(torch.ones(1), torch.ones(2)),
            AxisError,
            "pmap got inconsistent sizes for array axes to be mapped",
        ),
        (lambda: tr.pmap(lambda: 1)(), AxisError, "pmap wrapped function must be passed at least"),
        (
            lambda: tr.pmap(lambda x: x, in_axes=None)(torch.ones(1)),
            AxisError,
            "pmap must have at least one non-None value in in_axes",
        ),
        (
            lambda: tr.pmap(lambda x: "text")(torch.ones(1)),
            AxisTypeError,
            "returns 'text' .str. where out_axes is 0",
        ),
        (
            lambda: tr.pmap(lambda x: x, out_axes=2)(torch.ones(1)),
            AxisError,
            "was given 2 in out_axes for an output of shape",
        ),
        (
            lambda: tr.pmap(lambda x, n: x, static_broadcasted_argnums=1)(torch.ones(1)),
            ValueError,
            "static_broadcasted_argnums=.1,. but was called with only 1 positional argument. All",
        ),
        (
            lambda: tr.pmap(torch.sin, in_axes=pile_axis)(Pile.from_list([torch.ones(3)])),
            AxisTypeError,
            "was given a Pile to map along .* at test_pmap.py:.*. Devices get examples of one sha",
        ),
        (
            lambda: tr.pmap(torch.sin, out_axes={"a": pile_axis}),
            AxisTypeError,
            "was given .* in out_axes at test_pmap.py:.*: the examples that devices give back",
        ),
        (
            lambda: tr.pmap(lambda x: tr.psum(x, "zz"), "i")(torch.ones(1)),
            AxisNameError,
            "unbound axis name: zz.*pmap.*mesh_axes.*the axes in scope are 'i'",
        ),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_mesh_without_names_has_no_axes():
    class Unnamed:
        mesh_dim_names = None

    with pytest.raises(AxisNameError, match="have no names: init_device_mesh"):
        mesh_axes(Unnamed())


def test_dropping_a_function_frees_it():
    import gc
    import weakref

    def f(p):
        return p + 1

    mapped = tr.pmap(f, donate_argnums=0)
    mapped(torch.ones(1, 3))
    gone = weakref.ref(f)
    del f, mapped
    gc.collect()
    assert gone() is None
