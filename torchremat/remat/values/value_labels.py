"""Names of the values of a function, equal under every policy."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from torchremat.autodiff.rewrites.encoding_ops import is_encoding
from torchremat.autodiff.rewrites.encodings import value_of_encoding
from torchremat.core.source import Source
from torchremat.graph.nodes import is_checkpoint, is_forward, is_item, is_view
from torchremat.policies.checkpoint_name import name_p
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.values.scope import Key, Scope, ScopedValue
from torchremat.tracing.modules.module_paths import below

# the name that users know of a functional operator that functionalization puts in its place
_FUNCTIONAL_NAMES = {"_native_batch_norm_legit_functional": "native_batch_norm"}


@dataclass(frozen=True)
class ValueLabel:
    """The name of a value: the user's (`is_given`), or made of its module and operator."""

    name: str
    module: str
    source: Source | None
    is_given: bool = False


@dataclass(frozen=True, eq=False)
class ValueLabels:
    """The names of the values of a function, inside checkpoints too, in program order.

    `programs` are the checkpoints' programs, by the calls that they lie in.
    """

    labels: dict[Key, ValueLabel]
    programs: dict[tuple[str, ...], FunctionProgram]

    @classmethod
    def of(cls, scope: Scope) -> "ValueLabels":
        counted: dict[Key, ValueLabel] = {}
        given: dict[Key, ValueLabel] = {}
        repeats: dict[str, int] = {}
        programs: dict[tuple[str, ...], FunctionProgram] = {}
        for value in _iterate_values(scope, programs):
            if value.node.target is name_p:
                name = str(value.node.kwargs["name"])
                named = value.scope.value_of(value.node)
                module = counted[named.key].module if named.key in counted else named.module
                given.setdefault(named.key, ValueLabel(name, module, value.source, is_given=True))
                continue
            module = value.module
            base = _base_name(module, value.op)
            for index in range(_num_outputs(value.node)):
                number = repeats[base] = repeats.get(base, -1) + 1
                name = f"{base}_{number}" if number else base
                label = ValueLabel(name, module, value.source)
                counted[value.scope.path, value.node.name, index] = label
        return cls(counted | given, programs)

    def label_of(self, value: ScopedValue) -> ValueLabel:
        """The label of a value; one that is in no trace of the function itself is a copy."""
        if is_encoding(value.node):
            whole = self.label_of(replace(value, node=value_of_encoding(value.node)))
            return replace(whole, name=f"{whole.name}, encoded")
        label = self.labels.get(value.key)
        if label is None:
            module = value.module
            return ValueLabel(_base_name(module, value.op), module, value.source)
        return label

    @cached_property
    def _order(self) -> dict[Key, int]:
        return {key: i for i, key in enumerate(self.labels)}

    def position(self, value: ScopedValue) -> int:
        return self._order.get(value.key, len(self._order))


def _iterate_values(
    scope: Scope, programs: dict[tuple[str, ...], FunctionProgram]
) -> Iterator[ScopedValue]:
    """Calls of `name_p` count too; `programs` is filled on the way."""
    for node in scope.nodes:
        if node.op != "call_function" or not is_forward(node) or is_item(node):
            continue
        if is_checkpoint(node):
            inner = scope.whole_inside(node)
            if isinstance(inner.program, FunctionProgram):
                programs[inner.path] = inner.program
            yield from _iterate_values(inner, programs)
        elif node.target is name_p or not is_view(node):
            yield ScopedValue(node, scope)


def _num_outputs(node: fx.Node) -> int:
    value = node.meta.get("val")
    return len(value) if isinstance(value, tuple | list) else 1


def _base_name(module: str, op: str) -> str:
    return below(module, _steady_name(op))


def _steady_name(op: str) -> str:
    """One name for an operator that writes in place and for its functional form."""
    op = op if op.startswith("__") else op.rstrip("_")
    return _FUNCTIONAL_NAMES.get(op, op)
