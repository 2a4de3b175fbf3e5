"""Rematerialisation from scratch: the core of torchremat in one file, to be read from the top.

    python examples/autodidax.py

Training saves values of the forward pass until the backward pass has read them. Rematerialisation
(activation checkpointing, gradient checkpointing, recomputation) saves fewer values and recomputes
the others. It needs seven ideas. Each is a section here and a room of the package:

    1  trace      a function and its derivative are one graph        tracing, graph, autodiff
    2  names      a value can have a name                            policies
    3  policies   a policy says which values may be saved            policies
    4  split      the graph is cut: one half now, one half later     autodiff
    5  operator   the halves are one differentiable operator         remat
    6  bytes      the bytes alive can be counted without a run       planning/memory
    7  plan       so the best values to save can be computed         planning

Each section names the files of the package that do the same; docs/architecture.md is their map.
The package adds trees of arguments, closed-over tensors, writes in place, modules, `vmap`, forward
mode, nested checkpoints, offloading, compilers and varying sizes. At the end this file and the
package receive the same function, and must agree to the byte.
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
# PyTorch differentiates by running operators, and the backward pass runs operators too. So we run a
# function and its derivative on fake tensors, which have shapes but no numbers, and record every
# operator. The result is one graph of both, the *joint graph*. For f(x, w) = sin(x @ w) it is
#
#     inputs      x, w                            known now
#     forward     y = mm(x, w);  z = sin(y)       known now
#     inputs      ct                              the cotangent of z: known later
#     backward    c = cos(y);  g = mul(ct, c);  dw = mm(t(x), g);  dx = mm(g, t(w))
#
# We need no rule for any derivative: autograd has them all, and we record what it runs.
#
# In the package: torchremat/tracing/tracing.py records, and torchremat/autodiff/joint.py records
# the derivative as well.


@torch.library.custom_op("autodidax::mark", mutates_args=())
def mark(x: Tensor, label: str) -> Tensor:
    """The identity, visible in a trace. It copies fake tensors only, so the copy costs nothing."""
    return x.clone()


mark.register_fake(lambda x, label: torch.empty_like(x))
mark.register_autograd(lambda ctx, cotangent: (cotangent, None))

BACKWARD = "the backward pass starts here"


@dataclass(frozen=True, eq=False)
class Joint:
    """A function and its derivative as one graph. An input without a gradient has `None`."""

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
    """Trace `fun`, a function of tensors, and its derivative for tensors of these shapes."""
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
    """Find the parts of a traced graph. Marks show them, and are then erased."""
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
    """Return a tensor or a tuple of tensors as a tuple."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


# Two facts about nodes matter below. An operator with several outputs is a *call*, and its outputs
# are *items*. A *view* (transpose, reshape) computes nothing: it lies in the memory of its *base*.
# So a view costs no bytes to save and no time to recompute. The operator's schema says which it is.
#
# In the package: torchremat/graph/nodes.py.


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
    """Whether `node` is one tensor that an operator computes: a value that can be saved."""
    return (
        node.op == "call_function"
        and not is_view(node)
        and isinstance(node.meta.get("val"), Tensor)
    )


def nbytes_of(value: fx.Node) -> int:
    """The bytes of the storage of `value`."""
    return value.meta["val"].untyped_storage().nbytes()


# --- 2. Names ------------------------------------------------------------------------------------
#
# The author of a policy wants to say "save the attention", but a graph has only mm_3. So the
# function names the value, through the same mark. Marks are erased from the graph, so a name costs
# nothing when the graph runs. A name belongs to the value and not to a view of it: `read` gives it
# to the base.
#
# In the package: torchremat/policies/checkpoint_name.py.


def name(x: Tensor, label: str) -> Tensor:
    """Give a value the name `label`. Outside a trace it is the identity."""
    return mark(x, label) if isinstance(x, FakeTensor) else x


# --- 3. Policies ---------------------------------------------------------------------------------
#
# A policy says which values *may* be saved. A value that the backward pass does not need is never
# saved. Some policies look at one value at a time, and others at the whole graph. One protocol
# serves both: a policy receives the graph and returns a function of its values.
#
# In the package: torchremat/policies/policy.py, torchremat/policies/builtin.py.

