"""Donated arguments: their storage is an output's, or freed, and nobody reads it by mistake."""

import copy
import gc
import operator
import pickle
import warnings
import weakref

import numpy
import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import assert_same
from tests.programs import Program, inputs
from torchremat.compile.jit.donated_tensors import DonatedTensor
from torchremat.compile.jit.donation_plan import out_variant
from torchremat.errors import DonationError, DonationWarning
from torchremat.measure import LiveBytes


@pytest.fixture(params=["eager", "inductor"])
def backend(request):
    return request.param


@pytest.fixture(autouse=True)
def _random():
    torch.manual_seed(0)


def places(tree):
    return [t.data_ptr() for t in torch.utils._pytree.tree_leaves(tree)]


def sgd(params, grads):
    return {k: params[k] - 0.1 * grads[k] for k in params}


def momentum(p, m, g):
    m_new = 0.9 * m + g
    return p - 0.1 * m_new, m_new


# --- storage goes to outputs ---------------------------------------------------------------------


def test_a_tree_is_updated_in_the_storage_that_it_had(backend):
    step = tr.jit(sgd, donate_argnums=0, backend=backend)
    params = {"w": torch.randn(30, 4), "b": torch.randn(30)}
    grads = {"w": torch.randn(30, 4), "b": torch.randn(30)}
    expected, where = sgd(params, grads), places(params)
    first = params
    for _ in range(3):
        expected_next = sgd(expected, grads)
        params = step(params, grads)
        assert places(params) == where
        for k, value in expected.items():
            torch.testing.assert_close(params[k], value)
        expected = expected_next
    assert all(isinstance(t, DonatedTensor) for t in first.values())
    assert places(grads)  # nothing happened to these


def test_two_outputs_that_read_both_arguments_are_written_over_them(backend):
    args = [torch.randn(1000) for _ in range(3)]
    expected, where = momentum(*args), places(args[:2])
    found = tr.jit(momentum, donate_argnums=(0, 1), backend=backend)(*args)
    torch.testing.assert_close(found, expected)
    assert places(found) == where


@pytest.mark.parametrize(
    "fun",
    [
        lambda a, b: (b + 1, a * 2),
        lambda a, b: (b + 0, a * 1),
        lambda a, b: (b, a),
        lambda a, b: (b.clone(), a.clone()),
        lambda a, b: (a * 2 - b, b * 1),
        lambda a, b: (b * 1, a.sin() + b),
        lambda a, b: (b.flip(0), a.flip(0)),
    ],
)
@pytest.mark.sampled(2)
def test_arguments_swap_their_storage_without_mixing_their_values(backend, fun):
    a, b = torch.randn(50), torch.randn(50)
    expected = fun(a.clone(), b.clone())
    found = tr.jit(fun, donate_argnums=(0, 1), backend=backend)(a, b)
    torch.testing.assert_close(found, expected)


def test_a_product_goes_to_a_tensor_that_is_read_before_it(backend):
    x, w = torch.randn(16, 16), torch.randn(16, 16)
    expected, where = (x.sum(), w @ w), x.data_ptr()
    fun = tr.jit(lambda x, w: (x.sum(), w @ w), donate_argnums=0, backend=backend)
    found = fun(x, w)
    torch.testing.assert_close(found, expected)
    if backend == "eager":  # inductor puts no product into an argument
        assert found[1].data_ptr() == where


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: x.exp().sum(-1, keepdim=True) + x,
        lambda x: x.t() + 1,
        lambda x: torch.softmax(x, -1),
        lambda x: x - x.mean(),
        lambda x: x.cumsum(0),
        lambda x: torch.sort(x).values,
        lambda x: x.flip(0) * x,
        lambda x: (x + 1).reshape(-1),
        lambda x: (x.view(-1)[1:].sum() + x, x[0].clone()),
        lambda x: torch.where(x > 0, x.t(), x),
    ],
)
@pytest.mark.sampled(3)
def test_values_are_right_whatever_reads_the_argument(backend, fun):
    x = torch.randn(12, 12)
    expected = fun(x)
    found = tr.jit(fun, donate_argnums=0, backend=backend)(x.clone())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("fun", [lambda x: x, lambda x: x.t(), lambda x: (x.view(-1), x.sum())])
