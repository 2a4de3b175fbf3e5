"""Rematerialisation from scratch: the core of torchremat in one file, to be read from the top.

    python examples/autodidax.py

Plain training saves values of the forward pass until the backward pass has read them.
Rematerialisation (activation checkpointing, gradient checkpointing, recomputation) saves fewer
values and recomputes the others. It comes down to seven ideas, each a section here:

    1  trace      a function and its derivative are one graph of operators
    2  names      a value can have a name
    3  policies   a function of the graph decides which values may be saved
    4  split      the graph is split into a half that runs now and one that runs later
    5  operator   the halves are the forward and backward of one differentiable operator
    6  bytes      the bytes alive at each time follow from the graph, without a run
    7  plan       the best values to save within a budget are a minimum cut

The library has the same parts, in the files that each section names. It also has parts that are
left out here: trees of arguments, closed-over tensors, writes in place, modules, `vmap` and forward
mode. Further parts are checkpoints inside checkpoints, offloading, compilers, and sizes that vary.
At the end this file and the library run the same function, and must agree to the byte.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.sparse import csgraph
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import flop_registry

import torchremat as tr
from torchremat.measure import LiveBytes

aten = torch.ops.aten

# --- 1. Trace ------------------------------------------------------------------------------------
#
# PyTorch differentiates by running operators, and those it runs backward are operators too. So we
# run a function and its derivative on fake tensors, which have shapes but no numbers, and record
# every operator. The record is a graph of both: the *joint graph*. Of f(x, w) = sin(x @ w) it is
#
#     inputs      x, w                            known now
#     forward     y = mm(x, w);  z = sin(y)       known now
#     inputs      ct                              the cotangent of z: known later
#     backward    c = cos(y);  g = mul(ct, c);  dw = mm(t(x), g);  dx = mm(g, t(w))
#
# We need no rule for any derivative: autograd has them all, and runs them for us while we record.
# (In the library: torchremat/autodiff/joint.py.)


@torch.library.custom_op("autodidax::mark", mutates_args=())
def mark(x: Tensor, label: str) -> Tensor:
    """The identity, seen in a trace. It only copies fake tensors: it never runs for real."""
    return x.clone()


mark.register_fake(lambda x, label: torch.empty_like(x))
mark.register_autograd(lambda ctx, cotangent: (cotangent, None))

BACKWARD = "the backward pass starts here"


@dataclass(frozen=True, eq=False)
class Joint:
    """A function and its derivative as one graph; a gradient is `None` for an input without."""

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    cotangents: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    gradients: tuple[fx.Node | None, ...]
    forward: frozenset[fx.Node]
    names: dict[fx.Node, str]

    @property
    def wanted(self) -> list[fx.Node]:
        """The gradients that are not `None`."""
        return [gradient for gradient in self.gradients if gradient is not None]


def trace(fun: Callable[..., Any], tensors: Sequence[Tensor]) -> Joint:
    """The joint graph of `fun`, a function of tensors, at tensors like these."""
    needs = [t.requires_grad for t in tensors]

    def joint(inputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Any:
        outputs = as_tuple(fun(*inputs))
        seeds = [mark(ct, BACKWARD) for ct in cotangents]
        wrt = [t for t, need in zip(inputs, needs, strict=True) if need]
        found = iter(torch.autograd.grad(outputs, wrt, seeds, allow_unused=True))
        return [*outputs, *(next(found) if need else None for need in needs)]

    with FakeTensorMode() as fake:
        results = as_tuple(fun(*map(fake.from_tensor, tensors)))
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        cotangents = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in results]
        module = make_fx(joint, tracing_mode="fake")(inputs, cotangents)
    return read(module, len(tensors))


def read(module: fx.GraphModule, num_inputs: int) -> Joint:
    """Build a `Joint` from a traced graph. Marks tell the parts apart, and are then removed."""
    forward: list[fx.Node] = []
    names: dict[fx.Node, str] = {}
    is_forward = True
    for node in list(module.graph.nodes):
        if node.target is aten_mark:
            value, label = node.args
            if label == BACKWARD:
                is_forward = False
            else:
                names[base_of(value)] = label
            node.replace_all_uses_with(value)
            module.graph.erase_node(node)
        elif is_forward and node.op in ("call_function", "get_attr"):
            forward.append(node)
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            raise ValueError(f"{node.target} writes in place: the old value cannot be recomputed")
    placeholders = module.graph.find_nodes(op="placeholder")
    results = module.graph.output_node().args[0]
    return Joint(
        module,
        tuple(placeholders[:num_inputs]),
        tuple(placeholders[num_inputs:]),
        tuple(results[:-num_inputs]),
        tuple(results[-num_inputs:]),
        frozenset(forward),
        names,
    )


aten_mark = torch.ops.autodidax.mark.default


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    """The result as a tuple: functions here return a tensor or a tuple of them."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


