import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import torchremat as tr
from torchremat.autodiff.early_gradients import order_gradients_early
from torchremat.graph.nodes import base_of, is_forward, is_view
from torchremat.graph.notes import note
from torchremat.measure import LiveBytes
from torchremat.planning.step.traced_step import graphs_of, region_of
from torchremat.policies.builtin import everything_saveable, plain_autograd
from torchremat.remat.program.function_program import FunctionProgram

aten = torch.ops.aten


def layer(x, w, b):
    return F.linear(2 * x, w, b)


def test_the_gradient_of_a_weight_comes_before_what_passes_it_by():
    arguments = torch.ones(8, 4), torch.ones(4, 4), torch.ones(4)
    region = region_of(layer, arguments, {})

    def products(policy):
        _, backward = graphs_of(FunctionProgram(region, policy))
        nodes = backward.module.graph.find_nodes(op="call_function", target=aten.mm.default)
        return [tuple(n.meta["val"].shape) for n in nodes]

    assert products(plain_autograd) == [(8, 4), (4, 4)]
    assert products(everything_saveable) == [(4, 4), (8, 4)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(self.up(x))


def test_a_recomputed_activation_and_the_gradient_beside_it_are_not_alive_together():
    block, x = Block(), torch.randn(1024, 16)
    x.requires_grad_()
    peaks = {}
    for name, run in {
        "theirs": lambda x: checkpoint(block, x, use_reentrant=False),
        "ours": tr.checkpoint(block),
    }.items():
        for _ in range(2):
            x.grad = None
            block.zero_grad()
            with LiveBytes() as live:
                run(x).backward(torch.ones(1024, 16))
        peaks[name] = live.peak
    hidden = 1024 * 64 * 4
    assert peaks["theirs"] - peaks["ours"] >= 0.7 * hidden


# --- any graph ------------------------------------------------------------------------------------


@st.composite
def graphs(draw):
    """Joint graphs: some values of a forward pass, some operators of a backward pass."""
    graph = fx.Graph()

    def add(target, args, phase):
        node = graph.call_function(target, args)
        node.meta["val"] = torch.empty(draw(st.integers(0, 9)), device="meta")
        if is_view(node):
            node.meta["val"] = base_of(node).meta["val"]
        note(node, phase=phase)
        return node

    source = graph.placeholder("x")
    source.meta["val"] = torch.empty(1, device="meta")
    saved = [add(aten.exp.default, (source,), "forward") for _ in range(draw(st.integers(1, 6)))]
    values = [add(aten.neg.default, (source,), "backward")]
    for _ in range(draw(st.integers(2, 14))):
        read = draw(st.lists(st.sampled_from([*saved, *values]), min_size=1, max_size=3))
        own = draw(st.sampled_from(values))
        if draw(st.integers(0, 3)) == 0:
            values.append(add(aten.t.default, (own,), "backward"))
        else:
            values.append(add(aten.stack.default, ([own, *read],), "backward"))
    unread = [v for v in values if not v.users]
    graph.output((*draw(st.lists(st.sampled_from(values), max_size=2)), *unread))
    return graph


def peak_of(order):
    """The most bytes alive at one time, where all values of the forward pass are saved."""
    nodes = [n for n in order if n.op == "call_function"]
    last = {}
    for i, node in enumerate(nodes):
        for source in node.all_input_nodes:
            assert source.op == "placeholder" or source in last, "it is read before it is made"
            last[base_of(source)] = i
        last.setdefault(node, i)
    for node in order[-1].all_input_nodes:
        last[base_of(node)] = len(nodes)
    alive = {n for n in nodes if is_forward(n)}
    peak = 0
    for i, node in enumerate(nodes):
        if not is_view(node):
            alive.add(node)
        peak = max(peak, sum(n.meta["val"].numel() for n in alive))
        if not is_forward(node):
            alive = {n for n in alive if last[n] > i}
    return peak


@settings(max_examples=200)
@given(graphs())
def test_no_peak_rises_and_results_keep_their_order(graph):
    before, results = list(graph.nodes), graph.output_node().all_input_nodes
    after = order_gradients_early(graph)
    assert sorted(after) == sorted(before) and after[-1] is before[-1]
    assert peak_of(after) <= peak_of(before)
    assert sorted(results, key=after.index) == sorted(results, key=before.index)
