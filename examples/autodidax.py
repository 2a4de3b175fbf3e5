"""Rematerialisation from scratch: the core of torchremat in one file, to be read from the top.

    python examples/autodidax.py

Training keeps values of the forward pass until the backward pass has read them. Rematerialisation
(activation checkpointing, gradient checkpointing, recomputation) keeps fewer, and computes the rest
again. It comes down to seven ideas, each a section here:

    1  trace      a function and its derivative are one graph of operators
    2  names      a value can be called something
    3  policies   which values may be kept is a function of the graph
    4  split      the graph falls into a half that runs now and a half that runs later
    5  operator   the two halves are the forward and the backward of one differentiable operator
    6  bytes      how much is alive when can be told without running anything
    7  plan       so what to keep within so many bytes can be computed: it is a minimum cut

The library has the same parts, in the files that each section names, and does with them what is
left out here: trees of arguments, tensors that a function closes over, writes in place, modules,
`vmap` and forward mode, checkpoints inside checkpoints, offloading, compilers, sizes that vary. At
the end this file and the library are given the same function, and must agree to the byte.
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
# PyTorch differentiates by running operators, and those it runs backward are operators too. So if
# we write down every operator that runs while a function runs and is differentiated, on fake
# tensors that have shapes but no numbers, we hold a graph of both: the *joint graph*. Of
# f(x, w) = sin(x @ w) it is
#
#     inputs      x, w                            known now
#     forward     y = mm(x, w);  z = sin(y)       known now
#     inputs      ct                              the cotangent of z: known later
#     backward    c = cos(y);  g = mul(ct, c);  dw = mm(t(x), g);  dx = mm(g, t(w))
#
# We need no rule for any derivative: autograd has them all, and runs them for us while we watch.
# (In the library: torchremat/autodiff/joint.py.)


@torch.library.custom_op("autodidax::mark", mutates_args=())
def mark(x: Tensor, label: str) -> Tensor:
    """The identity, seen in a trace. What it copies is a fake tensor: it never runs for real."""
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
        """The gradients that there are."""
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
    """Which node of a traced graph is what. Marks say so, and then are taken out."""
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
            raise ValueError(f"{node.target} writes in place: what it wrote over cannot come again")
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
    """Functions here give a tensor or a tuple of them."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


# Two facts about nodes matter to all that follows. An operator with several outputs is a *call*
# whose outputs are its *items*. And a *view* (transpose, reshape) computes nothing: it lies in the
# memory of its *base*, so it costs no bytes to keep and no time to make again. The schema of an
# operator says which it is. (torchremat/graph/aliasing.py)


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
    """Whether `node` is one tensor that an operator computes: something that can be kept."""
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
# Somebody who writes a policy wants to say "keep the attention", and a graph has only mm_3. The
# function itself can say it, through the same mark. As marks are taken out of the graph, a name
# costs nothing when the graph runs; it is of the value, not of the variable, which is why `read`
# puts it on the base. (torchremat/policies/checkpoint_name.py)


def name(x: Tensor, label: str) -> Tensor:
    """Call a value `label`. Outside of a trace it is the identity."""
    return mark(x, label) if isinstance(x, FakeTensor) else x


# --- 3. Policies ---------------------------------------------------------------------------------
#
# A policy says what *may* be kept; what the backward pass does not need is not kept anyway. Some
# policies ask one value at a time, others want the whole graph before they answer. One protocol
# does for both: a policy is given the graph and answers with a function of its values.
# (torchremat/policies/policy.py, policies.py)

MayKeep = Callable[[fx.Node], bool]
Policy = Callable[[Joint], MayKeep]


def everything(joint: Joint) -> MayKeep:
    """All that the backward pass needs: what plain PyTorch does."""
    return lambda value: True


def nothing(joint: Joint) -> MayKeep:
    """Only inputs are kept: what `torch.utils.checkpoint` does."""
    return lambda value: False


def dots(joint: Joint) -> MayKeep:
    """Products of matrices: they take long and give little."""
    products = {aten.mm.default, aten.bmm.default, aten.addmm.default}
    return lambda value: value.target in products


def names(*labels: str) -> Policy:
    """Values with one of these names."""
    return lambda joint: lambda value: joint.names.get(value) in labels


# An operator that draws random numbers would draw others the second time. Whatever a policy says,
# its value is kept. (The library keeps the state of the generator instead where that is smaller,
# and knows more such operators: torchremat/policies/replay_rules.py.)


