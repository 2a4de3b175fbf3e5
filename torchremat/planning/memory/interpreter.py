"""Running graphs without tensors: only memory moves, as in the functions of `graph/codegen.py`."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from torchremat import _torch
from torchremat.autodiff.tiles.tiled_op import TileLayout, split_products
from torchremat.errors import GraphError
from torchremat.graph.hand_outs import find_consumed
from torchremat.graph.nodes import (
    all_items,
    body_of,
    inner_graphs_of,
    is_checkpoint,
    is_identity,
    is_item,
    is_view,
    results_of,
)
from torchremat.graph.notes import graph_notes_of, notes_of
from torchremat.graph.reuse import Write, find_reuse, reuse_in
from torchremat.planning.memory.storage_bytes import nbytes_of
from torchremat.planning.memory.timeline import Lifetime, LiveValue, Point, Timeline
from torchremat.remat.offload.copies import (
    bring_next,
    finish_copy,
    finish_fetch,
    start_copy,
    start_fetch,
    to_host,
)


class Storage:
    """Memory, and how many variables hold it."""

    __slots__ = ("category", "first", "holders", "host_nbytes", "last", "name", "nbytes")

    def __init__(self, name: str, nbytes: int, category: str, first: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.category = category
        self.first = first
        self.last = first
        self.holders = 1
        self.host_nbytes = 0
        """How many bytes of the host's memory it is, if it is there and not on the device."""


Memory = Any
"""The memory of a value: a `Storage`; `None` for what is not counted; of several, a sequence."""


def storages_in(memory: Memory) -> list[Storage]:
    """The storages in `memory`, which may name one more than once."""
    if isinstance(memory, Storage):
        return [memory]
    if memory is None:
        return []
    return [storage for part in memory for storage in storages_in(part)]


def is_freed_at_last_reader(cotangent: fx.Node) -> bool:
    """Whether a cotangent is freed while the backward pass runs.

    That of a scalar is not: it is what `loss.backward()` begins with, which autograd holds.
    """
    return _torch.FREES_COTANGENTS and bool(value_of(cotangent).ndim)


