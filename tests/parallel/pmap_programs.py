"""What processes do together in the tests of `pmap`: see `processes.py`."""

import json
import os
import re
import time

import torch
from torch import distributed, nn
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import torchremat as tr
from torchremat.errors import AxisNameError, NotAvailableError, ProcessError
from torchremat.parallel import process_failures
from torchremat.parallel.agreed_plan import make_once
from torchremat.planning import planner

CHECKS = {}
PLAN_CHECKS = {}
SLOW_CHECKS = {}
FAULTS = {}
PROGRAMS = {}
DOUBLE = torch.double


def check(function):
    CHECKS[function.__name__] = function
    return function


def plan_check(function):
    PLAN_CHECKS[function.__name__] = function
    return function


def slow_check(function):
    SLOW_CHECKS[function.__name__] = function
    return function


def fault(function):
    """A check after which the processes cannot go on."""
    FAULTS[function.__name__] = function
    function.patience = 4
    function.takes_file = function.__name__.startswith("one_that_dies")
    return function


def program(f):
    """A function of one example, whose axis is `i`."""
    PROGRAMS[f.__name__] = f
    return f


def world():
    return distributed.get_rank(), distributed.get_world_size()


def inputs(*shape, dtype=DOUBLE, seed=0):
    """The same in each process: the examples of all."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(world()[1], *shape, dtype=dtype, generator=generator)


def mine(x):
    """The example of this process."""
    rank, _ = world()
    return x[rank : rank + 1].clone()


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


# --- functions of one example: what `vmap` over all examples gives is the oracle ----------------


@program
def psum(x):
    return tr.psum(x.sin(), "i") * x


@program
def psum_of_numbers(x):
    return x * tr.psum(1, "i") + tr.psum({"a": torch.ones(2), "b": None}, "i")["a"].sum()


@program
def pmean(x):
    return x - tr.pmean(x, "i")


@program
def pmax(x):
    return tr.pmax(x, "i") * x + tr.pmin(x.abs(), "i")


@program
def ties(x):
    return tr.pmax(x.sign(), "i") + tr.pmin(torch.zeros_like(x) * x, "i")


@program
def axis_index(x):
    return x * tr.axis_index("i") + tr.axis_size("i")


@program
def all_gather(x):
    weights = torch.arange(1.0, 1 + tr.axis_size("i"), dtype=DOUBLE)
    return tr.all_gather(x * x, "i", axis=1) @ weights + tr.all_gather(x, "i", tiled=True).sum()


@program
def psum_scatter(x):
    y = torch.outer(torch.arange(1.0, 1 + tr.axis_size("i"), dtype=DOUBLE), x)
    return tr.psum_scatter(y.cos(), "i") * x + tr.psum_scatter(
        y.mT.contiguous().exp(), "i", scatter_dimension=1, tiled=True
    ).squeeze(1)


@program
def all_to_all(x):
    y = torch.outer(torch.arange(1.0, 1 + tr.axis_size("i"), dtype=DOUBLE), x)
    z = tr.all_to_all(y.exp(), "i", 0, 1)
    return z.sum(1) * x + tr.all_to_all(y * y, "i", 0, 1, tiled=True).sum()


@program
def ppermute(x):
    n = tr.axis_size("i")
    return tr.ppermute(x * x, "i", [(k, (k + 1) % n) for k in range(n)]) * x


@program
def pshuffle(x):
    return tr.pshuffle(x.exp(), "i", [*range(tr.axis_size("i"))][::-1]) * x


@program
def groups(x):
    n = tr.axis_size("i")
    pairs = [[k, k + n // 2] for k in range(n // 2)]
    y = tr.psum(x.sin(), "i", axis_index_groups=pairs) * x
    return y + tr.all_gather(x * x, "i", axis_index_groups=pairs)[0]


@program
def under_checkpoint(x):
    @tr.checkpoint
    def block(x):
        return (x / tr.psum(x.exp(), "i")).sin() * tr.all_gather(x, "i").sum(0)

    return block(block(x))


@program
def gradient_inside(x):
    return torch.func.grad(lambda x: (tr.psum(x.sin(), "i") * x).sum())(x)


@program
def vmap_inside(x):
    def pair(a, b):
        return tr.psum(a * b, ("i", "j")) + tr.psum(b, "j") * tr.axis_index(("i", "j"))

    return tr.vmap(pair, in_axes=(0, None), axis_name="j")(x, x.sum())


@program
def hidden_name(x):
    return tr.vmap(lambda a: a / tr.psum(a.exp(), "i"), axis_name="i")(x) + tr.psum(x, "i")


@check
def values_and_derivatives():
    """Each program gives what `vmap` over all examples does; so do gradients, to second order."""
    rank, _ = world()
    for name, f in PROGRAMS.items():
        everything = inputs(3)
        x = mine(everything).requires_grad_()
        everything.requires_grad_()
        expected = tr.vmap(f, axis_name="i")(everything)
        y = tr.pmap(f, axis_name="i")(x)
        same(y[0], expected[rank])
        weights = inputs(3, seed=1)
        (g,) = torch.autograd.grad((y * mine(weights)).sum(), x, create_graph=True)
        (g_all,) = torch.autograd.grad((expected * weights).sum(), everything, create_graph=True)
        same(g[0], g_all[rank])
        if g_all.requires_grad:
            (h,) = torch.autograd.grad((g * mine(weights)).sum(), x)
            (h_all,) = torch.autograd.grad((g_all * weights).sum(), everything)
            assert h.shape == (1, 3), name
            same(h[0], h_all[rank])
        tangent = mine(weights)
        f_all, f_one = tr.vmap(f, axis_name="i"), tr.pmap(f, axis_name="i")
        t_all = torch.func.jvp(f_all, (everything.detach(),), (weights,))[1]
        same(torch.func.jvp(f_one, (x.detach(),), (tangent,))[1][0], t_all[rank])


@slow_check
def transformations_around():
    """`torch.func`, checkpoints, graphs and `jit` of a `pmap` are of what this process computes."""
    rank, _ = world()
    everything, weights = inputs(3), inputs(3, seed=1)
    x, w = mine(everything), mine(weights)
    for f in PROGRAMS.values():
        mapped, of_all = tr.pmap(f, axis_name="i"), tr.vmap(f, axis_name="i")
        y = of_all(everything)[rank]
        g = torch.func.grad(lambda x: (of_all(x) * weights).sum())(everything)[rank]
        loss = lambda x: (mapped(x) * w).sum()  # noqa: E731
        same(torch.func.grad(loss)(x)[0], g)
        same(tr.grad(tr.checkpoint(loss))(x)[0], g)
        leaf = x.clone().requires_grad_()
        tr.checkpoint(mapped, policy="full")(leaf).backward(w)
        same(leaf.grad[0], g)
        graph = tr.make_graph(mapped)(x)
        same(tr.eval_graph(graph, x)[0], y)
        jitted = tr.jit(mapped, backend="eager")
        for _ in range(2):
            same(jitted(x)[0], y)


@check
def vmap_around():
    """A batch of calls: the axis of the batch is none that the function sees."""
    rank, _ = world()
    everything = inputs(3, 5)
    for f in PROGRAMS.values():
        expected = tr.vmap(tr.vmap(f, axis_name="i"), in_axes=2, out_axes=1)(everything)
        mapped = tr.vmap(tr.pmap(f, axis_name="i"), in_axes=2, out_axes=1)
        for _ in range(3):  # the third runs a trace
            same(mapped(mine(everything))[0], expected[rank])


@check
def axes():
    _, size = world()
    everything = inputs(2, 3)
    x = mine(everything)
    total = everything.sum(0)
    for axis in (0, 1, 2, -1, -3):
        moved = x.movedim(0, axis)
        for out in (0, 1, 2, -1):
            f = tr.pmap(lambda x: tr.psum(x, "i"), "i", in_axes=axis, out_axes=out)
            same(f(moved), total.unsqueeze(out if out >= 0 else 2))
    f = tr.pmap(
        lambda x, y, *, z: {"a": tr.psum(x + z, "i"), "b": y, "c": tr.axis_size("i"), "d": None},
        "i",
        in_axes=[0, None],
        out_axes={"a": None, "b": 0, "c": 0, "d": None},
    )
    found = f(x, total, z=x)
    same(found["a"], 2 * total)
    same(found["b"], total[None])
    assert found["c"].tolist() == [size]
    assert found["d"] is None


@check
def dtypes():
    rank, size = world()
    rows = [*range(size)][::-1]

    def moved(x):
        found = [tr.all_gather(x, "i"), tr.all_to_all(x, "i", 0, 1), tr.pshuffle(x, "i", rows)]
        if x.dtype is not torch.bool:
            found.append(tr.psum_scatter(x, "i"))
        return [*found, tr.psum(x, "i")]

    def extrema(x):
        return [tr.pmax(x, "i"), tr.pmin(x, "i")]

    for dtype in (
        torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
        torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    ):  # fmt: skip
        everything = (torch.arange(3 * size * size) % 5).reshape(size, size, 3).to(dtype)
        everything = everything * (1 + 2j) if dtype.is_complex else everything
        for f in (moved,) if dtype.is_complex else (moved, extrema):
            expected = tr.vmap(f, axis_name="i")(everything)
            for a, b in zip(tr.pmap(f, "i")(mine(everything)), expected, strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a[0], b[rank]), dtype
    x = torch.tensor([[1.0, torch.nan if rank == 1 else 2.0, torch.nan]])
    assert str(tr.pmap(lambda x: tr.pmax(x, "i"), "i")(x).tolist()) == "[[1.0, nan, nan]]"


@check
def partial_permutation():
    rank, _ = world()
    x = torch.full((1, 2), rank + 1.0, requires_grad=True)
    y = tr.pmap(lambda x: tr.ppermute(x, "i", [(0, 1)]), "i")(x)
    assert y.tolist() == ([[1.0, 1.0]] if rank == 1 else [[0.0, 0.0]])
    y.backward(torch.full((1, 2), 5.0))
    assert x.grad.tolist() == ([[5.0, 5.0]] if rank == 0 else [[0.0, 0.0]])


@check
def collectives_are_not_replayed():
    """A checkpoint keeps what a collective gave, unless the policy insists."""
    calls = []
    plain = tr.batching.collectives.collective_ops.CollectiveOp.over_processes

    def counted(op, *args, **params):
        calls.append(op.name())
        return plain(op, *args, **params)

    def block(x):
        return (x.sin() / tr.psum(x.exp(), "i")).cos()

    def run(policy):
        calls.clear()
        x = mine(inputs(3)).requires_grad_()
        y = tr.pmap(tr.checkpoint(block, policy=policy), "i")(x)
        y.sum().backward()
        return x.grad, list(calls)

    tr.batching.collectives.collective_ops.CollectiveOp.over_processes = staticmethod(counted)
    try:
        kept, of_kept = run(None)
        again, of_again = run(tr.checkpoint_policies.recompute_ops("higher_order.psum"))
        everything, of_everything = run("none")
    finally:
        tr.batching.collectives.collective_ops.CollectiveOp.over_processes = staticmethod(plain)
    same(kept, again)
    same(kept, everything)
    assert of_kept == of_everything == ["psum"] * 2, of_kept  # forward, and the gradient's own
    assert of_again == ["psum"] * 3, of_again

    def functional(x):  # PyTorch's own: the same holds
        return x.sin() * _functional_collectives.all_reduce(x.exp(), "sum", distributed.group.WORLD)

    x = mine(inputs(3)).requires_grad_()
    with CommDebugMode() as plainly:
        functional(x).sum().backward()
    with CommDebugMode() as counts:
        tr.checkpoint(functional)(x).sum().backward()
    assert counts.get_total_counts() == plainly.get_total_counts()

    def explained(x):
        rows = tr.explain(tr.checkpoint(block), x).rows
        reasons = [row.reason for row in rows if "psum" in str(row.op)]
        assert reasons == ["it is a collective, for which the processes would communicate again"]
        return x

    tr.pmap(explained, "i")(mine(inputs(3)).requires_grad_())


@check
def static_and_donated():
    rank, _ = world()
    scale = tr.pmap(
        lambda x, power, y: tr.psum(x**power, "i") + y, "i", static_broadcasted_argnums=1
    )
    everything = inputs(3)
    same(scale(mine(everything), 2, mine(everything))[0], (everything**2).sum(0) + everything[rank])
    step = tr.pmap(
        lambda p, g: p - 0.1 * tr.pmean(g, "i"), "i", in_axes=(None, 0), out_axes=None,
        donate_argnums=0,
    )  # fmt: skip
    p = torch.ones(3, dtype=DOUBLE)
    expected = p - 0.1 * everything.mean(0)
    address = p.data_ptr()
    q = step(p, mine(everything))
    same(q, expected)
    assert q.data_ptr() == address
    try:
        p + 1
    except tr.errors.DonationError as error:
        assert "was donated to" in str(error)
    else:
        raise AssertionError("a donated tensor can be used")


@check
def modules():
    """Data-parallel training: the gradients' sum over processes is that of the whole batch."""
    _, size = world()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    everything, targets = inputs(5, 3), inputs(5, 1, seed=1)

    def loss(x, y):
        return tr.pmean((model(x) - y).square().mean(), "i") / tr.axis_size("i")

    value = tr.pmap(loss, "i", out_axes=None)(mine(everything), mine(targets))
    value.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    total = [_all_reduced(g) for g in grads]
    model.zero_grad()
    plain = (model(everything.flatten(0, 1)) - targets.flatten(0, 1)).square().mean()
    plain.backward()
    same(value.detach() * size, plain.detach())
    for g, p in zip(total, model.parameters(), strict=True):
        same(g, p.grad)


