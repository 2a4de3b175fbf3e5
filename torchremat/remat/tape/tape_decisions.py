"""A policy's decisions on the operators of a tape."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.autodiff.replay_rules import reason_to_save_results
from torchremat.core.avals import Aval
from torchremat.core.source import warn_user
from torchremat.errors import OffloadWarning, UnmatchedWarning
from torchremat.graph.ops import split_arguments
from torchremat.policies.policy import Policy, Value
from torchremat.policies.verdicts import NotSaved, Offloadable, Saveable, as_verdict
from torchremat.remat.tape.surroundings import Surroundings, source_at

# Sizes that values make differ from call to call, each of another kind. Chosen by hand: a few
# megabytes of answers.
_MOST_KINDS = 4096

_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class TapeDecision:
    is_saved: bool
    reason: str
    value: Value
    place: "Site | None" = None


@dataclass(frozen=True, slots=True)
class Site:
    """Where in the program a value is made: two calls of a function have places in common.

    Attributes:
        number: of the operator, the user's line, the module, and the index among its results.
        alike: likewise, where modules whose names differ in numbers count as one: `experts.*`.
    """

    number: int
    alike: int


class TapeDecisions:
    """The decisions of one policy on the operators of one function.

    A policy decides once on calls of an operator that are alike, as it does for a graph. If it does
    not read sizes, these may differ, and the values that it saw have the sizes of the first call.
    """

    def __init__(self, policy: Policy, surroundings: Surroundings) -> None:
        self.policy = policy
        self.surroundings = surroundings
        self._known: dict[Any, list[TapeDecision]] = {}
        self._named: dict[Any, TapeDecision] = {}
        self._places: dict[Any, int] = {}
        self._has_warned = False

    def decide(
        self,
        op: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: Sequence[Tensor],
        kind: tuple[Any, ...] | None = None,
    ) -> list[TapeDecision]:
        """A decision for each of the `results` of a call; calls of one `kind` are alike."""
        line, module = self.surroundings.read()
        if not self.policy.reads_sizes:
            kind = (_alike(kwargs) if kwargs else (), len(results))
        elif kind is None:
            kind = (_alike(args), _alike(kwargs), len(results))
        device = results[0].device if results else None
        key = (op, line, module, device, kind)
        try:
            found = self._known.get(key)
        except TypeError:  # an argument that cannot be hashed
            return self._ask(op, args, kwargs, results, module, line)
        if found is None:
            found = self._ask(op, args, kwargs, results, module, line)
            if len(self._known) >= _MOST_KINDS:
                self._known.clear()
            self._known[key] = found
        return found

    def decide_named(self, value: Value, names: tuple[str, ...]) -> TapeDecision:
        key = (id(value), names)
        found = self._named.get(key)
        if found is None or found.value.params is not value.params:
            if len(self._named) >= _MOST_KINDS:
                self._named.clear()
            found = self._named[key] = self._decision(replace(value, names=names), {})
        return found

    def _ask(
        self,
        op: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: Sequence[Tensor],
        module: str,
        line: Any,
    ) -> list[TapeDecision]:
        args, kwargs = _torch.tree_map(_aval, (tuple(args), dict(kwargs)))
        avals, params = split_arguments(op, args, kwargs)
        outputs = tuple(map(Aval.of, results))
        source = source_at(line)
        decisions = [
            self._decision(Value(op, avals, params, (), module, source, outputs, i), kwargs)
            for i in range(len(outputs))
        ]
        return [
            replace(d, place=self._place_of(op, line, module, d.value.index)) for d in decisions
        ]

    def _place_of(self, op: Any, line: Any, module: str, index: int) -> Site:
        same, alike = ((op, line, name, index) for name in (module, _DIGITS.sub("*", module)))
        places = self._places
        return Site(places.setdefault(same, len(places)), places.setdefault(alike, len(places)))

    def _decision(self, value: Value, kwargs: Mapping[str, Any]) -> TapeDecision:
        verdict = as_verdict(self.policy.decide(value), self.policy, value.op)
        if isinstance(verdict, Offloadable):
            if not self._has_warned:
                self._has_warned = True
                warn_user(
                    f"{self.policy} offloads values, which the tape of a function that cannot be "
                    "one graph does not: they are saved on their device",
                    OffloadWarning,
                )
            return TapeDecision(True, f"{self.policy} offloads it, but a tape does not", value)
        if isinstance(verdict, Saveable):
            return TapeDecision(True, f"{self.policy}", value)
        if isinstance(verdict, NotSaved):
            kind = value.outputs[value.index].device.type
            reason = reason_to_save_results(value.op, kwargs, kind)
            if reason is not None:
                return TapeDecision(True, reason, value)
        return TapeDecision(False, f"{self.policy} does not let it be saved", value)

    def warn_of_unmatched(self) -> None:
        """Warn of what the policy names and no operator of the first calls had."""
        values = [decision.value for found in self._known.values() for decision in found]
        values += [decision.value for decision in self._named.values()]
        for message in self.policy.find_unmatched(values):
            warn_user(message, UnmatchedWarning)


def _alike(value: Any) -> Any:
    """A key that is equal for arguments of which a policy sees the same."""
    kind = type(value)
    if kind is tuple or kind is list:
        return tuple([_alike(item) for item in value])
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    if kind is dict:
        return tuple([(name, _alike(item)) for name, item in value.items()]) if value else ()
    return kind, value


def _aval(value: Any) -> Any:
    return Aval.of(value) if isinstance(value, torch.Tensor) else value