def test_an_argument_that_is_returned_keeps_its_storage(backend, fun):
    x = torch.randn(4, 4)
    expected, where = fun(x.clone()), x.data_ptr()
    found = tr.jit(fun, donate_argnums=0, backend=backend)(x)
    torch.testing.assert_close(found, expected)
    assert places(found)[0] == where
    assert isinstance(x, DonatedTensor)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("grad_enabled", [False, True])
@pytest.mark.sampled(3)
def test_random_programs_compute_the_same_to_the_bit(seed, grad_enabled):
    plain, donating = Program(seed).without_checkpoints(), Program(seed)
    jitted = tr.jit(lambda *args: donating(*args), donate_argnums=(0, 1, 2), backend="eager")
    given = inputs(seed)
    with torch.set_grad_enabled(grad_enabled), warnings.catch_warnings():
        warnings.simplefilter("ignore", DonationWarning)
        torch.manual_seed(seed)
        expected = plain(*inputs(seed))
        torch.manual_seed(seed)
        try:
            found = jitted(*given)
        except DonationError as error:
            assert grad_enabled and "needed for the backward pass" in str(error)
            return
    assert_same(found, expected)


def test_bytes_alive_do_not_grow_by_an_update(backend):
    step = tr.jit(sgd, donate_argnums=0, backend=backend)
    grads = {"w": torch.randn(1000)}
    step({"w": torch.randn(1000)}, grads)
    with LiveBytes() as memory:
        params = {"w": torch.randn(1000)}
        for _ in range(3):
            params = step(params, grads)
    assert memory.live == 4000
    if backend == "eager":
        assert memory.peak == 8000  # 0.1 * grads beside the parameters


def test_storage_that_no_output_is_written_to_is_freed_after_its_last_use():
    def fun(x, w):
        return torch.sort(x @ w).values

    w = torch.randn(50, 50)
    plain, donating = (tr.jit(fun, donate_argnums=numbers, backend="eager") for numbers in ((), 0))
    peaks = []
    for jitted in (plain, donating):
        jitted(torch.randn(50, 50), w)
        with LiveBytes() as memory:
            x = torch.randn(50, 50)
            jitted(x, w)
        peaks.append(memory.peak)
    assert peaks[0] - peaks[1] == 50 * 50 * 4


def test_what_is_returned_is_no_view_and_can_be_donated_again(backend):
    step = tr.jit(lambda x: (x + 1) * 2, donate_argnums=0, backend=backend)
    y = step(torch.ones(5))
    assert not y._is_view()
    assert y._version == 0
    z = step(y)
    assert z.tolist() == [10.0] * 5


def test_outputs_beside_views_are_no_views(backend):
    step = tr.jit(lambda x, y: (x * 2, y.view(-1)), donate_argnums=0, backend=backend)
    x, y = torch.ones(2, 2), torch.ones(2, 2)
    where = x.data_ptr()
    x, seen = step(x, y)
    assert x.data_ptr() == where
    assert not x._is_view()
    x, _ = step(x, y)
    assert x.tolist() == [[4.0, 4.0]] * 2
    if backend == "eager":  # what inductor returns is unknown to autograd
        seen.add_(1)
        assert y._version == 1


def test_in_inference_mode_arguments_are_written_over(backend):
    step = tr.jit(lambda x: x * 2, donate_argnums=0, backend=backend)
    with torch.inference_mode():
        x = torch.ones(3)
        where = x.data_ptr()
        x = step(step(x))
    assert x.data_ptr() == where
    assert x.tolist() == [4.0] * 3
    with pytest.raises(DonationError, match="made in inference mode, which is off"):
        step(x)