# Two facts about nodes matter below. An operator with several outputs is a *call* whose outputs are
# its *items*. And a *view* (transpose, reshape) computes nothing: it lies in the memory of its
# *base*. So it costs no bytes to save and no time to recompute. The schema of an operator says
# whether it is a view. (torchremat/graph/nodes.py)


def is_item(node: fx.Node) -> bool:
    """Whether `node` takes one output of a call that has several."""
    return node.target is operator.getitem


def is_view(node: fx.Node) -> bool:
    """Whether `node` lies in the memory of its first argument."""
    if is_item(node):
        return is_view(node.args[0])
    if node.target is aten._unsafe_view.default:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def base_of(node: fx.Node) -> fx.Node:
    """The value in whose memory `node` lies."""
    while is_view(node):
        node = node.args[0]
    return node


def call_of(value: fx.Node) -> fx.Node:
    """The call that computes `value`."""
    return value.args[0] if is_item(value) else value


def is_value(node: fx.Node) -> bool:
    """Whether `node` is one tensor that an operator computes, so that it can be saved."""
    return (
        node.op == "call_function"
        and not is_view(node)
        and isinstance(node.meta.get("val"), Tensor)
    )


def nbytes_of(value: fx.Node) -> int:
    """The bytes of the memory that `value` lies in."""
    return value.meta["val"].untyped_storage().nbytes()


# --- 2. Names ------------------------------------------------------------------------------------
#
# The author of a policy wants to say "save the attention", and a graph has only mm_3. The function
# itself can say it, through the same mark. `read` removes marks from the graph, so a name costs
# nothing when the graph runs. It belongs to the value, not to the variable: `read` puts it on the
# base. (torchremat/policies/checkpoint_name.py)


def name(x: Tensor, label: str) -> Tensor:
    """Call a value `label`. Outside of a trace it is the identity."""
    return mark(x, label) if isinstance(x, FakeTensor) else x


# --- 3. Policies ---------------------------------------------------------------------------------
#
# A policy says which values *may* be saved; a value that the backward pass does not need is not
# saved anyway. Some policies look at one value at a time, others need the whole graph before they
# answer. One protocol does for both: a policy takes the graph and returns a function of its values.
# (torchremat/policies/policy.py, builtin.py)

MaySave = Callable[[fx.Node], bool]
Policy = Callable[[Joint], MaySave]


def everything(joint: Joint) -> MaySave:
    """Save each value that the backward pass needs, as plain PyTorch does."""
    return lambda value: True


def nothing(joint: Joint) -> MaySave:
    """Save only inputs, as `torch.utils.checkpoint` does."""
    return lambda value: False


def dots(joint: Joint) -> MaySave:
    """Save products of matrices: they take long to compute and few bytes."""
    products = {aten.mm.default, aten.bmm.default, aten.addmm.default}
    return lambda value: value.target in products


def names(*labels: str) -> Policy:
    """Save values with one of these names."""
    return lambda joint: lambda value: joint.names.get(value) in labels


# An operator that draws random numbers would draw others the second time. Its value is saved,
# whatever the policy says. (The library saves the state of the generator instead where that is
# smaller, and knows more such operators: torchremat/policies/replay_rules.py.)


