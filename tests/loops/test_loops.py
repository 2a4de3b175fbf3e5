"""`while_loop` and `scan` beside the same loops in plain Python."""

import contextlib

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import assert_same
from torchremat.errors import ArgumentTypeError, ArgumentValueError, EffectError
from torchremat.measure import LiveBytes

ROWS, WIDTH = 3, 4
STATE = ROWS * WIDTH * 8  # bytes


@pytest.fixture
def w():
    torch.manual_seed(0)
    return torch.randn(WIDTH, WIDTH, dtype=torch.double, requires_grad=True)


@pytest.fixture
def h0():
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH, dtype=torch.double, requires_grad=True)


@pytest.fixture
def xs():
    torch.manual_seed(2)
    return torch.randn(9, ROWS, WIDTH, dtype=torch.double, requires_grad=True)


def plain_scan(f, init, xs, *, reverse=False):
    state, results = init, []
    for x in xs.flip(0) if reverse else xs:
        state, result = f(state, x)
        results.append(result)
    if reverse:
        results.reverse()
    return state, tuple(torch.stack(column) for column in zip(*results, strict=True))


def loss_of(result):
    last, (first, second) = result
    return last.sum() + first.square().sum() + second.prod()


# --- values and gradients, to the bit ------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, 0, "100B", 3 * STATE, "1MiB"])
@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_a_while_loop_has_the_bits_of_the_loop_written_out(steps, budget, w, h0):
    def body(state):
        number, h = state
        return number + 1, torch.tanh(h @ w)

    number, h = tr.while_loop(lambda state: state[0] < steps, body, (0, h0), budget=budget)
    expected = h0
    for _ in range(steps):
        expected = torch.tanh(expected @ w)
    assert number == steps
    assert_same(h, expected)
    assert_same(torch.autograd.grad(h.sum(), [w, h0]), torch.autograd.grad(expected.sum(), [w, h0]))


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_has_the_bits_of_the_loop_written_out(reverse, w, h0, xs):
    def f(h, x):
        h = torch.tanh(h @ w + x)
        return h, (2 * h, x.sum())

    found, expected = tr.scan(f, h0, xs, reverse=reverse), plain_scan(f, h0, xs, reverse=reverse)
    assert_same(found, expected)
    wrt = [w, h0, xs]
    assert_same(
        torch.autograd.grad(loss_of(found), wrt), torch.autograd.grad(loss_of(expected), wrt)
    )


def test_states_and_slices_may_be_trees_with_numbers_and_constants(w, xs):
    def f(state, x):
        h = torch.tanh(state["h"] @ w + x["a"])
        return {"h": h, "count": state["count"] + 1, "name": state["name"]}, None

    init = {"h": torch.zeros(ROWS, WIDTH, dtype=torch.double), "count": 0, "name": "state"}
    last, results = tr.scan(f, init, {"a": xs})
    assert results is None
    assert (last["count"].item(), last["name"]) == (9, "state")
    assert torch.autograd.grad(last["h"].sum(), xs)[0].abs().min() > 0


def test_a_loop_without_slices_runs_as_often_as_it_is_told(w):
    last, powers = tr.scan(lambda h, _: (h @ w, h), torch.eye(4, dtype=torch.double), length=5)
    assert_same(last, torch.linalg.matrix_power(w, 5), close=True)
    assert powers.shape == (5, 4, 4)


def test_the_body_of_a_loop_that_ends_at_once_does_not_run(h0):
    def body(h):
        raise AssertionError

    assert_same(tr.while_loop(lambda h: False, body, h0), h0)


def test_the_body_may_branch_on_values(h0):
    def body(h):
        return h / 2 if h.abs().max() > 0.1 else h * 0

    last = tr.while_loop(lambda h: h.abs().max() > 1e-3, body, h0)
    assert last.abs().max() == 0
    assert_same(torch.autograd.grad(last.sum(), h0)[0], torch.zeros_like(h0))


@pytest.mark.parametrize("context", ["plain", "dropout", "autocast", "no_grad"])
def test_steps_run_again_as_they_ran(context, h0, xs):
    torch.manual_seed(4)
    layer, drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3 if context == "dropout" else 0.0)
    inputs, first = xs.float().detach().requires_grad_(), h0.detach().float()

    def f(h, x):
        h = torch.tanh(drop(layer(h)) + x).float()
        with torch.no_grad() if context == "no_grad" else contextlib.nullcontext():
            return h, (h * 1, x.sum())

    found = []
    for loop in (tr.scan, plain_scan):
        torch.manual_seed(5)
        cast = torch.autocast("cpu", torch.bfloat16, enabled=context == "autocast")
        with cast, torch.autocast("cpu", cache_enabled=False):
            result = loop(f, first, inputs)
        after = torch.rand(1)
        gradients = torch.autograd.grad(loss_of(result), [inputs, *layer.parameters()])
        found.append((result, after, gradients, torch.rand(1)))
    # autocast casts a weight anew in each step of a loop: its gradient is summed in float32
    assert_same(found[0], found[1], close=context == "autocast")