MaySave = Callable[[fx.Node], bool]
Policy = Callable[[Joint], MaySave]


def everything(joint: Joint) -> MaySave:
    """Save all that the backward pass needs, as plain PyTorch does."""
    return lambda value: True


def nothing(joint: Joint) -> MaySave:
    """Save inputs only, as `torch.utils.checkpoint` does."""
    return lambda value: False


def dots(joint: Joint) -> MaySave:
    """Save products of matrices: they are slow to recompute and small to save."""
    products = {aten.mm.default, aten.bmm.default, aten.addmm.default}
    return lambda value: value.target in products


def names(*labels: str) -> Policy:
    """Save the values with one of these names."""
    return lambda joint: lambda value: joint.names.get(value) in labels


# An operator that draws random numbers would draw other numbers the second time. So its value is
# saved, whatever the policy says. The package saves the generator's state where that is smaller.
#
# In the package: torchremat/autodiff/replay_rules.py.


def must_save(value: fx.Node) -> bool:
    """Whether the operator of `value` must not run twice."""
    return torch.Tag.nondeterministic_seeded in getattr(call_of(value).target, "tags", ())


# --- 4. Split ------------------------------------------------------------------------------------
#
# This is partial evaluation: some inputs of the graph are known now, the cotangents only later. The
# forward pass runs now. The question is which of its values the backward pass reads. Those are the
# *residuals*. Walk back from the gradients:
#
#     a backward value       is computed later: go on with the values it reads
#     a known input          is saved by its owner
#     a view                 leads to its base
#     a known value          is saved if it may be, and the walk ends there;
#                            else it is recomputed: go on with the values it reads
#
# For sin(x @ w) the walk reaches y through c = cos(y). If products may be saved, y is the only
# residual. If not, mm runs again and reads x and w.
#
# In the package: torchremat/autodiff/partial_eval.py.


def find_residuals(joint: Joint, may_save: MaySave) -> tuple[list[fx.Node], ...]:
    """The residuals, the inputs that are read later, and the recomputed values, in graph order."""
    residuals, inputs, recomputed, seen = (set[fx.Node]() for _ in range(4))
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
            residuals.add(node)
        else:
            recomputed |= {node} if is_known else set()
            stack.extend(node.all_input_nodes)
    found = (residuals, inputs, recomputed)
    return tuple([n for n in joint.module.graph.nodes if n in nodes] for nodes in found)


# Now each half is cut out of the joint graph as a graph of its own. Operators stay in their order,
# with one exception that saves much memory: an operator is recomputed just before the first one
# that reads it, not at the start of the backward pass.
#
# In the package: torchremat/graph/slicing.py.


def cut_out(
    joint: Joint,
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node | None],
    is_late: Callable[[fx.Node], bool],
) -> fx.GraphModule:
    """Cut out the graph from some values of the joint graph to others."""
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
    """The half that runs now, from inputs to outputs and residuals, and the half that runs later.

    The second leads from `inputs`, `residuals` and cotangents to gradients, and runs the operators
    of `recomputed` a second time.
    """

    joint: Joint
    residuals: list[fx.Node]
    inputs: list[fx.Node]
    recomputed: list[fx.Node]
    forward: fx.GraphModule
    backward: fx.GraphModule


def split(joint: Joint, may_save: MaySave) -> Halves:
    """Cut a joint graph into its two halves."""
    residuals, inputs, recomputed = find_residuals(joint, may_save)
    forward = cut_out(joint, joint.inputs, [*joint.outputs, *residuals], lambda node: False)
    given = [*inputs, *residuals, *joint.cotangents]
    backward = cut_out(joint, given, joint.gradients, joint.forward.__contains__)
    return Halves(joint, residuals, inputs, recomputed, forward, backward)


# --- 5. Operator ---------------------------------------------------------------------------------
#
# A graph runs as a loop over its nodes. Each value must be freed after the last operator that reads
# it, inputs included. So inputs are passed in a list, which `run` empties. The package generates a
# Python function in place of the loop.
#
# In the package: torchremat/graph/codegen.py.


