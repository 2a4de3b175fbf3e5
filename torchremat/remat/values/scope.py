"""Values of a forward pass, also those inside checkpoints, by names that do not change.

The graph of a function has nodes that run a graph each: checkpoints, which may contain checkpoints.
A `Scope` is such a graph where it is called. A value has the same name under every policy, since
the names are counted over all values of the function itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torchremat.core.avals import Aval
from torchremat.core.source import Source
from torchremat.graph.nodes import (
    base_of,
    body_of,
    call_of,
    is_checkpoint,
    is_forward,
    is_item,
    is_view,
    item_index,
    results_of,
)
from torchremat.graph.notes import graph_notes_of, notes_of
from torchremat.graph.ops import packet_name
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.program.program import Program
from torchremat.tracing.modules.module_paths import ModulePaths, below

aten = torch.ops.aten


Key = tuple[tuple[str, ...], str, int]
"""Of a value: the calls of checkpoints around it, its operator's node, and the output's number."""


@dataclass(frozen=True, eq=False)
class Scope:
    """A graph that runs: of the function, or of a checkpoint at one of its calls.

    `inputs` and `outputs` are its nodes, in the order of the call's.
    """

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    outputs: Sequence[Any]
    paths: ModulePaths
    path: tuple[str, ...] = ()
    prefix: str = ""
    call: fx.Node | None = None
    outer: "Scope | None" = None
    program: Program | None = None

    @classmethod
    def of_trace(cls, module: fx.GraphModule, paths: ModulePaths) -> "Scope":
        return cls(list(module.graph.nodes), (), (), paths)

    @classmethod
    def of_program(cls, program: FunctionProgram, name: str) -> "Scope":
        joint = program.root_joint
        nodes, paths = list(joint.module.graph.nodes), program.region.paths
        return cls(nodes, joint.inputs, (), paths, prefix=name, program=program)

    def inside(self, call: fx.Node) -> "Scope":
        body = body_of(call)
        nodes = list(body.graph.nodes)
        return self._enter(
            call,
            nodes=nodes,
            inputs=[node for node in nodes if node.op == "placeholder"],
            outputs=results_of(body),
            program=graph_notes_of(body).program,
        )

    def whole_inside(self, call: fx.Node) -> "Scope":
        """The graph of the whole function of `call`, before it is sliced or opened."""
        program = program_of(call)
        if program is None:
            return self.inside(call)
        joint = program.region.joint
        nodes = list(joint.module.graph.nodes)
        return self._enter(call, nodes=nodes, inputs=joint.inputs, outputs=(), program=program)

    def _enter(self, call: fx.Node, **parts: Any) -> "Scope":
        program = parts["program"]
        return Scope(
            paths=self.paths if program is None else program.region.paths,
            path=(*self.path, _name_of_call(call)),
            prefix=self.module_of(call),
            call=call,
            outer=self,
            **parts,
        )

    @property
    def calls(self) -> list[fx.Node]:
        return [node for node in self.nodes if is_forward(node) and is_checkpoint(node)]

    def module_of(self, node: fx.Node) -> str:
        """The qualified name of the module that ran the operator of `node`, from the outermost."""
        own = notes_of(node).module or ""
        if self.outer is None:
            return below(self.prefix, own)
        return self.outer.translate_module(own, self.paths) or join_names(self.prefix, own)

    def translate_module(self, name: str, paths: ModulePaths) -> str | None:
        """The name here, or in the scope around, of the module that is `name` in `paths`.

        `None` if no module or several have that name, or if the scope does not know it.
        """
        if self.paths is paths:
            return None
        alike = [module for module in paths.seen if paths.name_of(module) == name]
        known = {self.paths.name_of(module) for module in alike}
        if len(known) != 1 or None in known:
            return None
        (own,) = known
        assert own is not None
        if self.outer is None:
            return below(self.prefix, own)
        return self.outer.translate_module(own, self.paths) or join_names(self.prefix, own)

    def value_of(self, node: fx.Node) -> "ScopedValue":
        """The value in whose memory `node` lies, with the scope that computes it."""
        scope = self
        while True:
            node = base_of(node)
            if node.op == "placeholder" and scope.outer is not None:
                assert scope.call is not None
                node = scope.call.args[1 + list(scope.inputs).index(node)]  # type: ignore[assignment]
                scope = scope.outer
            elif is_item(node) and is_checkpoint(call_of(node)):
                scope, index = scope.inside(call_of(node)), item_index(node)
                node = scope.outputs[index]
            else:
                return ScopedValue(node, scope)


@dataclass(frozen=True, eq=False)
class ScopedValue:
    """A value that an operator of a forward pass computes; or a constant, or an input."""

    node: fx.Node
    scope: Scope

    @property
    def call(self) -> fx.Node:
        return call_of(self.node)

    @property
    def index(self) -> int:
        return item_index(self.node) if is_item(self.node) else 0

    @property
    def key(self) -> Key:
        return (self.scope.path, self.call.name, self.index)

    @property
    def op(self) -> str:
        return op_base_name(self.call.target) if self.node.op == "call_function" else ""

    @property
    def module(self) -> str:
        return self.scope.module_of(self.call)

    @property
    def source(self) -> Source | None:
        """The user's line; `None` for values of the backward pass, which no line computes."""
        return notes_of(self.call).source if is_forward(self.call) else None

    @property
    def jitted_name(self) -> str:
        scope: Scope | None = self.scope
        while scope is not None:
            if scope.program is not None and scope.program.jitted_name:
                return scope.program.jitted_name
            scope = scope.outer
        return ""

    @property
    def aval(self) -> Aval | None:
        value = self.node.meta.get("val")
        return Aval.of(value) if isinstance(value, Tensor) else None

    @property
    def is_constant(self) -> bool:
        node = self.node
        if node.target in _LIFTS:
            node = node.args[0]  # type: ignore[assignment]
        return node.op == "get_attr"

    @property
    def is_input(self) -> bool:
        return self.node.op == "placeholder"


_LIFTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)


def program_of(call: fx.Node) -> FunctionProgram | None:
    program = graph_notes_of(body_of(call)).program
    return program if isinstance(program, FunctionProgram) else None


def is_computed(node: fx.Node) -> bool:
    """Whether `node` is a tensor that an operator computes: no view, tuple, or size as a symbol."""
    if node.op != "call_function" or is_checkpoint(node) or is_view(node):
        return False
    if is_item(node):
        return not is_checkpoint(call_of(node))
    return is_tensor(node)


def is_tensor(node: fx.Node) -> bool:
    return hasattr(node.meta.get("val"), "untyped_storage")


def _name_of_call(call: fx.Node) -> str:
    """The name of a call; the two parts of an opened call share the name of the whole."""
    notes = notes_of(call)
    return notes.known_half_of or notes.staged_half_of or call.name


def op_base_name(op: Any) -> str:
    """The name of an operator without overload and without `aten`.

    >>> op_base_name(torch.ops.aten.add_.Tensor), op_base_name(torch.ops.higher_order.cond)
    ('add_', 'cond')
    """
    name = packet_name(op)
    return name.removeprefix("aten.").removeprefix("higher_order.")


def join_names(outer: str, inner: str) -> str:
    """The qualified name of a module that is called `inner` within `outer`.

    What the end of one and the start of the other have in common is there once.

    >>> join_names("model.layers.0", "layers.0.attn"), join_names("layers.0", "")
    ('model.layers.0.attn', 'layers.0')
    """
    ours, theirs = [p for p in outer.split(".") if p], [p for p in inner.split(".") if p]
    for count in range(min(len(ours), len(theirs)), 0, -1):
        if ours[-count:] == theirs[:count]:
            return ".".join([*ours, *theirs[count:]])
    return ".".join([*ours, *theirs])