def test_later_steps_that_draw_draw_the_same_again(h0):
    def f(state, _):
        number, h = state
        return (number + 1, h.sin() * torch.rand_like(h) if number > 2 else h.cos()), None

    found = []
    for budget in (0, "1MiB"):
        torch.manual_seed(0)
        (_, last), _ = tr.scan(f, (0, h0), length=9, budget=budget)
        found.append((last, torch.autograd.grad(last.sum(), h0), torch.rand(1)))
    assert_same(*found)
    torch.manual_seed(0)
    state = (0, h0)
    for _ in range(9):
        state, _ = f(state, None)
    assert_same(found[0][:2], (state[1], torch.autograd.grad(state[1].sum(), h0)))


# --- memory --------------------------------------------------------------------------------------


def peak_of(run):
    run()
    with LiveBytes() as memory:
        run()
    return memory.peak


def test_memory_grows_with_the_logarithm_of_the_steps():
    w = torch.randn(32, 32, requires_grad=True)
    h0 = torch.zeros(64, 32)

    def run(steps, budget=None):
        state = tr.while_loop(
            lambda s: s[0] < steps,
            lambda s: (s[0] + 1, torch.tanh(s[1] @ w)),
            (0, h0),
            budget=budget,
        )
        state[1].sum().backward()

    few, many = (peak_of(lambda n=n: run(n)) for n in (32, 512))
    assert many - few < 30 * h0.nbytes  # eight more states, as much for steps; 480 more steps
    assert peak_of(lambda: run(512, budget=4 * h0.nbytes)) < few


def test_what_needs_no_gradient_takes_no_memory_for_one():
    xs, h0 = torch.randn(200, 16, 32), torch.zeros(16, 32)
    w = torch.randn(32, 32, requires_grad=True)

    def run():
        tr.scan(lambda h, x: (torch.tanh(h @ w + x), None), h0, xs)[0].sum().backward()

    assert peak_of(run) < xs.nbytes / 3
    with torch.no_grad(), LiveBytes() as memory:
        tr.scan(lambda h, x: (torch.tanh(h @ w + x), None), h0, xs)
    assert memory.peak < 6 * h0.nbytes + w.nbytes


# --- what cannot be ------------------------------------------------------------------------------


def test_a_state_of_another_kind_is_refused_by_name(h0):
    with pytest.raises(ArgumentTypeError, match=r"state\['h'\] was float64\[3, 4\] on cpu, and"):
        tr.while_loop(lambda s: True, lambda s: {"h": s["h"].float()}, {"h": h0})
    with pytest.raises(ArgumentTypeError, match="a state like the first one: the structure must"):
        tr.while_loop(lambda s: True, lambda s: (s, s), h0)
    with pytest.raises(ArgumentTypeError, match="must return a pair"):
        tr.scan(lambda h, x: h, h0, length=3)


def test_a_step_that_writes_is_refused(h0, w):
    total = torch.zeros(ROWS, WIDTH, dtype=torch.double)
    with pytest.raises(EffectError, match="writes to its state"):
        tr.while_loop(lambda h: True, lambda h: h.mul_(2), h0.detach())
    with pytest.raises(EffectError, match="writes to a tensor that it closes over"):
        tr.scan(lambda h, x: (h, total.add_(h).sum()), h0.detach(), length=3)


def test_a_later_step_that_writes_is_refused(h0):
    total = torch.zeros(ROWS, WIDTH, dtype=torch.double)

    def f(state, _):
        number, h = state
        if number == 2:
            total.add_(h)
        return (number + 1, h.sin()), None

    with pytest.raises(EffectError, match="writes to a tensor that it closes over"):
        tr.scan(f, (0, h0), length=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"xs": None}, "give xs, or length"),
        ({"xs": torch.zeros(0, 4)}, "at least one step"),
        ({"xs": torch.tensor(1.0)}, "no dimension"),
        ({"xs": torch.zeros(3, 4), "length": 4}, r"several numbers of steps, \[3, 4\]"),
        ({"length": 2.5}, "length=2.5 must be an int"),
        ({"length": True}, "length=True must be an int"),
        ({"length": 3, "budget": "50%"}, "is not a number of bytes"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, h0):
    with pytest.raises((ArgumentValueError, TypeError), match=message):
        tr.scan(lambda h, x: (h, None), h0, **arguments)


def test_functions_must_be_functions(h0):
    with pytest.raises(ArgumentTypeError, match="cond_fun=3 must be a function"):
        tr.while_loop(3, lambda h: h, h0)
    with pytest.raises(ArgumentTypeError, match="cond_fun returned None"):
        tr.while_loop(lambda h: None, lambda h: h, h0)
    with pytest.raises(ArgumentTypeError, match="f=None must be a function"):
        tr.scan(None, h0, length=3)