def last_reads(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the last node that reads it, or itself if no node does."""
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
            # else all outputs of a call would live until the last of them is read
            env.update({item: result[item.args[1]] for item in items} or {node: result})
            del result
        del args, kwargs
        for finished in (node, *node.all_input_nodes):
            if last[finished] is node:
                env.pop(finished, None)
    raise AssertionError("a graph ends in its output node")


# So rematerialisation is a differentiable operator: forward runs one half and saves the residuals,
# backward runs the other half. Residuals go through `save_for_backward`, so PyTorch raises an error
# if one is changed in place before it is read.
#
# This operator has one derivative. In the package the derivative is traced and split again, so that
# derivatives of every order are the same operator, with rules for `vmap` and forward mode.
#
# In the package: torchremat/remat/op/remat_op.py, torchremat/remat/op/autograd_functions.py.


class Remat(torch.autograd.Function):
    """Both halves of a joint graph as one operator of autograd."""

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


# Last, the entrance: trace once for each kind of call, ask the policy, split, and apply.
#
# In the package: torchremat/remat/checkpoint.py, torchremat/remat/tracing/trace_cache.py.


def checkpoint(fun: Callable[..., Any], policy: Policy = nothing) -> Callable[..., Any]:
    """Make `fun`, a function of tensors, save only what `policy` allows."""
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
# The graphs alone say which tensors are alive at each operator, and how large they are. A *storage*
# lives from the operator that makes it to the last one that reads it or a view of it. Outputs,
# gradients and cotangents live to the end. Inputs and parameters do not count, since they exist
# anyway. The largest sum of living bytes is the peak.
#
# In the package: torchremat/planning/memory/interpreter.py, torchremat/planning/memory/simulate.py.


@dataclass
class Storage:
    """Bytes, with the first and the last operator at which they are alive."""

    nbytes: int
    first: int
    last: int


class Simulation:
    """A training step without numbers: only storages are made and freed."""

    def __init__(self, halves: Halves) -> None:
        self.time = 0
        self.storages: list[Storage] = []
        joint = halves.joint
        now = self.walk(halves.forward, {})
        later = {node.name: now[node.name] for node in halves.residuals}
        later |= {ct.name: self.make(ct.meta["val"]) for ct in joint.cotangents}
        cotangents = [later[ct.name] for ct in joint.cotangents]
        self.walk(halves.backward, later)
        given = [now.get(node.name) for node in joint.outputs]
        given += [later.get(node.name) for node in joint.wanted]
        for storage in (*cotangents, *given):
            if storage is not None:  # an output may be an input
                storage.last = self.time - 1

    def make(self, value: Tensor) -> Storage:
        """Allocate a storage."""
        self.storages.append(Storage(value.untyped_storage().nbytes(), self.time, self.time))
        return self.storages[-1]

    def walk(self, module: fx.GraphModule, where: dict[str, Storage]) -> dict[str, Storage]:
        """Run a graph; `where` has the storage of each value by name, but none of an input."""
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            if is_view(node):
                if base_of(node).name in where:  # else it is a view of an input
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
        """The most bytes alive at one operator."""
        return max(self.live)


# --- 7. Plan -------------------------------------------------------------------------------------
#
# Now the best policy can be computed. Give a byte a price: saving value v costs price * nbytes, and
# recomputing operator o costs its seconds. Let y_v = 1 if the backward pass needs v, and r_o = 1 if
# o runs again. Then
#
#     y_v = 1              if a backward operator reads v
#     y_u >= r_o           if o reads u: its inputs are needed when it runs again
#     cost of saving v     if y_v = 1 and r_o = 0 for the o that makes v
#     seconds of o         if r_o = 1
#
# is least for a *minimum cut* between a source (all that is 1) and a sink (all that is 0). The
# network has an edge without limit for each condition, and an edge with the capacity of each cost.
# Each price gives one cut, and the simulator says which cuts fit. But few saved bytes do not make a
# low peak: in the table below, a policy that saves two values a layer has a lower peak than the cut
# that saves one. So the package has an integer program with a row for the bytes at each moment that
# matters, and cuts are one of the searches that help it.
#
# In the package: torchremat/planning/search/min_cut.py, torchremat/planning/milp/saving_program.py,
# and torchremat/planning/solver.py, which runs the searches.

# Round numbers: a cut depends on the ratio of costs, not on true seconds.
FLOPS_PER_SECOND, BYTES_PER_SECOND = 1e12, 1e11
# SciPy's maximum_flow takes 32-bit integers. All costs together are at most half of this.
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
    """The values to save if all values together cost `price` times what all operators cost."""
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
    """The nodes on the source's side of a minimum cut, reached in what a maximum flow leaves."""
    starts, ends, capacities = map(np.array, zip(*edges, strict=True))
    network = sparse.csr_matrix((capacities.astype(np.int32), (starts, ends)), shape=(size, size))
    left = network - csgraph.maximum_flow(network, 0, 1).flow
    left.data[left.data < 0] = 0
    left.eliminate_zeros()
    return set(csgraph.breadth_first_order(left, 0, return_predecessors=False).tolist())


@dataclass(frozen=True)
class Budget:
    """The policy that adds the least time among the cuts whose peak fits in so many bytes."""

    nbytes: int

    def __call__(self, joint: Joint) -> MaySave:
        """Choose the values for a graph."""
        sets = {cut(joint, price) for price in np.logspace(-4, 4, 24)}
        found = [(split(joint, saved.__contains__), saved) for saved in sets]
        peaks = [Simulation(halves).peak for halves, _ in found]
        if min(peaks) > self.nbytes:
            raise ValueError(f"the lowest peak found is {min(peaks)} B, above {self.nbytes} B")
        fitting = [pair for pair, peak in zip(found, peaks, strict=True) if peak <= self.nbytes]
        _, saved = min(fitting, key=lambda pair: added_seconds(pair[0]))
        return saved.__contains__


def added_seconds(halves: Halves) -> float:
    """The seconds of all recomputed operators."""
    return sum(map(seconds_of, dict.fromkeys(map(call_of, halves.recomputed))))


# --- The proof -----------------------------------------------------------------------------------
#
# First the small example: the halves that two policies make of it. Then layers of a transformer.
# Every row of the table is run. Its loss and gradients are compared bit for bit with plain PyTorch,
# its peak with the simulation, and all its figures with those of the package.


def product(x: Tensor, w: Tensor) -> Tensor:
    """The example."""
    return torch.sin(x @ w)


def show_halves() -> None:
    """Print the operators of both halves of the example."""
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
    """Layers of a transformer, and a loss. `call_it` names values, here or in the package."""
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
    """A row of the table: bytes saved, bytes at the peak, and the recomputed operators."""

    saved: int
    peak: int
    recomputed: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, halves: Halves) -> "Figures":
        """The figures of this file."""
        recomputed = sorted((op_name(v), tuple(v.meta["val"].shape)) for v in halves.recomputed)
        saved = sum(map(nbytes_of, halves.residuals))
        return cls(saved, Simulation(halves).peak, tuple(recomputed))

    @classmethod
    def of_package(cls, inputs: Sequence[Tensor], policy: str) -> "Figures":
        """The figures of the package."""
        fun = partial(layers, tr.checkpoint_name)
        report = tr.explain(fun, *inputs, policy=policy)
        recomputed = sorted((row.op, row.shape) for row in report if row.decision == "recomputed")
        peak = tr.estimate(fun, *inputs, policy=policy).peak_bytes
        return cls(report.total, peak, tuple(recomputed))


ROW = "{:16}{:>12}{:>12}{:>16}   {:11}{}"


def main() -> None:
    """Print the halves of the example, then the table."""
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
    print(ROW.format("policy", "bytes saved", "peak", "recomputed", "bit-equal", "the package"))
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
            assert figures == Figures.of_package(inputs, spelling), title
        said = "-" if spelling is None else "says the same"
        print(ROW.format(title, figures.saved, figures.peak, len(figures.recomputed), "yes", said))
    plan = tr.plan(partial(layers, tr.checkpoint_name), *inputs, budget=budget)
    recomputed = list(plan.decisions.values()).count("recomputed")
    print(ROW.format("  tr.plan", plan.saved_bytes, plan.peak_bytes, recomputed, "", ""))


if __name__ == "__main__":
    main()
