"""What becomes of each value of a forward pass, and why."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from torchremat import _torch
from torchremat.autodiff.joint import Joint
from torchremat.autodiff.partial_eval import Residuals, find_residuals
from torchremat.avals import Aval
from torchremat.errors import UnmatchedWarning
from torchremat.graph.aliases import base_of, call_of, is_item, is_view
from torchremat.graph.sources import warn_user
from torchremat.graph.ops import split_arguments
from torchremat.remat.names import name_p
from torchremat.remat.policies import Policy, Value
from torchremat.remat.verdicts import Recompute

Decision = Literal["saved", "recomputed", "offloaded", "input", "parameter", "constant"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision on one value, with the reason."""

    decision: Decision
    reason: str


class Choices:
    """A policy's choice for each value of the forward half of a joint graph.

    Values are calls of operators, or the outputs of one that has several. The policy is asked once
    about each, in program order.
    """

    def __init__(self, joint: Joint, policy: Policy, module_prefix: str = "") -> None:
        self.policy = policy
        self.values: dict[fx.Node, Value] = {}
        self.choices: dict[fx.Node, Choice] = {}
        names = _names_of_values(joint)
        for node in joint.forward_nodes:
            if node.op == "call_function" and not is_view(node) and not _has_items(node):
                value = _value(node, names.get(node, ()), module_prefix)
                self.values[node] = value
                self.choices[node] = self._choose(node, value)

    def _choose(self, node: fx.Node, value: Value) -> Choice:
        forced = why_not_replayed(node)
        if forced is not None:
            return Choice("saved", forced)
        verdict = self.policy.decide(value)
        if isinstance(verdict, Recompute):
            return Choice("recomputed", f"{self.policy} does not let it be saved")
        return Choice("saved", f"{self.policy}")

    def residuals(self, joint: Joint) -> Residuals:
        """What the backward half of `joint` needs of its forward half, by these choices."""
        known = {*joint.inputs, *joint.forward_nodes}
        return find_residuals(
            [g for g in joint.gradients if g is not None],
            known.__contains__,
            self._may_keep,
        )

    def _may_keep(self, node: fx.Node) -> bool:
        choice = self.choices.get(node)  # none for a call of which only the items are values
        return choice is not None and choice.decision == "saved"

    def warn_of_unmatched(self) -> None:
        """Warn, at the user's line, of what the policy names and no value of the function has."""
        for message in self.policy.unmatched(list(self.values.values())):
            warn_user(message, UnmatchedWarning)


def why_not_replayed(node: fx.Node) -> str | None:
    """Why the operator of `node` must not run a second time, if it must not."""
    target = call_of(node).target
    if not isinstance(target, _torch.OpOverload):
        return None
    if torch.Tag.nondeterministic_seeded in target.tags:
        return "it draws random numbers, which a replay would draw anew"
    return None


def _has_items(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _names_of_values(joint: Joint) -> dict[fx.Node, tuple[str, ...]]:
    names: dict[fx.Node, tuple[str, ...]] = {}
    for node in joint.forward_nodes:
        if node.target is name_p:
            base = base_of(node)
            names[base] = (*names.get(base, ()), str(node.kwargs["name"]))
    return names


def _value(node: fx.Node, names: tuple[str, ...], module_prefix: str) -> Value:
    call = call_of(node)
    args, kwargs = fx.node.map_arg((call.args, call.kwargs), lambda n: _aval(n.meta.get("val")))
    avals, params = split_arguments(call.target, args, kwargs)
    results = call.meta.get("val")
    outputs = results if isinstance(results, tuple | list) else (results,)
    return Value(
        op=call.target,
        avals=avals,
        params=params,
        names=names,
        module=".".join(part for part in (module_prefix, call.meta.get("module")) if part),
        source=call.meta.get("source"),
        outputs=tuple(a for a in map(_aval, outputs) if isinstance(a, Aval)),
        index=node.args[1] if is_item(node) else 0,  # type: ignore[arg-type]
    )


def _aval(value: Any) -> Any:
    return Aval.of(value) if isinstance(value, torch.Tensor) else value