def must_keep(value: fx.Node) -> bool:
    """Whether the operator of `value` must not run twice."""
    return torch.Tag.nondeterministic_seeded in getattr(call_of(value).target, "tags", ())


# --- 4. Split ------------------------------------------------------------------------------------
#
# Partial evaluation: some inputs of the graph are known now, the cotangents only later. What runs
# now is decided; the question is what is handed over. Walk back from the gradients:
#
#     a backward value       is computed later: go on with what it reads
#     a known input          is there anyway
#     a view                 goes on to what it is a view of
#     a known value          is kept if it may be, and the walk ends there;
#                            else it is computed again: go on with what it reads
#
# With sin(x @ w) as above, the walk reaches y through c = cos(y). If products may be kept, y is the
# one *residual*; if not, mm runs again and x and w are read, which somebody else keeps.
# (torchremat/autodiff/partial_eval.py)


def find_residuals(joint: Joint, may_keep: MayKeep) -> tuple[list[fx.Node], ...]:
    """What is kept, which inputs are read later, and what is computed again, in graph order."""
    kept, inputs, again, seen = (set[fx.Node]() for _ in range(4))
    stack = joint.wanted
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        is_known = node in joint.forward and is_value(node)
        if node in joint.inputs:
            inputs.add(node)
        elif is_known and (must_keep(node) or may_keep(node)):
            kept.add(node)
        else:
            again |= {node} if is_known else set()
            stack.extend(node.all_input_nodes)
    nodes = joint.module.graph.nodes
    return tuple([node for node in nodes if node in found] for found in (kept, inputs, again))


# Now each half is a graph of its own, cut out of the joint graph. Operators keep their order, with
# one exception that is worth much memory: what is computed again comes just before the first
# operator that reads it, not all at the start. (torchremat/graph/slicing.py)


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
    """What runs now, from inputs to outputs and `kept`. What runs later: from
    `inputs`, `kept` and cotangents to gradients; `again` is what it computes again.
    """

    joint: Joint
    kept: list[fx.Node]
    inputs: list[fx.Node]
    again: list[fx.Node]
    forward: fx.GraphModule
    backward: fx.GraphModule


def split(joint: Joint, may_keep: MayKeep) -> Halves:
    """The two halves of a joint graph."""
    kept, inputs, again = find_residuals(joint, may_keep)
    forward = cut_out(joint, joint.inputs, [*joint.outputs, *kept], lambda node: False)
    given = [*inputs, *kept, *joint.cotangents]
    backward = cut_out(joint, given, joint.gradients, joint.forward.__contains__)
    return Halves(joint, kept, inputs, again, forward, backward)


# --- 5. Operator ---------------------------------------------------------------------------------
#
# A graph runs as a loop over its nodes. What it holds must be dropped in time: each value after the
# last operator that reads it, also if it came in as an input. So inputs are handed over in a list,
# which is emptied. (The library writes a Python function for it: torchremat/graph/codegen.py.)