class MemoryInterpreter:
    def __init__(self, device_type: str | None) -> None:
        self.device_type = device_type
        self.phase = "forward"
        self.computed: frozenset[str] = frozenset()
        """In the backward pass: the names of the values of the forward pass."""
        self.live = 0
        self.points: list[list[Any]] = []
        self.storages: list[Storage] = []

    def timeline(self, saved_bytes: int, offloaded_bytes: int = 0) -> Timeline:
        end = len(self.points) - 1
        lifetimes = tuple(
            Lifetime(LiveValue(s.name, s.nbytes, s.category), s.first, end if s.holders else s.last)
            for s in self.storages
        )
        return Timeline(
            tuple(Point(*p) for p in self.points), lifetimes, saved_bytes, offloaded_bytes
        )

    def allocate(self, name: str, nbytes: int, category: str) -> Storage:
        storage = Storage(name, nbytes, category, len(self.points))
        self.storages.append(storage)
        self.live += nbytes
        return storage

    def cotangent(self, placeholder: fx.Node) -> Storage:
        """The memory of a cotangent, which autograd holds and hands over."""
        value = value_of(placeholder)
        nbytes = nbytes_of(placeholder, value) if self._counts(value) else 0
        return self.allocate(placeholder.name, nbytes, "cotangent")

    def _counts(self, value: Any) -> bool:
        return isinstance(value, Tensor) and self.device_type in (None, value.device.type)

    def hold(self, memory: Memory, category: str | None = None) -> None:
        """Add a variable that holds `memory`, which is of `category` from now on.

        An output stays one if it is also saved, and what is saved or given if it is a gradient.
        """
        for storage in storages_in(memory):
            storage.holders += 1
            if category and storage.category in ("temporary", "recomputed"):
                storage.category = category

    def release(self, memory: Memory) -> None:
        for storage in storages_in(memory):
            storage.holders -= 1
            if not storage.holders:
                storage.last = len(self.points) - 1
                self.live -= storage.nbytes
        if self.points and self.points[-1][1] == self.phase:
            self.points[-1][3] = self.live

    def run(self, module: fx.GraphModule, operands: Sequence[Memory], path: str = "") -> list[Any]:
        """Run a graph, which takes over the variables of `operands`; the memory of its results."""
        env: dict[fx.Node, Memory] = {}
        reuse = find_reuse(module) if path else reuse_in(module)
        last_use = reuse.last_uses(module.graph)
        handed_out = (
            {} if path else find_consumed(module, graph_notes_of(module).consumption, reuse)
        )
        given = iter(operands)
        results: list[Any] = []
        for node in module.graph.nodes:
            finished = [n for n in reuse.values_for(node) if last_use[n] is node]
            if node.op == "output":
                self._update(handed_out.pop(node, ()), env)
                results = [env.get(r) for r in results_of(module)]  # a number is in no memory
                self.hold(results)
            elif node.op == "placeholder":
                env[node] = next(given)
            elif is_checkpoint(node):
                # the body takes over what is read here for the last time
                inputs = [env[a] if isinstance(a, fx.Node) else None for a in node.args[1:]]
                self.hold(inputs)
                self._drop(finished, env)
                finished = []
                self._assign(
                    node, self.run(body_of(node), inputs, f"{path}{node.name}/"), env, last_use
                )
            elif node in reuse.writes:
                env[node] = self._write(node, reuse.writes[node], env, path)
            elif node in reuse.outs:
                memory = [env[write.memory] for write in reuse.outs[node].values()]
                self.hold(memory)
                self._point(path + node.name, self.live)
                self._assign(node, memory, env, last_use)
            elif node not in env:  # it is, if it was taken out of several outputs at once
                self._assign(node, self._call(node, env, path), env, last_use)
            if node.op != "output" and node not in last_use:
                finished.append(node)
            self._drop(finished, env)
            self._update(handed_out.pop(node, ()), env)
        return results

    def _update(self, gradients: Sequence[tuple[fx.Node, int]], env: dict[fx.Node, Memory]) -> None:
        """Let updates, each of which makes some bytes, consume gradients."""
        for gradient, nbytes in gradients:
            self.hold(env[gradient], "gradient")
            self._point(f"{gradient.name}/update", self.live + nbytes)
            self.release(env[gradient])
            self._drop([gradient], env)

    def _assign(
        self,
        node: fx.Node,
        memory: Memory,
        env: dict[fx.Node, Memory],
        last_use: dict[fx.Node, fx.Node],
    ) -> None:
        items = all_items(node)
        if not items:
            env[node] = memory
            return
        for index, item in items.items():
            env[item] = memory[index] if item in last_use else None
            self.hold(env[item])
        self.release(memory)

    def _drop(self, nodes: Sequence[fx.Node], env: dict[fx.Node, Memory]) -> None:
        for node in nodes:
            self.release(env.pop(node, None))

    def _call(self, node: fx.Node, env: dict[fx.Node, Memory], path: str) -> Memory:
        if node.op == "get_attr":
            return None
        if is_item(node):
            memory = env[node.args[0]][node.args[1]]  # type: ignore[index]
            self.hold(memory)
        elif node.target is to_host:
            memory = self._copy_to_host(node, env, path)
        elif node.target is start_fetch:
            memory = self._fetch(node, env, path)
        elif node.target is start_copy:  # it holds what it copies
            source = env[node.args[0]]  # type: ignore[index]
            self.hold(source)
            memory = [self._copy_to_host(node, env, path), source]
        elif node.target is finish_copy:
            memory = env[node.args[0]][0]  # type: ignore[index]
            self.hold(memory)
        elif node.target is finish_fetch:
            memory = env[node.args[0]]  # type: ignore[index]
            self.hold(memory)
        elif node.target is bring_next:  # for another graph
            memory = None
        elif is_view(node):
            memory = env[node.args[0]]  # type: ignore[index]
            if isinstance(node.meta.get("val"), tuple | list):  # as split gives
                memory = [memory] * len(node.meta["val"])
            self.hold(memory)
            if not is_identity(node) or any(user.op == "output" for user in node.users):
                self._point(path + node.name, self.live)
        else:
            memory = self._compute(node, env, path)
        return memory

    def _write(self, node: fx.Node, write: Write, env: dict[fx.Node, Memory], path: str) -> Memory:
        memory = env[write.memory]
        self.hold(memory)
        if write.form is not None and not write.form.is_plain_copy:
            self._point(path + node.name, self.live)
        return memory

    def _copy_to_host(self, node: fx.Node, env: dict[fx.Node, Memory], path: str) -> Memory:
        """Copy to the host: one copy for all that share memory."""
        if len(node.args) > 1:
            memory = env[node.args[1]]  # type: ignore[index]
            self.hold(memory)
            return memory
        memory = self.allocate(path + node.name, 0, "temporary")
        source = env[node.args[0]]  # type: ignore[index]
        memory.host_nbytes = sum(storage.nbytes for storage in storages_in(source))
        return memory

    def _fetch(self, node: fx.Node, env: dict[fx.Node, Memory], path: str) -> Memory:
        memory = env[node.args[0]]  # type: ignore[index]
        if not isinstance(memory, Storage) or not memory.host_nbytes:
            self.hold(memory)  # it stayed on the device
            return memory
        made = self.allocate(path + node.name, memory.host_nbytes, "saved")
        self._point(path + node.name, self.live)
        return made

    def _compute(self, node: fx.Node, env: dict[fx.Node, Memory], path: str) -> Memory:
        before = self.live
        again = self.phase == "backward" and _is_forward(node, self.computed)
        category = "recomputed" if again else "temporary"
        first = env.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        inside = first.nbytes if isinstance(first, Storage) else None

        def allocate_output(value: Any, index: int, name: str) -> Memory:
            if not self._counts(value):
                return None
            return self.allocate(name, nbytes_of(node, value, index, inside=inside), category)

        value = value_of(node)
        memory: Memory
        if isinstance(value, tuple | list):
            memory = [allocate_output(v, i, _item_name(node, i, path)) for i, v in enumerate(value)]
        else:
            memory = allocate_output(value, 0, path + node.name)
        peak = peak_inside(node, self.device_type)
        # a branch of a cond makes the results; loops hold theirs beside what a round needs
        start = before if str(node.target) == "cond" else self.live
        self._point(path + node.name, max(self.live, start + peak))
        return memory

    def _point(self, name: str, live: int) -> None:
        self.points.append([name, self.phase, live, self.live])


def peak_inside(node: fx.Node, device_type: str | None = None) -> int:
    """The most bytes of what the graphs inside `node` make at one time; 0 if there are none."""
    peaks = [0]
    bodies = inner_graphs_of(node)
    if bodies and isinstance(layout := node.args[1], TileLayout):
        bodies = [split_products(body, layout) for body in bodies]
    for body in bodies:
        interpreter = MemoryInterpreter(device_type)
        interpreter.run(body, [None] * len(body.graph.find_nodes(op="placeholder")))
        peaks += [point[2] for point in interpreter.points]
    return max(peaks)


def _is_forward(node: fx.Node, computed: frozenset[str]) -> bool:
    phase = notes_of(node).phase
    return phase == "forward" if phase is not None else node.name in computed


def _item_name(call: fx.Node, index: int, path: str) -> str:
    for user in call.users:
        if is_item(user) and user.args[1] == index:
            return path + user.name
    return f"{path}{call.name}[{index}]"


def value_of(node: fx.Node) -> Any:
    if "val" not in node.meta:
        raise GraphError(
            f"the node {node.name} has no meta['val']: simulate needs the fake tensor that it "
            "gives. Trace the graph with make_graph, or run FakeTensorProp over it"
        )
    return node.meta["val"]
