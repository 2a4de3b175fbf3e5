"""Conditions under which a trace may serve alike layers as well, see `remat/sharing`."""

import operator
from collections.abc import Iterable
from types import CodeType

from torch import Tensor, nn

from torchremat import _torch
from torchremat.autodiff.joint import Joint
from torchremat.core.source import is_user_file
from torchremat.graph.nodes import attribute
from torchremat.policies.checkpoint_name import name_p
from torchremat.remat.escapes.names_in_code import names_in
from torchremat.remat.tracing.function_trace import FunctionTrace
from torchremat.remat.tracing.guards.entries import OF_EVERY_MODULE
from torchremat.tracing.modules.attribute_reads import AttributeReads

_TELL_OBJECTS_APART = frozenset(
    ("id", "hash", "vars", "dir", "locals", "globals", "gc", "currentframe", "_getframe")
)
"""Names by which code may learn which object it has, other than by its attributes."""

_HOOKS = sorted(name for name in OF_EVERY_MODULE if name.endswith("_hooks"))


_READ_ALL = frozenset(("__getattribute__", "getattr_static"))
"""Names by which code may read attributes of modules unseen."""


def are_reads_known(made: FunctionTrace) -> bool:
    """Whether all that a trace read of modules was seen, so that no more needs a guard."""
    names_of = (names_in(code) for code in made.code if is_user_file(code.co_filename))
    return all(map(_READ_ALL.isdisjoint, names_of)) and has_only_operators(made.region.joint)


def has_only_operators(joint: Joint) -> bool:
    """Whether a joint graph holds operators and constants alone: no code of Python, no graphs."""
    module = joint.module
    for node in module.graph.nodes:
        if node.op == "get_attr":
            if not isinstance(attribute(module, str(node.target)), Tensor):
                return False
        elif node.op == "call_function":
            is_known = node.target in (operator.getitem, name_p)
            if not is_known and not isinstance(node.target, _torch.OpOverload):
                return False
    return True


def may_be_shared(
    made: FunctionTrace, inside: Iterable[nn.Module], reads: AttributeReads | None
) -> bool:
    """Whether a trace, which nothing was changed in, depends on what can be compared alone.

    Modules may be compared if none has hooks, and if it is known what was read of each.
    """
    if reads is None:
        return False
    known = list(inside)
    body, specs = made.body, made.region.specs
    return (
        not made.escapes
        and not made.result.is_of_one_module
        and not made.paths.changes
        and set(made.paths.seen) <= set(known)
        and not (body.value_guards and body.value_guards.guards)
        and not any(spec.sharding for spec in specs)
        and not any(vars(module).get(name) for module in known for name in _HOOKS)
        and all(reads.names_of(module) is not None for module in known)
        and not any(map(_tells_objects_apart, made.code))
    )


def _tells_objects_apart(code: CodeType) -> bool:
    return is_user_file(code.co_filename) and not _TELL_OBJECTS_APART.isdisjoint(names_in(code))