def last_reads(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The node that is the last to read each; itself, if none does."""
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
            # a call must not hold all of its outputs until the last of them is taken
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
# (The derivative of the operator is a function of inputs, cotangents and residuals. In the library
# that function is traced and split in its turn, so derivatives of every order are the same operator
# again, and there are rules for `vmap`, forward mode and tracing:
# torchremat/remat/op/autograd_functions.py.)


class Remat(torch.autograd.Function):
    """A function whose joint graph is split, as one operator."""

    @staticmethod
    def forward(ctx: Any, halves: Halves, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the first half, and keep the residuals."""
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
        """Run the second half, which frees each residual when it has been read."""
        given = [*ctx.saved_tensors, *(ct.contiguous() for ct in cotangents)]
        ctx.maybe_clear_saved_tensors()
        return None, *run(ctx.halves.backward, given)


def checkpoint(fun: Callable[..., Any], policy: Policy = nothing) -> Callable[..., Any]:
    """`fun`, a function of tensors alone, keeping for its backward pass what `policy` says."""
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
# Which tensors `run` holds when is known from the graphs alone, and so is the size of each. A
# *storage* is alive from the operator that makes it to the last that reads it or a view of it; what
# the step gives, and the cotangents, which autograd holds, to the end. Inputs and parameters are
# there anyway and do not count. The greatest sum is the peak.
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
        later = {node.name: now[node.name] for node in halves.kept}
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
# Now the best policy can be computed. Put a price on a byte: to keep value v costs price * nbytes,
# to run operator o again costs its seconds. Say y_v = 1 if v is needed in the backward pass and
# r_o = 1 if o runs again. Then
#
#     y_v = 1              if a backward operator reads v
#     y_u >= r_o           if o reads u: to run again it needs its inputs
#     cost of keeping v    if y_v = 1 and r_o = 0 for the o that makes v
#     seconds of o         if r_o = 1
#
# is least for a *minimum cut* between a source (all that is 1) and a sink (all that is 0), in a
# network with an endless edge for each condition, and one of the capacity of each cost.
# Cuts at several prices give the best of each size; the simulator says which of them fits. Yet few
# bytes kept are no low peak: in the table below, a policy that keeps two values a layer peaks
# lower than the cut that keeps one. (In the library cuts are only the start, in
# torchremat/planning/search/min_cut.py: an integer program then has a row for the bytes at each
# moment.)

FLOPS_PER_SECOND, BYTES_PER_SECOND = 1e12, 1e11
ENDLESS = 1 << 30


def seconds_of(call: fx.Node) -> float:
    """What a call takes on a machine that is limited by arithmetic or by memory: a roofline."""
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
    """What to keep, if all values together cost `price` times what all operators take."""
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
    edges += [(r[c], 1, ENDLESS if must_keep(c) else round(per_second * seconds_of(c)))
              for c in calls]  # fmt: skip
    at_one = reached(2 + len(values) + len(calls), edges)
    return frozenset(v for v in values if y[v] in at_one and r[call_of(v)] not in at_one)


def reached(size: int, edges: Iterable[tuple[int, int, int]]) -> set[int]:
    """The nodes on the source's side of a minimum cut: reached when the flow is greatest."""
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

    def __call__(self, joint: Joint) -> MayKeep:
        """Choose for a graph."""
        sets = {cut(joint, price) for price in np.logspace(-4, 4, 24)}
        found = [(split(joint, kept.__contains__), kept) for kept in sets]
        peaks = [Simulation(halves).peak for halves, _ in found]
        if min(peaks) > self.nbytes:
            raise ValueError(f"the least peak that is found is {min(peaks)} B, not {self.nbytes} B")
        fitting = [pair for pair, peak in zip(found, peaks, strict=True) if peak <= self.nbytes]
        _, kept = min(fitting, key=lambda pair: added_seconds(pair[0]))
        return kept.__contains__


def added_seconds(halves: Halves) -> float:
    """What it takes to compute again what is computed again."""
    return sum(map(seconds_of, dict.fromkeys(map(call_of, halves.again))))


# --- What comes of it ----------------------------------------------------------------------------
#
# First the example of the sections above, as the halves that each policy makes of it; then layers
# of a transformer. Every row of the table is run, and its loss and gradients are compared bit for
# bit with plain PyTorch's, its peak with the simulation, and all it says with what the library says
# of the same function under the same policy.


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
    """A row of the table: bytes kept, bytes at the peak, and what is computed again."""

    kept: int
    peak: int
    again: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, halves: Halves) -> "Figures":
        """What this file says."""
        again = sorted((op_name(v), tuple(v.meta["val"].shape)) for v in halves.again)
        return cls(sum(map(nbytes_of, halves.kept)), Simulation(halves).peak, tuple(again))

    @classmethod
    def of_library(cls, inputs: Sequence[Tensor], policy: str) -> "Figures":
        """What the library says."""
        fun = partial(layers, tr.checkpoint_name)
        report = tr.explain(fun, *inputs, policy=policy)
        again = sorted((row.op, row.shape) for row in report if row.decision == "recomputed")
        peak = tr.estimate(fun, *inputs, policy=policy).peak_bytes
        return cls(report.total, peak, tuple(again))


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
    print(ROW.format("policy", "bytes kept", "peak", "computed again", "bit-equal", "the library"))
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
        print(ROW.format(title, figures.kept, figures.peak, len(figures.again), "yes", said))
    plan = tr.plan(partial(layers, tr.checkpoint_name), *inputs, budget=budget)
    again = list(plan.decisions.values()).count("recomputed")
    print(ROW.format("  tr.plan", plan.saved_bytes, plan.peak_bytes, again, "", ""))


if __name__ == "__main__":
    main()
