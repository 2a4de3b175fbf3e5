"""The policies that come with the library: JAX's, and by operator and by module.

Source: `jax/_src/ad_checkpoint.py`. Users meet the functions, and the four policies without
arguments; the classes hold the arguments.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torchremat.core.avals import Aval
from torchremat.errors import PolicyError, PolicyValueError, nearest_names
from torchremat.graph.ops import (
    OpMatcher,
    as_op_matcher,
    is_dot,
    is_dot_with_no_batch_dims,
    packet_name,
    why_unknown,
)
from torchremat.policies.checkpoint_name import name_p
from torchremat.policies.policy import MATCHES_NOTHING, Policy, PolicyLike, Value, as_policy
from torchremat.policies.spelling import register_spelling, spell
from torchremat.policies.verdicts import NotSaved, Recompute, Saveable, Verdict

__all__ = [
    "checkpoint_dots", "checkpoint_dots_with_no_batch_dims", "dots_saveable",
    "dots_with_no_batch_dims_saveable", "everything_saveable", "nothing_saveable",
    "recompute_modules", "recompute_ops", "save_any_names_but_these",
    "save_anything_except_these_names", "save_from_both_policies", "save_modules",
    "save_only_these_names", "save_ops",
]  # fmt: skip


class _BuiltIn(Policy):
    """A policy whose `repr` calls a function of this module; a dataclass of its arguments."""

    function: ClassVar[str]
    word: ClassVar[str]

    @property
    def spelling(self) -> str | None:
        return self.word

    def __repr__(self) -> str:
        return self.function


@dataclass(frozen=True, repr=False)
class EverythingSaveable(_BuiltIn):
    """Every value may be saved: as many as plain autograd saves, never more.

    >>> everything_saveable(None)
    True
    """

    function = "everything_saveable"
    word = "none"
    reads_sizes = False

    def __call__(self, op: object, /, *avals: Aval, **params: Any) -> bool:
        return True


@dataclass(frozen=True, repr=False)
class NothingSaveable(_BuiltIn):
    """No value may be saved: the backward pass recomputes everything from the inputs.

    >>> nothing_saveable(None)
    False
    """

    function = "nothing_saveable"
    word = "full"
    reads_sizes = False

    def __call__(self, op: object, /, *avals: Aval, **params: Any) -> bool:
        return False


@dataclass(frozen=True, repr=False)
class DotsSaveable(_BuiltIn):
    """The results of matrix multiplications, convolutions and attention may be saved.

    >>> import torch
    >>> dots_saveable(torch.ops.aten.bmm.default), dots_saveable(torch.ops.aten.sin.default)
    (True, False)
    """

    function = "dots_saveable"
    word = "dots"
    reads_sizes = False

    def __call__(self, op: object, /, *avals: Aval, **params: Any) -> bool:
        return is_dot(op)


@dataclass(frozen=True, repr=False)
class DotsWithNoBatchDimsSaveable(_BuiltIn):
    """The results of matrix multiplications without batch dimensions may be saved.

    These are the products of weights with activations. Attention scores, which are far larger, are
    not among them, nor are convolutions and attention.

    >>> import torch
    >>> dots_with_no_batch_dims_saveable(torch.ops.aten.addmm.default)
    True
    >>> dots_with_no_batch_dims_saveable(torch.ops.aten.bmm.default)
    False
    """

    function = "dots_with_no_batch_dims_saveable"
    word = "dots_with_no_batch_dims_saveable"

    def __call__(self, op: object, /, *avals: Aval, **params: Any) -> bool:
        return is_dot_with_no_batch_dims(op, *avals)


everything_saveable = EverythingSaveable()
nothing_saveable = NothingSaveable()
dots_saveable = checkpoint_dots = DotsSaveable()
dots_with_no_batch_dims_saveable = DotsWithNoBatchDimsSaveable()
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable


# --- policies made of a list: names, operators, modules -------------------------------------------


@dataclass(frozen=True, repr=False)
class _PatternPolicy(_BuiltIn, ABC):
    items: tuple[str, ...]
    reads_sizes = False

    @abstractmethod
    def _matches(self, value: Value) -> bool:
        """Whether one of the items means `value`."""

    @abstractmethod
    def _find_unmatched_items(self, values: Sequence[Value]) -> Iterator[tuple[str, str]]:
        """The items that mean none of `values`, each with a list of names that exist."""

    def _saves(self, value: Value) -> bool:
        return self._matches(value)

    def decide(self, value: Value) -> Verdict:
        if self._saves(value):
            return Saveable()
        return Recompute() if self._matches(value) else NotSaved()

    def find_unmatched(self, values: Sequence[Value]) -> list[str]:
        return [
            f"{self!r}: {item!r}{MATCHES_NOTHING}. Of {known}"
            for item, known in self._find_unmatched_items(values)
        ]

    @property
    def spelling(self) -> str | None:
        return spell(self.word, self.items) if self.items else None

    def __repr__(self) -> str:
        return f"{self.function}({', '.join(map(repr, self.items))})"


class _Names(_PatternPolicy):
    def _matches(self, value: Value) -> bool:
        return not set(self.items).isdisjoint(value.names)

    def _find_unmatched_items(self, values: Sequence[Value]) -> Iterator[tuple[str, str]]:
        known = {name for value in values for name in value.names}
        for item in self.items:
            if item not in known:
                yield item, f"the names given by checkpoint_name, {nearest_names(item, known)}"


class SaveOnlyTheseNames(_Names):
    function = "save_only_these_names"
    word = "names"


class SaveAnyNamesButThese(_Names):
    function = word = "save_any_names_but_these"

    def _saves(self, value: Value) -> bool:
        return bool(value.names) and not self._matches(value)


class SaveAnythingExceptTheseNames(_Names):
    function = word = "save_anything_except_these_names"

    def _saves(self, value: Value) -> bool:
        return not self._matches(value)


class _Ops(_PatternPolicy):
    def _matches(self, value: Value) -> bool:
        ops = (value.op, name_p) if value.names else (value.op,)
        return any(OpMatcher(item).matches(op) for item in self.items for op in ops)

    def _find_unmatched_items(self, values: Sequence[Value]) -> Iterator[tuple[str, str]]:
        ops = {value.op for value in values}
        ops |= {name_p for value in values if value.names}
        known = {packet_name(op) for op in ops}
        for item in self.items:
            if not any(OpMatcher(item).matches(op) for op in ops):
                unknown = why_unknown(item)
                also = f" ({unknown})" if unknown else ""
                yield item, f"the operators, {nearest_names(item, known)}{also}"


class SaveOps(_Ops):
    function = "save_ops"
    word = "ops"


class RecomputeOps(_Ops):
    function = word = "recompute_ops"

    def _saves(self, value: Value) -> bool:
        return not self._matches(value)


class _Modules(_PatternPolicy):
    def _matches(self, value: Value) -> bool:
        inside = _enclosing_modules(value.module)
        return any(fnmatchcase(module, item) for item in self.items for module in inside)

    def _find_unmatched_items(self, values: Sequence[Value]) -> Iterator[tuple[str, str]]:
        known = {module for value in values for module in _enclosing_modules(value.module)}
        for item in self.items:
            if not any(fnmatchcase(module, item) for module in known):
                yield item, f"the modules, {nearest_names(item, known - {''})}"


class SaveModules(_Modules):
    function = "save_modules"
    word = "modules"


class RecomputeModules(_Modules):
    function = word = "recompute_modules"

    def _saves(self, value: Value) -> bool:
        return not self._matches(value)


def save_only_these_names(*names: str) -> Policy:
    """Only values with one of these names (`checkpoint_name`) may be saved.

    Like every policy made of names, it raises `PolicyError` (a `TypeError`) for a name that is no
    string. An empty name raises `PolicyValueError` (a `ValueError`).

    >>> save_only_these_names("attn", "mlp").spelling
    'names:attn,mlp'
    """
    return SaveOnlyTheseNames(check_items("save_only_these_names", "name", names))


def save_any_names_but_these(*names: str) -> Policy:
    """Values that have a name, and none of these, may be saved. Values without one may not.

    >>> save_any_names_but_these("scores")
    save_any_names_but_these('scores')
    """
    return SaveAnyNamesButThese(check_items("save_any_names_but_these", "name", names))


def save_anything_except_these_names(*names: str) -> Policy:
    """All values may be saved but those with one of these names.

    In JAX such a value may still be saved as the product of its operator
    (`jax/_src/ad_checkpoint.py`: it "probably just doesn't work"). Here it may not.

    >>> save_anything_except_these_names("scores")
    save_anything_except_these_names('scores')
    """
    return SaveAnythingExceptTheseNames(
        check_items("save_anything_except_these_names", "name", names)
    )


def save_ops(*ops: object) -> Policy:
    """Only what these operators compute may be saved.

    An operator is an overload, a packet or a string. `aten.mm` finds the `addmm` of a biased
    `nn.Linear` too. Raises `PolicyError` (a `TypeError`) for what is not an operator. A name that
    no operator has matches nothing, which gives an `UnmatchedWarning` with the nearest names.

    >>> import torch
    >>> save_ops(torch.ops.aten.mm, "aten::bmm")
    save_ops('aten.mm', 'aten.bmm')
    """
    return SaveOps(_op_names(ops))


def recompute_ops(*ops: object) -> Policy:
    """All values may be saved but those that these operators compute. Operators as in `save_ops`.

    >>> recompute_ops("aten.sin").spelling
    'recompute_ops:aten.sin'
    """
    return RecomputeOps(_op_names(ops))


def save_modules(*patterns: str) -> Policy:
    """Only what was computed in these modules may be saved.

    A pattern (`fnmatch`: `*` crosses dots) matches the qualified name of an `nn.Module`, and with
    it everything that runs inside that module. Called for an operator outside any decision, the
    policy answers as for an operator outside any module.

    >>> save_modules("layers.*.attn").decide(Value(None, module="layers.0.attn.proj"))
    Saveable()
    """
    return SaveModules(check_items("save_modules", "pattern", patterns))


def recompute_modules(*patterns: str) -> Policy:
    """All values may be saved but those computed in these modules. Patterns as in `save_modules`.

    >>> recompute_modules("layers.*").decide(Value(None, module="head"))
    Saveable()
    """
    return RecomputeModules(check_items("recompute_modules", "pattern", patterns))


def save_from_both_policies(p: PolicyLike, q: PolicyLike) -> Policy:
    """A value may be saved if `p` or `q` lets it be saved: `p | q`, under JAX's name for it.

    Unlike JAX's it takes policies that offload: a value that one saves and the other offloads is
    saved.

    >>> save_from_both_policies(dots_saveable, "names:attn")
    dots_saveable | save_only_these_names('attn')
    """
    return as_policy(p) | as_policy(q)


def check_items(function: str, kind: str, items: Iterable[object]) -> tuple[str, ...]:
    checked = []
    for item in items:
        if not isinstance(item, str):
            unpack = f"; a collection is unpacked: {function}(*{kind}s)"
            raise PolicyError(
                f"{function}(...) takes {kind}s, each a str, and was given {item!r} "
                f"({type(item).__name__}){unpack if isinstance(item, Iterable) else ''}"
            )
        if not item:
            raise PolicyValueError(
                f"{function}('') was given an empty {kind}, which matches nothing; leave it out"
            )
        checked.append(item)
    return tuple(dict.fromkeys(checked))


def _op_names(ops: Iterable[object]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(as_op_matcher(op).name for op in ops))


def _enclosing_modules(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


# --- spellings -----------------------------------------------------------------------------------

for _policy in (
    everything_saveable,
    nothing_saveable,
    dots_saveable,
    dots_with_no_batch_dims_saveable,
):
    register_spelling(_policy.word, type(_policy), function=_policy.function)
register_spelling("dots", DotsSaveable, function="checkpoint_dots")
register_spelling(
    "dots_with_no_batch_dims_saveable",
    DotsWithNoBatchDimsSaveable,
    function="checkpoint_dots_with_no_batch_dims",
)
register_spelling("names", save_only_these_names, "attn,mlp", function="save_only_these_names")
register_spelling("ops", save_ops, "aten.mm,aten.addmm", function="save_ops")
register_spelling("modules", save_modules, "layers.*.attn", function="save_modules")
register_spelling("save_any_names_but_these", save_any_names_but_these, "attn,mlp")
register_spelling("save_anything_except_these_names", save_anything_except_these_names, "attn,mlp")
register_spelling("recompute_ops", recompute_ops, "aten.mm,aten.addmm")
register_spelling("recompute_modules", recompute_modules, "layers.*.attn")


@dataclass(frozen=True, repr=False)
class PlainAutograd(EverythingSaveable):
    """Saves as plain autograd; a nested checkpoint saves by its own policy."""

    function = "plain_autograd"
    applies_to_nested = False
    honours_others = True


plain_autograd = PlainAutograd()
