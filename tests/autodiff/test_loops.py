"""Loops in segments, and without what does not vary by step: plain PyTorch's bits."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan

import torchremat as tr
from tests.helpers import assert_same, one_in
from torchremat.autodiff.rewrites.loop import Loop, is_loop
from torchremat.autodiff.tiles.loop_segments import count_steps, segment_loops
from torchremat.graph.nodes import is_forward
from torchremat.planning.planner import Planner
from torchremat.planning.step.traced_step import FixedSchedule, WholeGraphPolicy, region_of

aten = torch.ops.aten
WIDTH = 8


def joint_of(fun, *args):
    region = region_of(fun, args, {}, WholeGraphPolicy())
    return region.joint_for(region.usual_outputs)


def loops_of(joint, *, forward=True):
    nodes = [n for n in joint.module.graph.nodes if is_loop(n) and is_forward(n) == forward]
    return [Loop(n) for n in nodes]


class Recurrent(nn.Module):
    """Layers of cells, one over the results of the other; its result and last states."""

    def __init__(self, cell=nn.GRUCell, layers=1):
        super().__init__()
        self.cells = nn.ModuleList(cell(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, xs):
        states = []
        for cell in self.cells:
            is_pair = isinstance(cell, nn.LSTMCell)

            def step(state, x, cell=cell, is_pair=is_pair):
                state = cell(x, state)
                return state, (state[0] if is_pair else state).clone()

            start = xs.new_zeros(xs.shape[1], WIDTH)
            last, xs = scan(step, (start, start.clone()) if is_pair else start, xs, dim=0)
            states.append(last)
        return xs, states


def run(fun, model, xs):
    """Results, and gradients for cotangents that are no constant."""
    results, states = fun(xs)
    leaves = [results, *(t for s in states for t in (s if isinstance(s, tuple) else (s,)))]
    slopes = [torch.linspace(0.5, 1.5, t.numel()).view_as(t) for t in leaves]
    return leaves, torch.autograd.grad(leaves, [xs, *model.parameters()], slopes)


def make_xs(steps):
    torch.manual_seed(1)
    return torch.randn(steps, 3, WIDTH, requires_grad=True)


CUTS = [(12, 4), (13, 4), (9, 8), (7, 7)]


@pytest.mark.parametrize(("cell", "cut"), one_in(5, [nn.RNNCell, nn.GRUCell, nn.LSTMCell], CUTS))
@pytest.mark.sampled(2)
def test_segments_have_the_bits_of_the_loop(cell, cut):
    steps, segments = cut
    torch.manual_seed(0)
    model, xs = Recurrent(cell, layers=2), make_xs(steps)
    plain = joint_of(model, xs)
    joint = segment_loops(plain, segments)
    size = -(-steps // segments)
    expected = [min(size, steps - start) for start in range(0, steps, size)]
    assert [loop.num_steps for loop in loops_of(joint)] == 2 * expected
    assert [loop.num_steps for loop in loops_of(joint, forward=False)] == 2 * expected[::-1]
    schedule = Planner(joint).plain.graph_schedule
    ours = tr.checkpoint(model, policy=FixedSchedule(schedule, joint))
    assert_same(run(ours, model, xs), run(model, model, xs))


def test_results_pass_from_segment_to_segment():
    # the second layer takes the parts of the first, so only the model's result is put together
    joint = segment_loops(joint_of(Recurrent(layers=2), make_xs(12)), 4)
    joined = joint.module.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    read = [node for node in joined if any(is_loop(user) for user in node.users)]
    assert read == []


def test_the_graph_is_left_as_it_was():
    joint = joint_of(Recurrent(), make_xs(12))
    before = str(joint.module.graph)
    assert segment_loops(joint, 4).untiled is joint
    assert str(joint.module.graph) == before


def test_what_has_no_such_loop_is_not_cut():
    def without_gradient(xs):
        with torch.no_grad():
            _, ys = scan(lambda h, x: ((h + x).sin(), h.clone()), torch.zeros(3, WIDTH), xs, dim=0)
        return (xs * ys).sum()

    short = Recurrent()
    for fun, xs in ((torch.sin, make_xs(12)), (without_gradient, make_xs(12)), (short, make_xs(3))):
        joint = joint_of(fun, xs)
        assert count_steps(joint) == 0
        assert segment_loops(joint, 2) is None
    assert count_steps(joint_of(Recurrent(), make_xs(12))) == 12


def test_a_loop_in_reverse_is_cut():
    def fun(xs):
        start = torch.zeros(3, WIDTH)
        _, ys = scan(lambda h, x: ((h + x).sin(), h * x), start, xs, dim=0, reverse=True)
        return ys, []

    xs = make_xs(13)
    joint = segment_loops(joint_of(fun, xs), 4)
    assert len(loops_of(joint)) == 4
    schedule = Planner(joint).plain.graph_schedule
    ours = tr.checkpoint(fun, policy=FixedSchedule(schedule, joint))
    assert_same(run(ours, nn.Module(), xs), run(fun, nn.Module(), xs))


# --- what does not vary by step ---


def test_weights_are_not_saved_for_each_step():
    torch.manual_seed(0)
    model, xs = Recurrent(), make_xs(12)
    (forward,), (backward,) = (loops_of(joint_of(model, xs), forward=f) for f in (True, False))
    weights = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
    transposed = {shape[::-1] for shape in weights}
    stacked = {tuple(value.shape[1:]) for value in forward.results[1:]}
    assert stacked.isdisjoint(weights | transposed)
    assert transposed | weights >= {tuple(n.meta["val"].shape) for n in backward.others}
    assert len(backward.others) == 2
    for policy in ("none", "full", "dots"):
        assert_same(run(tr.checkpoint(model, policy=policy), model, xs), run(model, model, xs))


def test_what_steps_compute_of_a_weight_has_memory_of_its_own():
    torch.manual_seed(0)
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def fun(xs):
        def step(h, x):
            scale = (model.w.t() @ model.w).sin()  # read by two results that are saved
            h = (h @ scale.exp() + x @ scale.cos()).tanh()
            return h, h.clone()

        return scan(step, torch.zeros(3, WIDTH), xs, dim=0)[1], []

    xs = make_xs(12)
    joint = joint_of(fun, xs)
    (backward,) = loops_of(joint, forward=False)
    assert len(backward.others) >= 2
    made = [n for n in joint.module.graph.nodes if not is_forward(n) and n.op == "call_function"]
    fresh = [
        n for n in made if n.target in (aten.t_copy.default, aten.mm.default, aten.sin.default)
    ]
    storages = {n.meta["val"].untyped_storage()._cdata for n in fresh}
    assert len(storages) == len(fresh) > 0
    assert_same(run(tr.checkpoint(fun, policy="full"), model, xs), run(fun, model, xs))


def test_random_numbers_stay_those_of_each_step():
    def seeded(f):
        def call(xs):
            torch.manual_seed(3)
            return f(xs)

        return call

    def drawing(xs):
        def step(h, x):
            h = torch.nn.functional.dropout((h + x).tanh(), 0.5)
            return h, h.clone()

        return scan(step, torch.zeros(3, WIDTH), xs, dim=0)[1], []

    xs = make_xs(12)
    (backward,) = loops_of(joint_of(drawing, xs), forward=False)
    assert backward.others == []
    for policy in ("none", "full", "dots"):
        ours = run(seeded(tr.checkpoint(drawing, policy=policy)), nn.Module(), xs)
        assert_same(ours, run(seeded(drawing), nn.Module(), xs))
    joint = segment_loops(joint_of(drawing, xs), 4)
    schedule = Planner(joint).plain.graph_schedule
    ours = tr.checkpoint(drawing, policy=FixedSchedule(schedule, joint))
    assert_same(run(seeded(ours), nn.Module(), xs), run(seeded(drawing), nn.Module(), xs))