def test_an_argument_beside_others_that_require_gradients_is_written_over(backend):
    step = tr.jit(lambda m, x, w: (0.9 * m, (x * w).sum()), donate_argnums=0, backend=backend)
    m, x = torch.ones(6), torch.ones(6)
    w = torch.ones(6, requires_grad=True)
    where = m.data_ptr()
    m, loss = step(m, x, w)
    loss.backward()
    assert m.data_ptr() == where
    assert w.grad.tolist() == x.tolist()


# --- which arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"donate_argnums": 1}, {"donate_argnames": "y"}])
@pytest.mark.parametrize("call", [lambda f, x, y: f(x, y), lambda f, x, y: f(x=x, y=y)])
def test_a_donated_argument_may_be_passed_by_position_or_by_name(options, call):
    fun = tr.jit(lambda x, y: x + y, backend="eager", **options)
    x, y = torch.ones(3), torch.ones(3)
    call(fun, x, y)
    assert isinstance(y, DonatedTensor)
    assert x.tolist() == [1.0] * 3


def test_static_arguments_before_donated_ones_do_not_count():
    fun = tr.jit(lambda mode, n, x: x * n, static_argnums=(0, 1), donate_argnums=2, backend="eager")
    x = torch.ones(3)
    assert fun("a", 3, x).tolist() == [3.0] * 3
    assert isinstance(x, DonatedTensor)


def test_methods_donate_by_the_numbers_of_the_function():
    class Model:
        @tr.jit(donate_argnums=1, backend="eager")
        def update(self, x):
            return x + 1

    x = torch.ones(3)
    assert Model().update(x).tolist() == [2.0] * 3
    assert isinstance(x, DonatedTensor)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"static_argnums": 0, "donate_argnums": 0}, "cannot intersect"),
        ({"static_argnums": 0, "donate_argnums": (1, 0)}, "cannot intersect"),
        ({"static_argnames": "x", "donate_argnames": ("x",)}, "cannot intersect"),
        ({"static_argnames": "x", "donate_argnums": 0}, "cannot intersect"),
        ({"donate_argnums": 3}, r"donate_argnums=\(3,\), but only accepts 2 positional arguments"),
        ({"static_argnums": -3}, r"static_argnums=\(-3,\), but only accepts 2 positional argum"),
        ({"donate_argnames": "z"}, r"donate_argnames contains \['z'\]"),
    ],
)
def test_what_is_asked_of_which_argument_is_checked(options, message):
    with pytest.raises(ValueError, match=message):
        tr.jit(lambda x, y: x, backend="eager", **options)


def test_numbers_of_arguments_are_ints():
    with pytest.raises(TypeError, match="donate_argnums must be an int or a tuple of ints"):
        tr.jit(lambda x: x, donate_argnums="x", backend="eager")


# --- unusable ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fun", [lambda x: x.sum(), lambda x: x.double(), lambda x: x[:2] * 1, lambda x: x.add_(1).sum()]
)
@pytest.mark.sampled(2)
def test_what_no_output_can_use_warns_and_stays(backend, fun):
    x = torch.ones(4)
    jitted = tr.jit(fun, donate_argnums=0, backend=backend)
    with pytest.warns(DonationWarning, match=r"not usable: x: f32\[4\]") as caught:
        jitted(x)
    assert caught[0].filename == __file__
    assert type(x) is torch.Tensor
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jitted(x)  # said once


def test_an_operand_of_zero_or_one_is_written_over_where_it_changes_something(backend):
    for fun in (lambda x: x + 1, lambda x: x * 2 + 1, lambda x: x * 0, lambda x: x - 1):
        x = torch.full((4,), 3.0)
        place = x.data_ptr()
        found = tr.jit(fun, donate_argnums=0, backend=backend)(x)
        assert found.data_ptr() == place
        assert torch.equal(found, fun(torch.full((4,), 3.0)))


