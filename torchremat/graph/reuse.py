"""Operators that may write into the memory of what they read, for which nobody looks any more.

    s = slice(b, 1, 0, 4);  c = copy(s, y);   r = slice_scatter(b, c, 1, 0, 4)
    s = slice(b, 1, 0, 4);  c = copy_(s, y);  r = b       once only r reads b

A graph is functional: a write to a part of a tensor makes a new tensor. The function that runs the
graph need not: where nobody reads the old tensor again it writes in place, as plain PyTorch does.
A *chain* is a write, and after it the operators that put it into the tensors around: they have
nothing left to do.

The memory is that of a value which the graph made, or of an input that it writes to: to an input
after the last check, since the function runs again as it is where a check does not hold.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.graph.aliasing import (
    before_identities,
    gives_alike,
    has_form_of,
    overlaps_itself,
    run_fake,
    tensors_lie_alike,
)
from torchremat.graph.nodes import all_items, call_of, is_view, results_of
from torchremat.graph.notes import graph_notes_of, notes_of, roles_of
from torchremat.graph.write_forms import (
    Form,
    Parts,
    form_in_place,
    form_with_out,
    gives_new_memory,
    is_copy,
    is_writable_view,
    outs_of,
    part_of,
    parts_with,
)
from torchremat.graph.write_order import has_check


@dataclass(frozen=True, eq=False)
class Write:
    """How an operator runs in place: in its `form`, on the memory of the value `memory`.

    Without a form it does nothing: its value is that of `memory`, which was written to before.
    """

    memory: fx.Node
    form: Form | None = None


@dataclass(frozen=True, eq=False)
class Reuse:
    """The operators of a graph that run in place.

    `inputs_filled` has the positions of the inputs that get their new values so. `outs` has the
    calls that write all of several results, for each argument that takes one where it is. `roots`
    has the values that lie in memory which another value made.
    """

    writes: Mapping[fx.Node, Write] = field(default_factory=dict)
    outs: Mapping[fx.Node, Mapping[str, Write]] = field(default_factory=dict)
    inputs_filled: tuple[int, ...] = ()
    roots: Mapping[fx.Node, fx.Node] = field(default_factory=dict)

    def last_uses(self, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
        """The last node that reads each value, or writes into it."""
        last: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            for used in self.values_for(node):
                last[used] = node
        return last

    def root_of(self, node: fx.Node) -> fx.Node:
        """The value in whose memory `node` lies."""
        return _root_of(node, self.roots)

    def values_for(self, node: fx.Node) -> list[fx.Node]:
        write, read = self.writes.get(node), node.all_input_nodes
        writes = [write] if write is not None else [*self.outs.get(node, {}).values()]
        return [*dict.fromkeys((*read, *(w.memory for w in writes)))]


def _root_of(node: fx.Node, roots: Mapping[fx.Node, fx.Node]) -> fx.Node:
    while node not in roots and is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]  # and not a number, as in `conj(2j)`
    return roots.get(node, node)


def find_reuse(
    module: fx.GraphModule,
    new_values: Mapping[int, int] | None = None,
    roles: Sequence[str] = (),
) -> Reuse:
    """Find the operators of `module` that may run in place.

    `new_values` has the inputs that it writes to: for the position of each, that of its new value
    among the results, whose `roles` are given. Only a `"write"` may lie in such an input.
    """
    inputs = list(module.graph.find_nodes(op="placeholder"))
    results = results_of(module)
    targets = {inputs[i]: results[r] for i, r in (new_values or {}).items()}
    while True:
        finder = _Finder(module.graph, targets)
        finder.run()
        kept = {
            finder.root_of(result)
            for result, role in zip(results, roles, strict=False)
            if isinstance(result, fx.Node) and role != "write"
        }
        if not finder.written.intersection(targets, kept):
            break
        targets = {p: value for p, value in targets.items() if p not in kept}
    filled = (i for i in new_values or {} if inputs[i] in targets and finder.holds(inputs[i]))
    return Reuse(finder.writes, finder.outs, tuple(filled), finder.roots)


def reuse_in(module: fx.GraphModule) -> Reuse:
    """The operators that run in place where a program runs the graph of `module`."""
    return find_reuse(module, graph_notes_of(module).new_values, roles_of(module) or ())


class _Finder:
    def __init__(self, graph: fx.Graph, targets: Mapping[fx.Node, Any]) -> None:
        self.nodes = list(graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.parts = Parts(self.nodes)
        self.targets = targets
        self.last_check = max((self.place[n] for n in self.nodes if has_check(n)), default=-1)
        self.writes: dict[fx.Node, Write] = {}
        self.outs: dict[fx.Node, Mapping[str, Write]] = {}
        self.layouts: dict[fx.Node, Tensor] = {}
        """Of what is written: how it lies in its memory."""
        self.roots: dict[fx.Node, fx.Node] = {}
        self.newest: dict[fx.Node, list[fx.Node]] = {}
        """By the root of written memory: the values in it that are read from now on."""

    @property
    def written(self) -> set[fx.Node]:
        return set(self.newest)

    def run(self) -> None:
        for node in self.nodes:
            if node.op == "call_function" and node not in self.writes:
                chains = (self._chain(node, write) for write in self._candidates(node))
                chain = next(filter(None, chains), None)
                if chain is not None:
                    self._keep(chain)
                self._write_outs(node, outs_of(node))

    def holds(self, target: fx.Node) -> bool:
        """Whether the input `target` holds its new value."""
        value = self.targets[target]
        if not isinstance(value, fx.Node) or value is target or self.root_of(value) is not target:
            return False
        return tensors_lie_alike(self._layout(value), target.meta["val"])

    # --- where values lie ------------------------------------------------------------------------

    def root_of(self, node: fx.Node) -> fx.Node:
        return _root_of(node, self.roots)

    def _layout(self, node: fx.Node) -> Any:
        """A fake tensor that lies as the value of `node` does."""
        if node in self.layouts or not is_view(node):
            return self.layouts.get(node, node.meta.get("val"))
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return node.meta.get("val")
        return self._layout_of_view(node, source, self._layout(source))

    def _is_writable(self, node: fx.Node) -> bool:
        """Whether `node` lies in memory that may be written to, and a write to it goes there."""
        while node not in self.roots and is_view(node):
            source = node.args[0]
            if not (is_writable_view(node) and isinstance(source, fx.Node)):
                return False
            node = source
        root = self.roots.get(node, node)
        value = root.meta.get("val")
        is_owned = gives_new_memory(root) or root in self.targets
        return is_owned and type(value) is _torch.FakeTensor and not overlaps_itself(value)

    # --- chains ----------------------------------------------------------------------------------

    def _candidates(self, node: fx.Node) -> Iterator[Write]:
        """The ways in which `node` may write into what is there already."""
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node):
            first = None
        in_place = form_in_place(node)
        if in_place is not None and first is not None:
            if is_copy(node) and self._is_there(first, node.args[1]):
                yield Write(first)
            yield Write(first, in_place)
        part = part_of(node)
        if part is not None and first is not None:
            yield Write(first, Form(_COPY, part))
        with_out = form_with_out(node)
        if with_out is None:
            return
        yield from self._places_of(node, with_out.op)

    def _places_of(self, result: fx.Node, op: Any) -> Iterator[Write]:
        """The places where `result` is put, which are there before."""
        for target, value in self.targets.items():
            if value is result:
                yield Write(target, Form(op, is_out=True))
        for scattered, part in parts_with(result):
            memory = before_identities(scattered)
            if self.place[memory] < self.place[call_of(result)]:
                yield Write(memory, Form(op, part, is_out=True))

    def _write_outs(self, call: fx.Node, names: Sequence[str]) -> None:
        """Let `call` write all of its results where they are put, if that is possible."""
        items = all_items(call) if names else {}
        chains = []
        for i in range(len(names) if len(items) == len(names) else 0):
            places = self._places_of(items[i], notes_of(call).written_by)
            chains.append(next(filter(None, (self._chain(items[i], w) for w in places)), None))
        roots = {chain.root for chain in chains if chain is not None}
        read = {self.root_of(node) for node in call.all_input_nodes}
        if not roots or len(roots) < len(names) or roots & read:
            return
        found = [chain for chain in chains if chain is not None]
        self.outs[call] = {n: c.writes[c.first] for n, c in zip(names, found, strict=True)}
        for chain in found:
            self._keep(chain)
            del self.writes[chain.first]  # an item, which the call gives

    def _is_there(self, first: fx.Node, source: Any) -> bool:
        if not isinstance(source, fx.Node) or self.root_of(source) is not self.root_of(first):
            return False
        there = self._layout(first)
        return there is not None and tensors_lie_alike(there, self._layout(source))

    def _chain(self, node: fx.Node, write: Write) -> "_WriteChain | None":
        """The chain that runs in place if `node` does; none if that changes what is read later."""
        if not self._is_writable(write.memory):
            return None
        layout = self._layout_written(node, write)
        if layout is None:
            return None
        root = self.root_of(write.memory)
        if root in self.targets and self.place[call_of(node)] < self.last_check:
            return None
        chain = _WriteChain(root, node, write, layout)
        while (closer := self._find_closer(chain)) is not None:
            memory = closer.args[0]
            assert isinstance(memory, fx.Node)
            chain.add(closer, memory, self._layout(memory))
        return chain if self._is_unread(chain) and self._fits_readers(chain) else None

    def _keep(self, chain: "_WriteChain") -> None:
        self.writes.update(chain.writes)
        self.layouts.update(chain.layouts)
        self.roots.update(dict.fromkeys(chain.writes, chain.root))
        self.newest[chain.root] = list(chain.writes)

    def _layout_written(self, node: fx.Node, write: Write) -> Tensor | None:
        """How the value of `node` lies when it is written so; `None` if it cannot be."""
        memory = self._layout(write.memory)
        value = node.meta.get("val")
        form = write.form
        if form is not None and form.part is not None:
            memory = self.parts.of(form.part, memory) if form.is_out else memory
        return memory if has_form_of(value, memory) else None

    def _find_closer(self, chain: "_WriteChain") -> fx.Node | None:
        """The operator that puts what was written last where it is already."""
        stack = [(chain.last, chain.layouts[chain.last])]
        while stack:
            value, layout = stack.pop()
            for user in value.users:
                if is_view(user):
                    seen = self._layout_of_view(user, value, layout)
                    if seen is not None:
                        stack.append((user, seen))
                elif user not in chain.writes and self._puts_back(user, value, layout, chain.root):
                    return user
        return None

    def _layout_of_view(self, view: fx.Node, source: fx.Node, layout: Any) -> Any:
        traced = source.meta.get("val")
        if layout is traced or tensors_lie_alike(layout, traced):
            return view.meta.get("val")
        return run_fake(view, source, layout)

    def _puts_back(self, node: fx.Node, value: fx.Node, layout: Any, root: fx.Node) -> bool:
        part = part_of(node)
        if (part is None and not is_copy(node)) or node.args[1] is not value:
            return False
        memory = node.args[0]
        if not isinstance(memory, fx.Node) or self.root_of(memory) is not root:
            return False
        around = self._layout(memory)
        place = around if part is None else self.parts.of(part, around)
        fits = has_form_of(node.meta.get("val"), around) and self._is_writable(memory)
        return fits and place is not None and tensors_lie_alike(layout, place)

    # --- readers ---------------------------------------------------------------------------------

    def _is_unread(self, chain: "_WriteChain") -> bool:
        """Whether nobody reads, after the first write, what was in the memory before."""
        stack = list(self.newest.get(chain.root, [chain.root]))
        seen = set(stack)
        while stack:
            member = stack.pop()
            for user in member.users:
                if user in chain.writes:
                    if not chain.may_read(user, member):
                        return False
                elif is_view(user):
                    if user not in seen:
                        seen.add(user)
                        stack.append(user)
                elif self.place[user] > self.place[call_of(chain.first)] or not gives_new_memory(
                    user
                ):
                    return False  # nor may a reader hand the memory on
        return True

    def _fits_readers(self, chain: "_WriteChain") -> bool:
        """Whether others may read what the chain wrote, as it lies now, before it is complete."""
        return all(
            self._may_lie_so(node, chain.layouts[node], chain, is_last=node is chain.last)
            for node in chain.writes
        )

    def _may_lie_so(self, node: fx.Node, layout: Any, chain: "_WriteChain", is_last: bool) -> bool:
        is_as_traced = tensors_lie_alike(layout, node.meta.get("val"))
        if is_as_traced and is_last:
            return True
        for user in node.users:
            if user in chain.writes:
                continue
            if user.op == "output":  # it would share memory with another one
                if is_last and self.targets.get(chain.root) is node:
                    continue
                return False
            if is_view(user):
                seen = self._layout_of_view(user, node, layout)
                if seen is None or not self._may_lie_so(user, seen, chain, is_last):
                    return False
            elif not is_as_traced and not gives_alike(user, node, layout):
                return False
        return True


_COPY = torch.ops.aten.copy_.default


class _WriteChain:
    """A write to the memory of `root`, and what puts it into the tensors around."""

    def __init__(self, root: fx.Node, first: fx.Node, write: Write, layout: Tensor) -> None:
        self.root = root
        self.first = self.last = first
        self.writes = {first: write}
        self.layouts = {first: layout}

    def add(self, node: fx.Node, memory: fx.Node, layout: Tensor) -> None:
        self.last = node
        self.writes[node] = Write(memory)
        self.layouts[node] = layout

    def may_read(self, node: fx.Node, member: fx.Node) -> bool:
        """Whether `node`, of the chain, may be given `member`, which lies in the memory."""
        write = self.writes[node]
        if write.form is None:
            return True  # nor does it read
        is_first_argument = bool(node.args) and node.args[0] is member
        others = [*node.args[1:], *node.kwargs.values()]
        return is_first_argument and not write.form.is_out and member not in _nodes_in(others)


def _nodes_in(values: Iterable[Any]) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(list(values), found.append)
    return found
