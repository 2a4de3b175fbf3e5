"""The class of policies, and how policies combine.

A policy is any callable `policy(op, *avals, **params)` that answers, of one call of one operator,
whether its outputs may be saved. `Policy` adds one question, `decide`, about a *value*: the result
of an operator, with its names and the module that ran it. "All but the values named a", answered
for each operator as in JAX, saves the value before it has its name. A decision on it cannot.

A policy calls others in JAX's way, `p(op, *avals, **params)`. So `decide` remembers its value.
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch

from torchremat import _torch
from torchremat.core.avals import Aval
from torchremat.core.source import Source
from torchremat.errors import PolicyError
from torchremat.policies.checkpoint_name import name_p
from torchremat.policies.failed_operator import FailedOperator
from torchremat.policies.spelling import is_policy_maker, parse_spelling
from torchremat.policies.verdicts import (
    Answer,
    Verdict,
    as_answer,
    as_verdict,
    complement,
    intersection,
    union,
)  # fmt: skip
from torchremat.policies.whole_graph import WholeGraphDecisions

__all__ = ["Policy", "Value"]


def __dir__() -> list[str]:
    return sorted(__all__)


@dataclass(frozen=True)
class Value:
    """A value that the forward pass computes, as a policy sees it.

    Attributes:
        op: the operator that computes it.
        avals: of the operator's tensor inputs, in order.
        params: its other arguments by schema name (`graph.ops.split_arguments` makes both).
        names: every `checkpoint_name` given to this value.
        module: qualified name of the `nn.Module` that ran the operator, `''` outside any.
        source: the user's line that it comes from, if known.
        outputs: avals of everything that the operator computes, if known.
        index: the place of this value in `outputs`.
    """

    op: object
    avals: tuple[Aval, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    module: str = ""
    source: Source | None = None
    outputs: tuple[Aval, ...] = ()
    index: int = 0


_value_in_question: ContextVar[Value | None] = ContextVar("_value_in_question", default=None)


# each message of `Policy.find_unmatched` has this between the item and the names that exist
MATCHES_NOTHING = " matches nothing in what was traced"


class Policy(WholeGraphDecisions):
    """Says which values of the forward pass may be saved for the backward.

    Policies are values: equal when built alike, hashable, picklable where what they are made of is,
    with a `repr` that rebuilds them. They combine, with one another and with whatever `as_policy`
    takes, by `|`, `&` and `~`, value by value; `torchremat.policies.verdicts` says how.
    `str(policy)` is its spelling for configuration files where it has one.

    >>> from torchremat.checkpoint_policies import dots_saveable, save_only_these_names
    >>> dots_saveable | save_only_these_names("attn")
    dots_saveable | save_only_these_names('attn')
    >>> str(dots_saveable | save_only_these_names("attn"))
    'dots|names:attn'
    """

    def __call__(self, op: object, /, *avals: Aval, **params: Any) -> Answer:
        """Whether the outputs of a call of `op` may be saved (JAX's protocol).

        `True` and `False` stand for `Saveable` and `NotSaved`; the other verdicts are themselves.
        """
        return as_answer(self.decide(_value_of_call(op, avals, params)))

    def decide(self, value: Value) -> Verdict:
        """Whether `value` may be saved: as the product of its operator, or under one of its names.

        Raises `PolicyError` (a `TypeError`) if the policy answers with what is not a verdict.
        """
        token = _value_in_question.set(value)
        try:
            verdict = self._verdict(value.op, *value.avals, **value.params)
            named = value.outputs[value.index : value.index + 1]
            for name in value.names:
                verdict = union(verdict, self._verdict(name_p, *named, name=name))
        finally:
            _value_in_question.reset(token)
        return verdict

    def _verdict(self, op: object, /, *avals: Aval, **params: Any) -> Verdict:
        return as_verdict(self(op, *avals, **params), self, op)

    applies_to_nested: ClassVar[bool] = True
    """Whether the policy also decides on values inside nested checkpoints."""

    honours_others: ClassVar[bool] = False
    """Whether a `torch.utils.checkpoint` inside is a checkpoint, which decides what it saves."""

    recomputes_at_once: ClassVar[bool] = False
    """Whether a backward pass recomputes all before the first derivative, as PyTorch's own does."""

    @property
    def reads_sizes(self) -> bool:
        """Whether a decision may depend on shapes, or on numbers among the arguments.

        If not, one decision serves calls of an operator with different sizes.
        """
        return True

    serves_many_sizes: ClassVar[bool] = True
    """Whether the policy decides on a graph of which some sizes are symbols."""

    def begin_job(self) -> "Policy":
        """The policy for the calls of one function, in which it may remember what it decided."""
        return self

    def with_updates(self, region: Any) -> "Policy":
        """The policy as it decides on `region` while optimizers step in the backward pass."""
        return self

    def without_job(self) -> "Policy":
        """The policy that `begin_job` was called on."""
        return self

    def on_tape(self) -> "Policy | None":
        """The policy that decides where a function cannot be one graph; `None` if there is none."""
        return None if self.is_whole_graph else self

    def out_of_memory(self, program: Any, failed: FailedOperator) -> str | None:
        """A note for the user on running out of memory in `program`, under this policy."""
        return None

    def find_unmatched(self, values: Sequence[Value]) -> list[str]:
        """A message for each item that the policy names and none of `values` has."""
        return []

    @property
    def spelling(self) -> str | None:
        """The text that `policy(...)` reads as this policy, or `None` if there is none."""
        return None

    def __or__(self, other: "PolicyLike") -> "Policy":
        return Union(_parts(Union, self) + _parts(Union, as_policy(other)))

    def __ror__(self, other: "PolicyLike") -> "Policy":
        return as_policy(other) | self

    def __and__(self, other: "PolicyLike") -> "Policy":
        return Intersection(_parts(Intersection, self) + _parts(Intersection, as_policy(other)))

    def __rand__(self, other: "PolicyLike") -> "Policy":
        return as_policy(other) & self

    def __invert__(self) -> "Policy":
        return Complement(self)

    def __str__(self) -> str:
        return self.spelling or repr(self)


PolicyLike: TypeAlias = Policy | str | Callable[..., Answer | type]


# --- combinations --------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class _Combination(Policy):
    """Policies joined by an operator. Joining is associative: `(p | q) | r == p | (q | r)`."""

    policies: tuple[Policy, ...]

    def __post_init__(self) -> None:
        for policy in self.policies:
            _refuse_whole(policy)

    @property
    def reads_sizes(self) -> bool:
        return any(policy.reads_sizes for policy in self.policies)

    def find_unmatched(self, values: Sequence[Value]) -> list[str]:
        messages = [
            message for policy in self.policies for message in policy.find_unmatched(values)
        ]
        return list(dict.fromkeys(messages))


class Union(_Combination):
    """`p | q`: a value may be saved if one of the policies lets it be saved."""

    def decide(self, value: Value) -> Verdict:
        return functools.reduce(union, (policy.decide(value) for policy in self.policies))

    @property
    def spelling(self) -> str | None:
        spellings = [policy.spelling for policy in self.policies]
        return None if None in spellings else "|".join(map(str, spellings))

    def __repr__(self) -> str:
        return " | ".join(map(_operand, self.policies))


class Intersection(_Combination):
    """`p & q`: a value may be saved if all of the policies let it be saved."""

    def decide(self, value: Value) -> Verdict:
        return functools.reduce(intersection, (policy.decide(value) for policy in self.policies))

    @property
    def spelling(self) -> str | None:
        spellings = [_spell_operand(policy) for policy in self.policies]
        return None if None in spellings else "&".join(map(str, spellings))

    def __repr__(self) -> str:
        return " & ".join(map(_operand, self.policies))


@dataclass(frozen=True, repr=False)
class Complement(Policy):
    """`~p`: a value may be saved if the policy does not let it be saved. `~~p` is `p`."""

    policy: Policy

    def __post_init__(self) -> None:
        _refuse_whole(self.policy)

    def decide(self, value: Value) -> Verdict:
        return complement(self.policy.decide(value))

    def __invert__(self) -> Policy:
        return self.policy

    @property
    def reads_sizes(self) -> bool:
        return self.policy.reads_sizes

    def find_unmatched(self, values: Sequence[Value]) -> list[str]:
        return self.policy.find_unmatched(values)

    @property
    def spelling(self) -> str | None:
        spelling = _spell_operand(self.policy, _Combination)
        return None if spelling is None else f"~{spelling}"

    def __repr__(self) -> str:
        return f"~{_operand(self.policy)}"


def _value_of_call(op: object, avals: tuple[Aval, ...], params: dict[str, Any]) -> Value:
    value = _value_in_question.get()
    if value is not None:
        if (op, avals, params) == (value.op, value.avals, value.params):
            return value
        if op is name_p and params["name"] in value.names:
            return value  # else a value with several names could be saved under the others
    if op is name_p:
        return Value(op, avals, params, names=(params["name"],), outputs=avals)
    return Value(op, avals, params)


def _refuse_whole(policy: Policy) -> None:
    if policy.is_whole_graph:
        raise PolicyError(
            f"{policy!r} decides on all values of a graph at once, and does not combine with other "
            "policies by |, & or ~. Give it alone"
        )


def _parts(kind: type[_Combination], policy: Policy) -> tuple[Policy, ...]:
    return policy.policies if isinstance(policy, kind) else (policy,)


def _operand(policy: Policy) -> str:
    return f"({policy!r})" if isinstance(policy, _Combination) else repr(policy)


def _spell_operand(policy: Policy, grouped: type[Policy] = Union) -> str | None:
    spelling = policy.spelling
    return f"({spelling})" if spelling and isinstance(policy, grouped) else spelling


# --- values that stand for a policy --------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class FunctionPolicy(Policy):
    """A user's own callable. It is called for a value's operator, then for each of its names."""

    function: Callable[..., Answer | type]

    def _verdict(self, op: object, /, *avals: Aval, **params: Any) -> Verdict:
        try:
            answer = self.function(op, *avals, **params)
        except TypeError as error:
            if _accepts_call(self.function, op, *avals, **params):
                raise
            given = ", ".join([*map(str, avals), *params])
            raise PolicyError(
                f"the policy {self!r} from {self.source} cannot be called for {op}: it does not "
                f"take ({given}). Write it as policy(op, *avals, **params): the operator, the "
                "avals of its tensors, its other arguments by name"
            ) from error
        return as_verdict(answer, self, op)

    @property
    def source(self) -> Source | None:
        """Where the function is defined, if it is written in Python."""
        return source_of(self.function)

    def __repr__(self) -> str:
        return f"as_policy({getattr(self.function, '__qualname__', repr(self.function))})"


def _accepts_call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except ValueError:
        return True
    except TypeError:
        return False
    return True


def policy(spelling: str) -> Policy:
    """The policy that `spelling` stands for, as in a configuration file.

    The spellings are `"none"` (no rematerialisation: `everything_saveable`), `"full"`
    (`nothing_saveable`), `"dots"`, `"names:attn,mlp"`, `"ops:aten.mm,aten.addmm"` and
    `"modules:layers.*.attn"`. Every other policy that takes only names is spelled by its own name
    (`"recompute_ops:aten.mm"`; `"dots_saveable"` is read too). Joined with `|`, a value may be
    saved if one of them lets it be saved; with `&`, if all of them do. `~` before one reverses it.
    `~` binds closest, then `&`; parentheses group.

    Raises `PolicyError` (a `TypeError`) if `spelling` is not a string, `PolicyValueError` (a
    `ValueError`) with the nearest spellings if it is unknown.

    >>> policy("dots | names:attn")
    dots_saveable | save_only_these_names('attn')
    >>> policy("dots & ~modules:head.*")
    dots_saveable & ~save_modules('head.*')
    """
    found: Policy = parse_spelling(spelling)
    return found


def as_policy(given: PolicyLike | None) -> Policy:
    """`given` as a `Policy`: one already, its spelling, a callable, or `None`, which saves nothing.

    Raises `PolicyError` (a `TypeError`) for anything else, and whatever `policy` raises.

    >>> as_policy("names:attn")
    save_only_these_names('attn')
    """
    if isinstance(given, Policy):
        return given
    if given is None:
        return policy("full")
    if isinstance(given, str):
        return policy(given)
    if is_policy_maker(given):
        name = getattr(given, "__name__", repr(given))
        raise PolicyError(
            f"{name} was given as a policy: it makes one when it is called, as in {name}('...')"
        )
    if isinstance(given, type | types.BuiltinFunctionType | _Operator) or not callable(given):
        raise PolicyError(
            f"unknown policy {given!r} ({type(given).__name__}). A policy is one of "
            "checkpoint_policies, a spelling of one ('dots', 'names:attn'), a callable "
            f"policy(op, *avals, **params), or None to save nothing{_suggest_policy(given)}"
        )
    return FunctionPolicy(given)


_Operator = _torch.OpOverload | _torch.OpOverloadPacket | _torch.HigherOrderOperator


def _suggest_policy(given: object) -> str:
    if isinstance(given, _Operator):
        return f". To save what an operator computes, write save_ops({given})"
    if isinstance(given, types.BuiltinFunctionType) and hasattr(torch.ops.aten, given.__name__):
        return f". To save what an operator computes, write save_ops('aten.{given.__name__}')"
    if isinstance(given, int | float) and not isinstance(given, bool):
        return f". For a budget of peak memory, write memory_budget({given})"
    if isinstance(given, list | tuple | set) and given:
        if all(isinstance(item, _Operator) for item in given):
            return ". To save what operators compute, write save_ops(*ops)"
        return ". Policies are joined with |, as in 'dots|names:attn'"
    return ""


def source_of(function: Any) -> Source | None:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__") and callable(function):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    return code and Source(code.co_filename, code.co_firstlineno, code.co_qualname)
