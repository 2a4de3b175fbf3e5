"""The policies of checkpoints that are not the library's: those of `torch.utils.checkpoint`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torchremat import _torch
from torchremat.core.avals import Aval
from torchremat.policies.builtin import nothing_saveable
from torchremat.policies.from_selective import from_selective
from torchremat.policies.policy import Policy, Value
from torchremat.policies.verdicts import Answer, Verdict

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""The `context_fn` of `torch.utils.checkpoint`."""


@dataclass(frozen=True, repr=False)
class ForeignPolicy(Policy):
    """Saves as `torch.utils.checkpoint` does, for reports: the inputs, and what `of` says."""

    of: Policy = nothing_saveable

    honours_others = True
    recomputes_at_once = True

    def decide(self, value: Value) -> Verdict:
        return self.of.decide(value)

    def __call__(self, op: object, /, *avals: Aval, **params: Any) -> Answer:
        return self.of(op, *avals, **params)

    def __repr__(self) -> str:
        return "torch.utils.checkpoint"


def read_contexts(context_fn: Contexts | None) -> tuple[Policy, AbstractContextManager[Any]]:
    """The policy that `context_fn` stands for, and the context in which the function runs."""
    if context_fn is None:
        return ForeignPolicy(), nullcontext()
    context, _ = context_fn()
    chosen = _torch.selective_policy_of(context)
    if chosen is None:
        return ForeignPolicy(), context
    return ForeignPolicy(from_selective(chosen)), nullcontext()