def must_save(value: fx.Node) -> bool:
    """Whether the operator of `value` must not run twice."""
    return torch.Tag.nondeterministic_seeded in getattr(call_of(value).target, "tags", ())


# --- 4. Split ------------------------------------------------------------------------------------
#
# Partial evaluation: some inputs of the graph are known now, the cotangents only later. The first
# half runs now. The question is which values it passes to the second. Walk back from the gradients:
#
#     a backward value       is computed later: go on with what it reads
#     a known input          exists anyway
#     a view                 leads to its base
#     a known value          is saved if it may be, and the walk ends there;
#                            else it is recomputed: go on with what it reads
#
# With sin(x @ w) as above, the walk reaches y through c = cos(y). If products may be saved, y is
# the one *residual*. If not, mm is recomputed from x and w, which the caller has anyway.
# (torchremat/autodiff/partial_eval.py)


def find_residuals(joint: Joint, may_save: MaySave) -> tuple[list[fx.Node], ...]:
    """The saved values, the inputs read later, and the recomputed values, in graph order."""
    saved, inputs, recomputed, seen = (set[fx.Node]() for _ in range(4))
    stack = joint.wanted
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        is_known = node in joint.forward and is_value(node)
        if node in joint.inputs:
            inputs.add(node)
        elif is_known and (must_save(node) or may_save(node)):
            saved.add(node)
        else:
            recomputed |= {node} if is_known else set()
            stack.extend(node.all_input_nodes)
    nodes = joint.module.graph.nodes
    return tuple([node for node in nodes if node in found] for found in (saved, inputs, recomputed))


# Now each half is a graph of its own, cut out of the joint graph. Operators stay in order, with one
# exception that saves much memory. A recomputed value comes just before the first operator that
# reads it, not at the start. (torchremat/graph/slicing.py)


def cut_out(
    joint: Joint,
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node | None],
    is_late: Callable[[fx.Node], bool],
) -> fx.GraphModule:
    """The graph from some values of the joint graph to others."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node, copied in copies.items():
        copied.meta = dict(node.meta)
    wanted = [node for node in outputs if node is not None]
    needed = set(wanted)
    for node in reversed(joint.module.graph.nodes):
        if node in needed and node not in copies:
            needed.update(node.all_input_nodes)

    def copy(node: fx.Node) -> None:
        if node not in copies:
            for read_before in node.all_input_nodes:
                copy(read_before)
            copies[node] = graph.node_copy(node, copies.get)

    in_order = [n for n in joint.module.graph.nodes if n in needed and not is_late(n)]
    for node in (*in_order, *wanted):
        copy(node)
    graph.output(tuple(None if node is None else copies[node] for node in outputs))
    return fx.GraphModule(joint.module, graph)


@dataclass(frozen=True)
class Halves:
    """The first half runs now, from inputs to outputs and `saved`. The second half runs later, from
    `inputs`, `saved` and cotangents to gradients, and recomputes `recomputed`.
    """

    joint: Joint
    saved: list[fx.Node]
    inputs: list[fx.Node]
    recomputed: list[fx.Node]
    forward: fx.GraphModule
    backward: fx.GraphModule


def split(joint: Joint, may_save: MaySave) -> Halves:
    """The two halves of a joint graph."""
    saved, inputs, recomputed = find_residuals(joint, may_save)
    forward = cut_out(joint, joint.inputs, [*joint.outputs, *saved], lambda node: False)
    given = [*inputs, *saved, *joint.cotangents]
    backward = cut_out(joint, given, joint.gradients, joint.forward.__contains__)
    return Halves(joint, saved, inputs, recomputed, forward, backward)


# --- 5. Operator ---------------------------------------------------------------------------------
#
# A graph runs as a loop over its nodes. Each value must be dropped in time: after the last operator
# that reads it, also if it came in as an input. So inputs are passed in a list, which is emptied.
# (The library writes a Python function for it: torchremat/graph/codegen.py.)


def last_reads(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The last node to read each node; the node itself, if none does."""
    last = {node: node for node in graph.nodes}
    for node in graph.nodes:
        for read_now in node.all_input_nodes:
            last[read_now] = node
    return last


