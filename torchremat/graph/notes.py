"""The notes of this package on nodes and graphs: one typed record, under one key of their `meta`.

The other keys of `meta` are PyTorch's (`val`, `stack_trace`, `nn_module_stack`, ...). Records are
frozen: copies of nodes share them, as a copy of `meta` is shallow, and a change replaces them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from torchremat.core.source import Source

_KEY = "torchremat"


@dataclass(frozen=True, slots=True)
class Notes:
    """The notes on a node: the first nine come from its trace, the others from later passes.

    Attributes:
        phase: `forward`, `backward`, or `None` for a node that no trace made.
        module: the qualified name of the `nn.Module` that ran it.
        source: the user's line.
        grad_enabled: grad mode where the user's code ran it, or called the `autograd.Function` that
            did.
        is_looped: it is one call of an operator that `vmap` ran in a loop.
        is_rerun: a rule of the user's for tangents ran it, and a second derivative runs it again.
        is_for_output: PyTorch's functionalisation added it after the last operator, so that an
            output is a view of what was written. It has no phase, and is not a forward operator.
        written_by: the operator of the user's code that wrote to a tensor, where the graph has one
            that gives a new tensor.
        stands_for: the kind of device that its CPU tensors stand for, which is not here.
        label: what the user calls an input.
        is_inside_function: a user's `autograd.Function` ran it.
        is_kept_apart: what is computed of this input must not be merged with equal values.
        known_half_of: the name of the call of a checkpoint that was opened into two calls, on the
            one that runs in the forward pass.
        staged_half_of: that name on the other call, which may be replayed.
        num_outputs: how many outputs of such a call are those of the function: residuals follow.
        names: the names that `checkpoint_name` gave to the value.
        phase_before: its phase in the whole graph, while partial evaluation changes `phase`.
    """

    phase: str | None = None
    module: str | None = None
    source: Source | None = None
    grad_enabled: bool | None = None
    is_looped: bool = False
    is_rerun: bool = False
    is_for_output: bool = False
    written_by: Any = None
    stands_for: str | None = None
    label: Any = None
    is_inside_function: bool = False
    is_kept_apart: bool = False
    known_half_of: str | None = None
    staged_half_of: str | None = None
    num_outputs: int | None = None
    names: tuple[str, ...] = ()
    phase_before: str | None = None

    def from_trace(self) -> "Notes":
        """The notes that an operator passes on to those that it becomes in another trace."""
        return Notes(
            self.phase,
            self.module,
            self.source,
            self.grad_enabled,
            self.is_looped,
            self.is_rerun,
            self.is_for_output,
            self.written_by,
            self.stands_for,
        )


_NO_NOTES = Notes()


def notes_of(node: fx.Node) -> Notes:
    notes: Notes = node.meta.get(_KEY, _NO_NOTES)
    return notes


def device_kind_of(node: fx.Node, value: Tensor) -> str:
    """The kind of device that `value`, of `node`, is on in a real run."""
    return notes_of(node).stands_for or value.device.type


def set_notes(node: fx.Node, notes: Notes) -> None:
    node.meta[_KEY] = notes


def note(node: fx.Node, **changes: Any) -> None:
    node.meta[_KEY] = replace(notes_of(node), **changes)


@dataclass(frozen=True, slots=True)
class GraphNotes:
    """The notes on a graph.

    Attributes:
        program: the program that runs it.
        policy: of the body of a checkpoint that has no program yet, its policy.
        is_tidy: of the body of a checkpoint, that it computes no output twice or in vain.
        origin: of a body that was differentiated, the body that it was traced from.
        cut: of a backward graph, what it was cut from: the joint graph, its inputs and outputs.
        runner: the compiled function that runs the body.
        new_values: of a forward graph, for the positions of inputs that it writes to, those of
            their new values among the results.
        fetched_first: of a backward graph, the positions of the offloaded inputs whose copies to
            the device start before its first operator.
        consumption: of a backward graph, which gradients updates consume while it runs.
    """

    program: Any = None
    policy: Any = None
    is_tidy: bool = False
    origin: fx.GraphModule | None = None
    cut: tuple[Any, Sequence[Any], Sequence[Any]] | None = None
    runner: Any = None
    new_values: Mapping[int, int] | None = None
    fetched_first: Sequence[int] = ()
    consumption: Any = None

    @property
    def checkpoint_policy(self) -> Any:
        return self.policy or getattr(self.program, "policy", None)


_NO_GRAPH_NOTES = GraphNotes()


def graph_notes_of(module: fx.GraphModule) -> GraphNotes:
    notes: GraphNotes = module.meta.get(_KEY, _NO_GRAPH_NOTES)
    return notes


def note_graph(module: fx.GraphModule, **changes: Any) -> None:
    module.meta[_KEY] = replace(graph_notes_of(module), **changes)


# A key of its own, since users may write it too: `simulate` documents it.
_ROLES = "roles"


def roles_of(module: fx.GraphModule) -> tuple[str, ...] | None:
    """The roles of the results of a forward graph, or of the inputs of a backward graph."""
    roles: tuple[str, ...] | None = module.meta.get(_ROLES)
    return roles


def note_roles(module: fx.GraphModule, roles: Sequence[str]) -> None:
    """Note `roles`: `output`, `write`, `residual`, or `input`, `residual`, `cotangent`."""
    module.meta[_ROLES] = tuple(roles)