def _all_reduced(x):
    distributed.all_reduce(x)
    return x


@check
def mesh():
    rank, size = world()
    shape = (size // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    grid = inputs(3).reshape(*shape, 3)
    mine = grid[rank // 2, rank % 2].clone().requires_grad_()

    def f(x):
        y = tr.psum(x.sin(), "dp") * tr.all_gather(x, "tp").sum(0)
        return y * (1 + tr.axis_index(("dp", "tp"))) / tr.axis_size(("dp", "tp"))

    both = grid.clone().requires_grad_()
    expected = tr.vmap(tr.vmap(f, axis_name="tp"), axis_name="dp")(both)
    expected.sum().backward()
    with tr.parallel.mesh_axes(mesh):
        y = f(mine)
        kept = tr.checkpoint(f)(mine)
    same(y, expected[rank // 2, rank % 2])
    same(kept, y)
    y.sum().backward()
    same(mine.grad, both.grad[rank // 2, rank % 2])
    mine.grad = None
    kept.sum().backward()
    same(mine.grad, both.grad[rank // 2, rank % 2])
    with mesh:
        same(f(mine.detach()), y.detach())
        same(
            tr.vmap(lambda x: x / tr.psum(x, "tp"), axis_name="tp")(torch.ones(4)),
            torch.ones(4) / 4,
        )
    raises(AxisNameError, "unbound axis name: dp", lambda: f(mine))
    with tr.parallel.mesh_axes(mesh):
        raises(AxisNameError, "the axes in scope are 'dp', 'tp'", lambda: tr.psum(mine, "zz"))
    x = torch.ones(1, 2)
    checkpointed = tr.checkpoint(lambda x: x / tr.psum(x, "dp"))
    with tr.parallel.mesh_axes(mesh):
        assert checkpointed(x)[0, 0] == 1 / shape[0]
    assert tr.pmap(checkpointed, "dp")(x)[0, 0] == 1 / size  # the same trace would not do


@slow_check
def compiled():
    """Inductor is given the exchanges that the collectives are made of."""
    rank, _ = world()
    everything, weights = inputs(3), inputs(3, seed=1)
    for name in ("psum", "pmax", "all_gather", "psum_scatter", "ppermute", "axis_index"):
        f = PROGRAMS[name]
        x = mine(everything).requires_grad_()
        leaf = everything.clone().requires_grad_()
        y = tr.pmap(tr.jit(f), "i")(x)
        expected = tr.vmap(f, axis_name="i")(leaf)
        same(y[0], expected[rank])
        y.backward(mine(weights))
        expected.backward(weights)
        same(x.grad[0], leaf.grad[rank])


@check
def several_devices_in_each():
    """Two devices a process: half of the reduction is local."""
    rank, size = world()
    tr.config.num_cpu_devices = 2
    assert tr.local_device_count("cpu") == 2
    generator = torch.Generator().manual_seed(0)
    count = 2 * size
    everything = torch.randn(count, 3, dtype=DOUBLE, generator=generator)
    own = slice(2 * rank, 2 * rank + 2)
    for name, f in PROGRAMS.items():
        x = everything[own].clone().requires_grad_()
        leaf = everything.clone().requires_grad_()
        mapped = tr.pmap(f, "i")
        if name == "groups":
            raises(NotAvailableError, "several devices in each of several", lambda: mapped(x))
            continue
        expected = tr.vmap(f, axis_name="i")(leaf)
        y = mapped(x)
        same(y, expected[own])
        y.cos().sum().backward()
        expected.cos().sum().backward()
        same(x.grad, leaf.grad[own])
    one = tr.pmap(lambda x: tr.psum(x, "i"), "i", devices=tr.local_devices(backend="cpu")[:1])
    same(one(everything[own][:1])[0], everything[::2].sum(0))

    def shares(a):
        return a / tr.psum(a, "j") + tr.psum(a, "i")

    y = tr.pmap(lambda x: tr.pmap(shares, "j")(x), "i", devices=["cpu"])(everything[own][None])
    z = tr.vmap(tr.vmap(shares, axis_name="j"), axis_name="i")(everything.reshape(size, 2, 3))
    same(y[0], z[rank])
    tr.config.num_cpu_devices = 1


@check
def errors():
    rank, _ = world()
    f = tr.pmap(lambda x: tr.psum(x, "i"), "i")
    raises(
        tr.errors.AxisError,
        "requires 3 logical devices, but only 1 is available",
        lambda: f(torch.ones(3)),
    )
    other = tr.devices("cpu")[1 - rank if rank < 2 else 0]
    raises(tr.errors.DeviceError, "not of process", lambda: tr.pmap(lambda x: x, devices=[other]))
    assert tr.pmap(lambda x: x, devices=tr.devices("cpu"))(torch.ones(1)) == 1


@check
def one_that_differs_is_named():
    rank, size = world()
    f = tr.pmap(lambda x: tr.psum(x, "i"), "i")
    shape = (1, 4) if rank == 1 else (1, 3)
    who = "processes 0, 1 differ" if size == 2 else "process 1 differs"
    raises(ProcessError, f"{who} in the call of pmap\\(<lambda>\\)", lambda: f(torch.ones(shape)))
    raises(
        ProcessError, r"process 1: pmap\(<lambda>:\d+, .*f32\[1,4\]", lambda: f(torch.ones(shape))
    )
    assert f(torch.ones(1, 2)).tolist() == [[size] * 2]  # and they can go on


# --- plans ---------------------------------------------------------------------------------------


def chain(x, w):
    for _ in range(4):
        x = torch.tanh(x @ w)
    return x.square().mean()


def counted_searches():
    """Lets `searches` be told whenever a process looks for a schedule."""
    searches = []

    def solve(*args):
        searches.append(args)
        return plain(*args)

    plain, planner.solve_orders = planner.solve_orders, solve
    return searches


def total(number):
    return int(_all_reduced(torch.tensor(number)))


@plan_check
def one_search_for_all():
    """The first to plan a graph looks for a schedule; other graphs and budgets are others'."""
    rank, size = world()
    searches = counted_searches()
    x, w = torch.randn(80, 16), torch.randn(16, 16, requires_grad=True)
    plan = tr.plan(chain, x, w, budget="70%")
    assert total(len(searches)) == 1
    orders = [None] * size
    distributed.all_gather_object(orders, plan.order)
    assert orders == [plan.order] * size
    loss = tr.checkpoint(chain, policy="budget:70%")(x, w)
    loss.backward()
    assert total(len(searches)) == 2  # a checkpoint takes the first good plan
    (expected,) = torch.autograd.grad(chain(x, w), w)
    assert torch.equal(w.grad, expected)
    # of its own, in which no other process takes part: nobody waits for one
    for number in range(rank + 1):
        tr.plan(chain, x[: 64 + number + rank * (rank + 1) // 2], w, budget="80%")
    assert total(len(searches)) == 2 + size * (size + 1) // 2


@plan_check
def plans_with_collectives():
    """In the columns of a mesh groups have other names; the plan is one for all."""
    _, size = world()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    searches = counted_searches()

    def step(x):
        for _ in range(3):
            x = (x / tr.pmax(x.exp(), "tp")).sin() + tr.psum(x.sin(), "dp")
        return x

    x = mine(inputs(32)).requires_grad_()
    with tr.parallel.mesh_axes(mesh):
        step(x).sum().backward()
        expected, x.grad = x.grad, None
        tr.checkpoint(step, policy="budget:80%")(x).sum().backward()
    same(x.grad, expected)
    assert total(len(searches)) == 1


@plan_check
def plans_are_agreed_on():
    rank, _ = world()
    w = torch.randn(16, 16, requires_grad=True)
    x = torch.randn(80, 16)
    plan = tr.parallel.agreed_plan(tr.plan(chain, x, w, budget="70%"))
    tr.checkpoint(chain, policy=tr.checkpoint_policies.from_plan(plan))(x, w).backward()
    (expected,) = torch.autograd.grad(chain(x, w), w)
    assert torch.equal(w.grad, expected)
    other = tr.plan(chain, x[: 80 - (rank == 1)], w, budget="70%")
    message = r"process 1 planned another step.*\n.*process 1: node 0 is .*f32\[79,16\], and was"
    raises(ProcessError, message, lambda: tr.parallel.agreed_plan(other))
    other = tr.plan(chain, x, w, budget="80%" if rank == 1 else "70%")
    message = "process 1 planned another.*\n.*process 1: the budget is .*, and .* in process 0"
    raises(ProcessError, message, lambda: tr.parallel.agreed_plan(other))


@check
def a_group_made_anew_has_not_agreed_on_anything():
    rank, _ = world()
    f = tr.pmap(lambda x: tr.psum(x, "i"), "i")
    f(torch.ones(1, 5))
    agreed = process_failures._agreed.pop(distributed.group.WORLD)
    f(torch.ones(1, 5))
    assert process_failures._agreed[distributed.group.WORLD].number == agreed.number + 1
    shape = (1, 6 + rank)
    raises(ProcessError, "in the call of", lambda: f(torch.ones(shape)))


@fault
def one_that_dies_while_it_plans(file):
    rank, size = world()
    if rank == size - 1:
        print(json.dumps(["one_that_dies_while_it_plans", "ok", 0]), file=file, flush=True)
        make_once(lambda: "a graph", lambda: os._exit(0))
    time.sleep(1)
    last = f"process {size - 1}"
    message = f"process {rank} waits for a plan that {last} is making, .*, as {last} is gone"
    raises(ProcessError, message, lambda: make_once(lambda: "a graph", lambda: ""))


@fault
def one_that_fails_to_plan():
    rank, size = world()

    def fail():
        raise ValueError("no such operator")

    if rank == size - 1:
        raises(ValueError, "no such operator", lambda: make_once(lambda: "a graph", fail))
        return
    time.sleep(1)
    message = f"process {size - 1} was making, which stopped with ValueError: no such operator"
    raises(ProcessError, message, lambda: make_once(lambda: "a graph", lambda: ""))


@fault
def one_that_does_not_agree():
    rank, size = world()
    if rank < size - 1:
        plan = tr.plan(chain, torch.ones(2, 4), torch.ones(4, 4, requires_grad=True), budget=0.9)
        message = f"process {rank} calls agreed_plan, and process {size - 1} did not"
        raises(ProcessError, message, lambda: tr.parallel.agreed_plan(plan))


# --- faults --------------------------------------------------------------------------------------


@fault
def one_that_makes_another_call():
    """What is new to one process alone is an error in it, after the timeout."""
    rank, _ = world()
    f = tr.pmap(lambda x: tr.psum(x, "i"), "i")
    x = torch.ones(1, 3)
    f(x)
    if rank == 0:
        raises(
            ProcessError,
            "psum of|psum\\(\\) of f32\\[3\\] over the axis 'i' failed in process 0",
            lambda: f(x),
        )
    else:
        raises(
            ProcessError,
            "a way that is new to it, pmap.*, and process 0 did not in the time",
            lambda: f(torch.ones(1, 4)),
        )


@fault
def one_that_stops():
    rank, _ = world()

    def f(x):
        if rank == 1:
            raise ValueError("out of data")
        return tr.psum(x, "i")

    if rank == 1:
        raises(ValueError, "out of data", lambda: tr.pmap(f, "i")(torch.ones(1)))
        return
    raises(
        ProcessError,
        "Process 1 stopped with ValueError: out of data",
        lambda: tr.pmap(f, "i")(torch.ones(1)),
    )


@fault
def one_that_dies(file):
    rank, size = world()

    def f(x):
        if rank == size - 1:
            print(json.dumps(["one_that_dies", "ok", 0]), file=file, flush=True)
            os._exit(0)
        return tr.psum(x, "i")

    gone = f"Process {size - 1} is gone"
    raises(ProcessError, gone, lambda: tr.pmap(f, "i")(torch.ones(1)))


def raises(kind, pattern, call):
    try:
        call()
    except kind as error:
        assert re.search(pattern, str(error)), str(error)
    else:
        raise AssertionError(f"no {kind.__name__}: {pattern}")