def run(module: fx.GraphModule, inputs: list[Any]) -> tuple[Any, ...]:
    """Run a graph."""
    env: dict[fx.Node, Any] = {}
    last = last_reads(module.graph)
    for node in module.graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.get)
        if node.op == "output":
            return args[0]
        if node.op == "placeholder":
            env[node] = inputs.pop(0)
        elif node.op == "get_attr":
            env[node] = getattr(module, node.target)
        elif node not in env:
            result = node.target(*args, **kwargs)
            items = [user for user in node.users if is_item(user)]
            # outputs of a call are freed one by one, so the call's own result must not refer to all
            env.update({item: result[item.args[1]] for item in items} or {node: result})
            del result
        del args, kwargs
        for finished in (node, *node.all_input_nodes):
            if last[finished] is node:
                env.pop(finished, None)
    raise AssertionError("a graph ends in its output")


# With that, rematerialisation is a differentiable operator: forward runs one half and saves the
# residuals, backward runs the other. Residuals go through `save_for_backward`, so PyTorch notices
# if one is changed in place before it is read.
#
# (The derivative of the operator is a function of inputs, cotangents and residuals. The library
# traces and splits that function too, so derivatives of every order are the same operator. It also
# has rules for `vmap`, forward mode and tracing: torchremat/remat/op/autograd_functions.py.)