def test_each_output_serves_one_argument():
    a, b = torch.ones(3), torch.ones(3)
    with pytest.warns(DonationWarning, match=r"y: f32\[3\]"):
        tr.jit(lambda x, y: x + y, donate_argnums=(0, 1), backend="eager")(a, b)
    assert isinstance(a, DonatedTensor)
    assert type(b) is torch.Tensor


def test_inside_another_transformation_nothing_is_donated():
    step = tr.jit(lambda x: x * 2, donate_argnums=0, backend="eager")
    x = torch.ones(3)
    assert torch.func.vmap(step)(x).tolist() == [2.0] * 3
    assert tr.checkpoint(lambda x: step(x) * 2)(x).tolist() == [4.0] * 3
    assert torch.func.grad(lambda x: step(x).sum())(x).tolist() == [2.0] * 3
    assert tr.jit(lambda x: step(x) * 2, backend="eager")(x).tolist() == [4.0] * 3
    assert tr.eval_graph(step.trace(x), x).tolist() == [2.0] * 3
    assert type(x) is torch.Tensor
    assert x.tolist() == [1.0] * 3


# --- refused -------------------------------------------------------------------------------------


def parameter():
    x = nn.Parameter(torch.ones(3), requires_grad=False)
    return x, x


def view():
    base = torch.ones(2, 3)
    return base[0], base


def base_of_a_view():
    base = torch.ones(3)
    return base, base[1:]


def detached():
    x = torch.ones(3)
    return x, x.detach()


def with_an_array():
    x = torch.ones(3)
    return x, x.numpy()


def of_an_array():
    return torch.from_numpy(numpy.ones(3, dtype="float32")), None


def saved_by_autograd():
    x = torch.ones(3)
    return x, x * torch.ones(3, requires_grad=True)


def requires_grad():
    return torch.ones(3, requires_grad=True), None


REFUSED = {
    parameter: "it is a parameter",
    view: "it is a view of another tensor",
    base_of_a_view: "something else refers to it: a view of it",
    detached: "another tensor or an array shares its storage",
    with_an_array: "another tensor or an array shares its storage",
    of_an_array: "its memory is not PyTorch's alone",
    saved_by_autograd: "what autograd saves for a backward pass",
    requires_grad: "needed for the backward pass",
}


@pytest.mark.parametrize("make", REFUSED)
def test_a_tensor_that_others_need_is_refused(make):
    step = tr.jit(lambda x: x + 1, donate_argnums=0, backend="eager")
    x, other = make()
    before = x.detach().clone()
    rule = rf"jit\(.*\) at test_donation.py:\d+ .* its argument x \(f32\[3\]\): .*{REFUSED[make]}"
    with pytest.raises(DonationError, match=rule):
        step(x)
    assert torch.equal(x.detach(), before)
    del other


def test_once_the_others_are_gone_it_can_be_donated():
    step = tr.jit(lambda x: x + 1, donate_argnums=0, backend="eager")
    for make in (base_of_a_view, detached, saved_by_autograd):
        x, other = make()
        del other
        assert step(x).tolist() == [2.0] * 3


def test_the_same_tensor_twice_is_refused():
    x = torch.ones(3)
    with pytest.raises(DonationError, match="the same tensor is passed twice"):
        tr.jit(lambda x, y: x + y, donate_argnums=0, backend="eager")(x, x)
    captured = torch.ones(3)
    with pytest.raises(DonationError, match="the same tensor is passed twice"):
        tr.jit(lambda x: x + captured, donate_argnums=0, backend="eager")(captured)


def test_what_the_backward_pass_reads_is_refused():
    fun = tr.jit(lambda x, w: x * w, donate_argnums=0, backend="eager")
    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    with pytest.raises(DonationError, match="needed for the backward pass"):
        fun(x, w)
    with torch.no_grad():
        assert fun(x, w).tolist() == [1.0] * 3
    assert isinstance(x, DonatedTensor)


# --- later uses ----------------------------------------------------------------------------------


