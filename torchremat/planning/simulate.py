"""The bytes alive at each operator of a forward and a backward graph, without running them.

What is counted is what the functions of `graph/codegen.py` hold when they run the graphs: storages,
each once, from the operator that makes one until the last tensor in it is dropped.

    forward                       backward
    y = mm(x, w)    y             c = cos(y)         y, s?, ct, c     y was saved
    s = sin(y)      y, s          g = mul(ct, c)     ct, c, g         ct is held to the end
    return s, y                   dw = mm(xT, g)     ct, g, dw

Inputs and parameters, which are there anyway, are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from torchremat.errors import GraphError
from torchremat.graph.aliases import is_item, is_view
from torchremat.graph.codegen import all_items, is_identity, last_uses
from torchremat.graph.inner_graphs import inner_graphs_of
from torchremat.planning.storages import nbytes_of
from torchremat.planning.timeline import Lifetime, LiveValue, Point, Timeline

def simulate(
    forward_graph: fx.GraphModule, backward_graph: fx.GraphModule | None = None
) -> Timeline:
    """The bytes alive at each operator of a step that runs `forward_graph` and `backward_graph`.

    On the CPU they are those that a dispatch mode counts, on a GPU those asked of the allocator,
    apart from the workspaces of kernels. Sizes that vary count at what they were when traced.

    A placeholder of the backward graph with the name of a node of the forward graph is that value;
    any other is a cotangent, held through the whole backward pass. Results of the forward graph
    that the backward graph does not take, or that are there once more than it takes them, are
    outputs, held to the end of the step, and so are gradients. Where names do not tell,
    `meta["roles"]` of the modules does: of the forward module, for each result, `"output"`,
    `"write"` (the new value of an input, held to the end of the forward pass) or `"residual"`; of
    the backward module, for each placeholder, `"input"`, `"residual"` (in the same order) or
    `"cotangent"`.

    Args:
        forward_graph: from inputs to a tuple of outputs and what the backward graph reads; of ATen
            operators, each node with its value, a fake tensor, in `meta["val"]`.
        backward_graph: from what it reads of the forward graph, and cotangents, to gradients.

    Returns:
        The `Timeline` of the step.

    Raises:
        TypeError: if an argument is no `fx.GraphModule`.
        GraphError: (a `ValueError`) if a node lacks its value, or the graphs do not fit together.

    >>> import torch, torchremat as tr
    >>> g = tr.make_graph(lambda x: x.sin().exp().sum())(torch.ones(256))    # 1024 bytes
    >>> timeline = simulate(g.graph_module)
    >>> timeline.live                            # sin; sin and exp; exp and the sum
    (1024, 2048, 1028)
    >>> print(timeline)
    peak 2.00 KiB at exp (forward, 2 of 3); 0 B saved by the forward pass
      1.00 KiB sin (temporary)
      1.00 KiB exp (temporary)
    """
    _check(forward_graph, "forward_graph")
    if backward_graph is not None:
        _check(backward_graph, "backward_graph")
    links = _Links.between(forward_graph, backward_graph)
    walk = _Walk()
    placeholders = forward_graph.graph.find_nodes(op="placeholder")
    results = walk.run(forward_graph, [None] * len(placeholders))
    outputs = [r for r, role in zip(results, links.roles, strict=True) if role == "output"]
    walk.hold(outputs, "output")
    residuals = [r for r, role in zip(results, links.roles, strict=True) if role == "residual"]
    walk.hold(residuals, "saved")
    walk.release(results)
    saved = {id(s): s.nbytes for s in _storages_in(residuals) if s.category == "saved"}
    if backward_graph is not None:
        walk.phase = "backward"
        walk.computed = frozenset(n.name for n in forward_graph.graph.nodes)
        operands = [
            walk.cotangent(node) if source is None else _INPUT if source < 0 else results[source]
            for node, source in zip(links.placeholders, links.sources, strict=True)
        ]
        walk.hold(operands)
        walk.release(residuals)
        walk.hold(walk.run(backward_graph, operands), "gradient")
    return walk.timeline(sum(saved.values()))


def _check(graph: Any, name: str) -> None:
    if not isinstance(graph, fx.GraphModule):
        raise TypeError(
            f"simulate reads graphs, {name} an fx.GraphModule, but it was given {type(graph)!r}. "
            "Of a function: make_graph(fun)(*args).graph_module"
        )


# --- how the graphs hang together ----------------------------------------------------------------


@dataclass(frozen=True)
class _Links:
    """What each result of the forward graph is, and where the backward graph's inputs come from.

    `sources`: of each of the backward graph's `placeholders` the position of the result that it is,
    -1 for an input of the forward graph, `None` for a cotangent.
    """

    roles: tuple[str, ...]
    placeholders: tuple[fx.Node, ...]
    sources: tuple[int | None, ...]

    @classmethod
    def between(cls, forward: fx.GraphModule, backward: fx.GraphModule | None) -> "_Links":
        results = _results_of(forward)
        placeholders = () if backward is None else backward.graph.find_nodes(op="placeholder")
        given = None if backward is None else backward.meta.get("roles")
        roles = forward.meta.get("roles")
        if roles is not None and given is not None:
            return cls(roles, tuple(placeholders), _sources_by_order(roles, given))
        positions = {r.name: i for i, r in enumerate(results) if isinstance(r, fx.Node)}
        others = {n.name: n.op for n in forward.graph.nodes if n.name not in positions}
        sources = tuple(_source_by_name(p, positions, others) for p in placeholders)
        if roles is None:
            taken = {source for source in sources if source is not None}
            roles = tuple("residual" if i in taken else "output" for i in range(len(results)))
        return cls(roles, tuple(placeholders), sources)


def _results_of(module: fx.GraphModule) -> tuple[Any, ...]:
    (output,) = module.graph.find_nodes(op="output")
    results = output.args[0]
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def _sources_by_order(roles: Sequence[str], given: Sequence[str]) -> tuple[int | None, ...]:
    residuals = [i for i, role in enumerate(roles) if role == "residual"]
    if given.count("residual") != len(residuals):
        raise GraphError(
            f"the graphs do not fit together: the forward graph gives {len(residuals)} residuals, "
            f"and the backward graph takes {given.count('residual')}. Give simulate two of one "
            "program"
        )
    rest = iter(residuals)
    return tuple(
        next(rest) if role == "residual" else -1 if role == "input" else None for role in given
    )


def _source_by_name(
    placeholder: fx.Node, positions: dict[str, int], others: dict[str, str]
) -> int | None:
    """The last result of that name: where it is there twice, the first is an output."""
    name = placeholder.name
    if name in positions:
        return positions[name]
    op = others.get(name)
    if op in ("placeholder", "get_attr") or not placeholder.users:
        return -1
    if op is not None:
        raise GraphError(
            f"the backward graph takes {name}, which the forward graph computes but does not give: "
            f"its results are {', '.join(positions) or 'none'}. Add it to them, or rename the "
            "placeholder if it is a cotangent"
        )
    return None


# --- running without tensors ---------------------------------------------------------------------


class _Storage:
    """Memory, and how many variables hold it."""

    __slots__ = ("category", "first", "holders", "last", "name", "nbytes")

    def __init__(self, name: str, nbytes: int, category: str, first: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.category = category
        self.first = first
        self.last = first
        self.holders = 1


_Memory = Any
"""The memory of a value: a `_Storage`; `None` for what is not counted; of several, a sequence."""

_INPUT = None


def _storages_in(memory: _Memory) -> list[_Storage]:
    if isinstance(memory, _Storage):
        return [memory]
    if memory is None:
        return []
    return [storage for part in memory for storage in _storages_in(part)]


class _Walk:
    """A run of graphs in which only memory moves."""

    def __init__(self) -> None:
        self.phase = "forward"
        self.computed: frozenset[str] = frozenset()
        """In the backward pass: the names of the values of the forward pass."""
        self.live = 0
        self.points: list[list[Any]] = []
        self.storages: list[_Storage] = []

    def timeline(self, saved_bytes: int) -> Timeline:
        """What has been seen."""
        end = len(self.points) - 1
        lifetimes = tuple(
            Lifetime(LiveValue(s.name, s.nbytes, s.category), s.first, end if s.holders else s.last)
            for s in self.storages
        )
        return Timeline(tuple(Point(*p) for p in self.points), lifetimes, saved_bytes)

    # --- memory ----------------------------------------------------------------------------------

    def allocate(self, name: str, nbytes: int, category: str) -> _Storage:
        """New memory, with one holder."""
        storage = _Storage(name, nbytes, category, len(self.points))
        self.storages.append(storage)
        self.live += nbytes
        return storage

    def cotangent(self, placeholder: fx.Node) -> _Storage:
        """The memory of a cotangent, which autograd holds while the backward pass runs."""
        nbytes = nbytes_of(placeholder, _value_of(placeholder))
        return self.allocate(placeholder.name, nbytes, "cotangent")

    def hold(self, memory: _Memory, category: str | None = None) -> None:
        """Add a variable that holds `memory`, which is of `category` from now on.

        An output stays one if it is also saved, and what is saved or given if it is a gradient.
        """
        for storage in _storages_in(memory):
            storage.holders += 1
            if category and storage.category in ("temporary", "recomputed"):
                storage.category = category

    def release(self, memory: _Memory) -> None:
        """Drop a variable that holds `memory`."""
        for storage in _storages_in(memory):
            storage.holders -= 1
            if not storage.holders:
                storage.last = len(self.points) - 1
                self.live -= storage.nbytes
        if self.points and self.points[-1][1] == self.phase:
            self.points[-1][3] = self.live

    # --- operators -------------------------------------------------------------------------------

    def run(self, module: fx.GraphModule, operands: Sequence[_Memory], path: str = "") -> list[Any]:
        """Run a graph, which takes over the variables of `operands`; the memory of its results.

        Results are held by a variable of the caller's.
        """
        env: dict[fx.Node, _Memory] = {}
        last_use = last_uses(module.graph)
        given = iter(operands)
        results: list[Any] = []
        for node in module.graph.nodes:
            finished = [n for n in node.all_input_nodes if last_use[n] is node]
            if node.op == "output":
                results = [env[r] if isinstance(r, fx.Node) else None for r in _results_of(module)]
                self.hold(results)
            elif node.op == "placeholder":
                env[node] = next(given)
            elif hasattr(node.target, "runner_of"):
                # the body takes over what is read here for the last time
                inputs = [env[a] if isinstance(a, fx.Node) else None for a in node.args[1:]]
                self.hold(inputs)
                self._drop(finished, env)
                finished = []
                (body,) = inner_graphs_of(node)
                self._assign(node, self.run(body, inputs, f"{path}{node.name}/"), env, last_use)
            elif node not in env:  # it is, if it was taken out of several outputs at once
                self._assign(node, self._call(node, env, path), env, last_use)
            if node.op != "output" and node not in last_use:
                finished.append(node)
            self._drop(finished, env)
        return results

    def _assign(
        self,
        node: fx.Node,
        memory: _Memory,
        env: dict[fx.Node, _Memory],
        last_use: dict[fx.Node, fx.Node],
    ) -> None:
        """Put `memory`, held already, in the variable of `node`, or of what is taken out of it."""
        items = all_items(node)
        if not items:
            env[node] = memory
            return
        for index, item in items.items():
            env[item] = memory[index] if item in last_use else None
            self.hold(env[item])
        self.release(memory)

    def _drop(self, nodes: Sequence[fx.Node], env: dict[fx.Node, _Memory]) -> None:
        for node in nodes:
            self.release(env.pop(node, None))

    def _call(self, node: fx.Node, env: dict[fx.Node, _Memory], path: str) -> _Memory:
        """Run the operator of `node`; the memory of its result, with a holder."""
        if node.op == "get_attr":
            return None
        if is_item(node):
            memory = env[node.args[0]][node.args[1]]  # type: ignore[index]
            self.hold(memory)
        elif is_view(node):
            memory = env[node.args[0]]  # type: ignore[index]
            if isinstance(node.meta.get("val"), tuple | list):  # as split gives
                memory = [memory] * len(node.meta["val"])
            self.hold(memory)
            if not is_identity(node):
                self._point(path + node.name, self.live)
        else:
            memory = self._compute(node, env, path)
        return memory

    def _compute(self, node: fx.Node, env: dict[fx.Node, _Memory], path: str) -> _Memory:
        before = self.live
        again = self.phase == "backward" and _is_forward(node, self.computed)
        category = "recomputed" if again else "temporary"
        first = env.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        inside = first.nbytes if isinstance(first, _Storage) else None

        def made(value: Any, index: int, name: str) -> _Memory:
            if not isinstance(value, Tensor):
                return None
            return self.allocate(name, nbytes_of(node, value, index, inside=inside), category)

        value = _value_of(node)
        memory: _Memory
        if isinstance(value, tuple | list):
            memory = [made(v, i, _item_name(node, i, path)) for i, v in enumerate(value)]
        else:
            memory = made(value, 0, path + node.name)
        peak = max(map(_peak_inside, inner_graphs_of(node)), default=0)
        # a branch of a cond makes the results; loops hold theirs beside what a round needs
        start = before if str(node.target) == "cond" else self.live
        self._point(path + node.name, max(self.live, start + peak))
        return memory

    def _point(self, name: str, live: int) -> None:
        self.points.append([name, self.phase, live, self.live])


def _peak_inside(body: fx.GraphModule) -> int:
    """The bytes that an operator needs to run `body`; what it is given is held outside."""
    walk = _Walk()
    walk.run(body, [None] * len(body.graph.find_nodes(op="placeholder")))
    return max((point[2] for point in walk.points), default=0)


def _is_forward(node: fx.Node, computed: frozenset[str]) -> bool:
    phase = node.meta.get("phase")
    return phase == "forward" if phase is not None else node.name in computed


def _item_name(call: fx.Node, index: int, path: str) -> str:
    """The name of the node that takes the output `index` of `call`, if there is one."""
    for user in call.users:
        if is_item(user) and user.args[1] == index:
            return path + user.name
    return f"{path}{call.name}[{index}]"


def _value_of(node: fx.Node) -> Any:
    if "val" not in node.meta:
        raise GraphError(
            f"the node {node.name} has no meta['val']: simulate needs the fake tensor that it "
            "gives. Trace the graph with make_graph, or run FakeTensorProp over it"
        )
    return node.meta["val"]