class Remat(torch.autograd.Function):
    """A function whose joint graph is split, as one operator."""

    @staticmethod
    def forward(ctx: Any, halves: Halves, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the first half, and save the residuals."""
        results = run(halves.forward, list(inputs))
        num_outputs = len(halves.joint.outputs)
        read_later = [
            t for t, n in zip(inputs, halves.joint.inputs, strict=True) if n in halves.inputs
        ]
        ctx.save_for_backward(*read_later, *results[num_outputs:])
        ctx.halves = halves
        return results[:num_outputs]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """Run the second half, which frees each residual after its last read."""
        given = [*ctx.saved_tensors, *(ct.contiguous() for ct in cotangents)]
        ctx.maybe_clear_saved_tensors()
        return None, *run(ctx.halves.backward, given)


def checkpoint(fun: Callable[..., Any], policy: Policy = nothing) -> Callable[..., Any]:
    """`fun`, a function of tensors alone, which saves for its backward pass as `policy` decides."""
    traced: dict[Any, Halves] = {}

    def checkpointed(*tensors: Tensor) -> Any:
        key = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)
        if key not in traced:
            joint = trace(fun, tensors)
            traced[key] = split(joint, policy(joint))
        outputs = Remat.apply(traced[key], *tensors)
        return outputs[0] if len(outputs) == 1 else outputs

    return checkpointed


# --- 6. Bytes ------------------------------------------------------------------------------------
#
# The graphs alone say which tensors `run` refers to at each time, and how large they are. A
# *storage* is alive from the operator that makes it to the last that reads it or a view of it.
# Results of the step, and the cotangents, to which autograd refers, are alive to the end. Inputs
# and parameters exist anyway and do not count. The greatest sum is the peak.
# (torchremat/planning/memory/interpreter.py)


@dataclass
class Storage:
    """Memory, with the first and the last operator at which it is alive."""

    nbytes: int
    first: int
    last: int


class Simulation:
    """The step of a program, in which only memory moves."""

    def __init__(self, halves: Halves) -> None:
        self.time = 0
        self.storages: list[Storage] = []
        joint = halves.joint
        now = self.walk(halves.forward, {})
        later = {node.name: now[node.name] for node in halves.saved}
        later |= {ct.name: self.make(ct.meta["val"]) for ct in joint.cotangents}
        cotangents = [later[ct.name] for ct in joint.cotangents]
        self.walk(halves.backward, later)
        given = [now.get(node.name) for node in joint.outputs]
        given += [later.get(node.name) for node in joint.wanted]
        for storage in (*cotangents, *given):
            if storage is not None:  # an output may be an input
                storage.last = self.time - 1

    def make(self, value: Tensor) -> Storage:
        """New memory."""
        self.storages.append(Storage(value.untyped_storage().nbytes(), self.time, self.time))
        return self.storages[-1]

    def walk(self, module: fx.GraphModule, where: dict[str, Storage]) -> dict[str, Storage]:
        """Run a graph; the memory of its values by name is in `where`, without that of inputs."""
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            if is_view(node):
                if base_of(node).name in where:  # else it lies in an input
                    where[node.name] = where[base_of(node).name]
            elif is_item(node):
                where[node.name] = where[f"{node.args[0].name}[{node.args[1]}]"]
            elif isinstance(node.meta["val"], Tensor):
                where[node.name] = self.make(node.meta["val"])
            else:
                for i, value in enumerate(node.meta["val"]):
                    if isinstance(value, Tensor):
                        where[f"{node.name}[{i}]"] = self.make(value)
            for read_now in node.all_input_nodes:
                if read_now.name in where:
                    where[read_now.name].last = self.time
            self.time += not is_item(node)
        return where

    @property
    def live(self) -> list[int]:
        """The bytes alive at each operator of the forward and then of the backward pass."""
        changes = [0] * (self.time + 1)
        for storage in self.storages:
            changes[storage.first] += storage.nbytes
            changes[storage.last + 1] -= storage.nbytes
        return list(accumulate(changes))[:-1]

    @property
    def peak(self) -> int:
        """The most that is alive at one time."""
        return max(self.live)


# --- 7. Plan -------------------------------------------------------------------------------------
#
# Now the best policy can be computed. Put a price on a byte: saving value v costs price * nbytes,
# recomputing operator o costs its seconds. Let y_v be 1 if the backward pass needs v, and r_o be 1
# if it recomputes o. Then
#
#     y_v = 1              if a backward operator reads v
#     y_u >= r_o           if o reads u: recomputing needs its inputs
#     cost of saving v     if y_v = 1 and r_o = 0 for the o that makes v
#     seconds of o         if r_o = 1
#
# is least for a *minimum cut* between a source (all variables that are 1) and a sink (all that are
# 0). The network has an endless edge for each condition, and one of the capacity of each cost. Cuts
# at several prices give the best of each size, and the simulator says which of them fits.
#
# Yet few saved bytes are no low peak. In the table below, a policy that saves two values a layer
# peaks lower than the cut that saves one. (In the library cuts are only the start, in
# torchremat/planning/search/min_cut.py. An integer program then has a row for the bytes at each
# moment.)

FLOPS_PER_SECOND, BYTES_PER_SECOND = 1e12, 1e11
ENDLESS = 1 << 30


def seconds_of(call: fx.Node) -> float:
    """The seconds of a call on a machine limited by arithmetic or by memory: a roofline."""
    read = [n.meta["val"] for n in call.all_input_nodes]
    made = call.meta["val"]
    tensors = [t for v in (*read, made) for t in as_tuple(v) if isinstance(t, Tensor)]
    seconds = sum(t.nbytes for t in tensors) / BYTES_PER_SECOND
    count = flop_registry.get(getattr(call.target, "overloadpacket", None))
    if count is not None:
        args, kwargs = fx.node.map_arg((call.args, call.kwargs), lambda n: n.meta["val"])
        seconds = max(seconds, count(*args, **kwargs, out_val=made) / FLOPS_PER_SECOND)
    return seconds


def cut(joint: Joint, price: float) -> frozenset[fx.Node]:
    """The values to save, if all values together cost `price` times what all operators take."""
    order = list(joint.module.graph.nodes)
    values = [node for node in order if node in joint.forward and is_value(node)]
    calls = list(dict.fromkeys(map(call_of, values)))
    later = [n for n in order if n.op == "call_function" and n not in joint.forward]
    needed = {base_of(read) for node in later for read in node.all_input_nodes}
    y = {value: 2 + i for i, value in enumerate(values)}  # 0 is the source, 1 the sink
    r = {call: 2 + len(values) + i for i, call in enumerate(calls)}
    scale = ENDLESS / 4 / max(1.0, price)
    per_byte = price * scale / sum(map(nbytes_of, values))
    per_second = scale / sum(map(seconds_of, calls))
    edges = [(0, y[v], ENDLESS) for v in values if v in needed]
    edges += [(r[c], y[base_of(u)], ENDLESS) for c in calls for u in c.all_input_nodes
              if base_of(u) in y]  # fmt: skip
    edges += [(y[v], r[call_of(v)], round(per_byte * nbytes_of(v))) for v in values]
    edges += [(r[c], 1, ENDLESS if must_save(c) else round(per_second * seconds_of(c)))
              for c in calls]  # fmt: skip
    at_one = reached(2 + len(values) + len(calls), edges)
    return frozenset(v for v in values if y[v] in at_one and r[call_of(v)] not in at_one)


def reached(size: int, edges: Iterable[tuple[int, int, int]]) -> set[int]:
    """The nodes on the source's side of a minimum cut: those reached when the flow is greatest."""
    starts, ends, capacities = map(np.array, zip(*edges, strict=True))
    network = sparse.csr_matrix((capacities.astype(np.int32), (starts, ends)), shape=(size, size))
    left = network - csgraph.maximum_flow(network, 0, 1).flow
    left.data[left.data < 0] = 0
    left.eliminate_zeros()
    return set(csgraph.breadth_first_order(left, 0, return_predecessors=False).tolist())


@dataclass(frozen=True)
class Budget:
    """The policy that adds least time among those of cuts whose peak is within so many bytes."""

    nbytes: int

    def __call__(self, joint: Joint) -> MaySave:
        """Choose for a graph."""
        sets = {cut(joint, price) for price in np.logspace(-4, 4, 24)}
        found = [(split(joint, saved.__contains__), saved) for saved in sets]
        peaks = [Simulation(halves).peak for halves, _ in found]
        if min(peaks) > self.nbytes:
            raise ValueError(f"the least peak that is found is {min(peaks)} B, not {self.nbytes} B")
        fitting = [pair for pair, peak in zip(found, peaks, strict=True) if peak <= self.nbytes]
        _, saved = min(fitting, key=lambda pair: added_seconds(pair[0]))
        return saved.__contains__


def added_seconds(halves: Halves) -> float:
    """The seconds of recomputation."""
    return sum(map(seconds_of, dict.fromkeys(map(call_of, halves.recomputed))))


# --- What comes of it ----------------------------------------------------------------------------
#
# First comes the example of the sections above, as the halves that each policy makes of it; then
# layers of a transformer. Every row of the table is run. Its loss and gradients are compared with
# plain PyTorch's, bit for bit, and its peak with the simulation. All its figures are compared with
# those of the library for the same function under the same policy.


def product(x: Tensor, w: Tensor) -> Tensor:
    """The example."""
    return torch.sin(x @ w)


def show_halves() -> None:
    """Print what runs now and later of the example."""
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
    joint = trace(product, [x, w])
    for policy in (everything, nothing):
        halves = split(joint, policy(joint))
        print(f"{policy.__name__}:")
        for when, module in (("now", halves.forward), ("later", halves.backward)):
            calls = [n for n in module.graph.nodes if n.op == "call_function" and not is_view(n)]
            text = [f"{n} = {op_name(n)}({', '.join(map(str, n.args))})" for n in calls]
            print(f"  {when:6}{'; '.join(text)}")


def op_name(value: fx.Node) -> str:
    """The operator that computes a value, as in `mm`."""
    return str(call_of(value).target).removeprefix("aten.").partition(".")[0]


NUM_LAYERS, NUM_HEADS, WIDTH, BATCH, LENGTH = 2, 2, 32, 4, 24


def layers(call_it: Callable[[Tensor, str], Tensor], x: Tensor, *weights: Tensor) -> Tensor:
    """Layers of a transformer, and a loss. `call_it` names values, for this file or the library."""
    heads = (BATCH, LENGTH, NUM_HEADS, WIDTH // NUM_HEADS)
    for i in range(NUM_LAYERS):
        w_qkv, w_out, w_up, w_down = weights[4 * i : 4 * i + 4]
        h = torch.nn.functional.layer_norm(x, (WIDTH,))
        q, k, v = (t.reshape(heads).transpose(1, 2) for t in (h @ w_qkv).chunk(3, -1))
        scores = torch.softmax(q @ k.transpose(-1, -2) / heads[-1] ** 0.5, -1)
        x = x + call_it((scores @ v).transpose(1, 2).reshape(x.shape) @ w_out, "attention")
        h = torch.nn.functional.layer_norm(x, (WIDTH,))
        x = x + call_it(torch.nn.functional.gelu(h @ w_up) @ w_down, "mlp")
    return x.square().mean()


def make_inputs() -> list[Tensor]:
    """A batch, and weights that need a gradient."""
    torch.manual_seed(0)
    shapes = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    weights = [torch.randn(shape) / shape[0] ** 0.5 for shape in shapes * NUM_LAYERS]
    return [torch.randn(BATCH, LENGTH, WIDTH), *(w.requires_grad_() for w in weights)]


def step(fun: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The loss and the gradients."""
    loss = fun(*inputs)
    return [loss, *torch.autograd.grad(loss, [t for t in inputs if t.requires_grad])]


@dataclass(frozen=True)
class Figures:
    """A row of the table: saved bytes, bytes at the peak, and recomputed values."""

    saved: int
    peak: int
    recomputed: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, halves: Halves) -> "Figures":
        """The figures of this file."""
        recomputed = sorted((op_name(v), tuple(v.meta["val"].shape)) for v in halves.recomputed)
        return cls(sum(map(nbytes_of, halves.saved)), Simulation(halves).peak, tuple(recomputed))

    @classmethod
    def of_library(cls, inputs: Sequence[Tensor], policy: str) -> "Figures":
        """The figures of the library."""
        fun = partial(layers, tr.checkpoint_name)
        report = tr.explain(fun, *inputs, policy=policy)
        recomputed = sorted((row.op, row.shape) for row in report if row.decision == "recomputed")
        peak = tr.estimate(fun, *inputs, policy=policy).peak_bytes
        return cls(report.total, peak, tuple(recomputed))


ROW = "{:16}{:>12}{:>12}{:>16}   {:11}{}"


def main() -> None:
    """Print the halves of the example, and the table."""
    show_halves()
    inputs, fun = make_inputs(), partial(layers, name)
    joint = trace(fun, inputs)
    plain = step(fun, inputs)
    budget = Simulation(split(joint, everything(joint))).peak * 7 // 10
    rows: list[tuple[str, Policy, str | None]] = [
        ("everything", everything, "none"),
        ("dots", dots, "dots"),
        ("names", names("attention", "mlp"), "names:attention,mlp"),
        ("nothing", nothing, "full"),
        (f"budget {budget}", Budget(budget), None),
    ]
    print()
    print(ROW.format("policy", "bytes saved", "peak", "recomputed", "bit-equal", "the library"))
    for title, policy, spelling in rows:
        figures = Figures.of(split(joint, policy(joint)))
        checkpointed = checkpoint(fun, policy)
        assert all(map(torch.equal, plain, step(checkpointed, inputs))), title
        with LiveBytes() as memory:
            step(checkpointed, inputs)
        assert figures.peak == memory.peak, (title, figures.peak, memory.peak)
        if spelling is None:
            assert figures.peak <= budget
        else:
            assert figures == Figures.of_library(inputs, spelling), title
        said = "-" if spelling is None else "says the same"
        print(ROW.format(title, figures.saved, figures.peak, len(figures.recomputed), "yes", said))
    plan = tr.plan(partial(layers, tr.checkpoint_name), *inputs, budget=budget)
    recomputed = list(plan.decisions.values()).count("recomputed")
    print(ROW.format("  tr.plan", plan.saved_bytes, plan.peak_bytes, recomputed, "", ""))


if __name__ == "__main__":
    main()