USES = {
    "add": lambda d: d + 1,
    "other operand": lambda d: torch.ones(3) + d,
    "item": lambda d: d[0].item(),
    "float": lambda d: float(d[0]),
    "tolist": operator.methodcaller("tolist"),
    "numpy": operator.methodcaller("numpy"),
    "asarray": numpy.asarray,
    "from_dlpack": torch.from_dlpack,
    "numpy's from_dlpack": numpy.from_dlpack,
    "data_ptr": operator.methodcaller("data_ptr"),
    "storage": operator.methodcaller("untyped_storage"),
    "detach": operator.methodcaller("detach"),
    "data": operator.attrgetter("data"),
    "view": lambda d: d.view(-1),
    "index": lambda d: d[:1],
    "write": operator.methodcaller("zero_"),
    "written to another": lambda d: torch.zeros(3).copy_(d),
    "iterate": list,
    "bool": bool,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.tensor": lambda d: torch.tensor(d),
    "as_subclass": lambda d: d.as_subclass(torch.Tensor),
    "operator": torch.ops.aten.sin.default,
    "module": nn.Linear(3, 3),
    "parameter": nn.Parameter,
    "vmap": torch.func.vmap(torch.sin),
    "grad": torch.func.grad(torch.sum),
    "checkpoint": tr.checkpoint(torch.sin),
    "jit": tr.jit(torch.sin, backend="eager"),
    "donate again": tr.jit(torch.sin, donate_argnums=0, backend="eager"),
}


def test_a_donated_tensor_has_no_memory_to_hand_on():
    x = torch.ones(3)
    tr.jit(lambda x: x + 1, donate_argnums=0, backend="eager")(x)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(x)


@pytest.mark.parametrize("use", USES)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_values_of_a_donated_tensor_cannot_be_used(use):
    def step(x):
        return x + 1

    x = torch.ones(3)
    tr.jit(step, donate_argnums=0, backend="eager")(x)
    named = r"f32\[3\] that was donated to jit\(.*step\) at test_donation.py:\d+"
    with pytest.raises(RuntimeError, match=named):
        USES[use](x)


def test_what_a_donated_tensor_is_can_still_be_read():
    x = torch.ones(2, 3, dtype=torch.float64)
    identity = id(x)
    reference = weakref.ref(x)
    tr.jit(lambda x: x + 1, donate_argnums=0, backend="eager")(x)
    assert (x.shape, x.dtype, x.device) == ((2, 3), torch.float64, torch.device("cpu"))
    assert (x.ndim, x.numel(), x.size(1), len(x), x.requires_grad) == (2, 6, 3, 2, False)
    assert isinstance(x, torch.Tensor)
    assert reference() is x
    assert id(x) == identity
    assert {x: 1}[x] == 1
    for text in (repr(x), str(x), f"{x}"):
        assert text.startswith("DonatedTensor(f64[2,3], donated to jit(")


def test_a_call_that_fails_has_used_up_what_it_was_given():
    step = tr.jit(lambda x, i: x.index_select(0, i) + x, donate_argnums=0, backend="eager")
    x = torch.ones(3)
    with pytest.raises(IndexError):
        step(x, torch.tensor([7]))
    assert isinstance(x, DonatedTensor)


def test_dropping_what_is_returned_frees_the_storage():
    step = tr.jit(lambda x: x + 1, donate_argnums=0, backend="eager")
    step(torch.ones(3))
    with LiveBytes() as memory:
        x = torch.ones(100)
        y = step(x)
        del y
        gc.collect()
    assert memory.live == 0
    assert x.shape == (100,)


def test_operators_have_the_variants_that_write_their_result_elsewhere():
    aten = torch.ops.aten
    assert out_variant(aten.mm.default) is aten.mm.out
    assert out_variant(aten.add.Tensor) is aten.add.out
    assert (
        out_variant(aten.add.Scalar) is None or out_variant(aten.add.Scalar) is aten.add.Scalar_out
    )
    assert out_variant(aten.view.default) is None
    assert out_variant(aten.topk.default) is None
    assert out_variant(operator.getitem) is None
