"""Policies written for `torch.utils.checkpoint.create_selective_checkpoint_contexts`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from torchremat._torch import HigherOrderOperator, OpOverload, isolate, tree_map
from torchremat.core.avals import Aval
from torchremat.core.source import Source
from torchremat.errors import PolicyError
from torchremat.graph.ops import join_arguments, op_name
from torchremat.policies.policy import Policy, Value, source_of
from torchremat.policies.verdicts import (
    Answer,
    NotSaved,
    Offloadable,
    Recompute,
    Saveable,
    Verdict,
    as_answer,
    as_verdict,
)

__all__ = ["from_selective"]

# torch/utils/checkpoint.py runs SAC_IGNORED_OPS without a call of the policy; the others of them
# return no tensor
_WITHOUT_POLICY = frozenset({"aten.detach.default", "higher_order.name_p"})

# by the part of the name after MUST_ or PREFER_; PyTorch 2.13 added those that offload
_VERDICTS: dict[str, Verdict] = {
    "SAVE": Saveable(),
    "RECOMPUTE": Recompute(),
    "CPU_OFFLOAD": Offloadable("device", "pinned_host"),
}


def from_selective(policy_fn: "Callable[..., Any] | Sequence[object]") -> Policy:
    """The policy that `policy_fn` describes for `create_selective_checkpoint_contexts`.

    `policy_fn(ctx, op, *args, **kwargs)` answers with a `CheckpointPolicy` or a bool. It is called
    once a value, in the order of the program, with `ctx.is_recompute` false. Tensors are on the
    meta device: they have a shape and a dtype. `PREFER_RECOMPUTE` and `False` leave the last word
    to the library, as `tr.NotSaved` does; `MUST_RECOMPUTE` insists, as `tr.Recompute` does. As in
    PyTorch a list of overloads saves what exactly these compute: `aten.mm.default` does not stand
    for `addmm`, and `detach` is never saved. Values have no names for `policy_fn`.

    Raises `PolicyError` (a `TypeError`) if `policy_fn` is neither callable nor a list of overloads.
    An answer that is neither a `CheckpointPolicy` nor a bool raises it when a function is traced.

    >>> import torch
    >>> policy = from_selective([torch.ops.aten.mm.default])
    >>> policy
    from_selective([torch.ops.aten.mm.default])
    >>> policy(torch.ops.aten.mm.default), policy(torch.ops.aten.sin.default)
    (True, False)
    """
    if isinstance(policy_fn, list | tuple):
        return Selective(_SaveListed(tuple(map(_overload_name, policy_fn))))
    if not callable(policy_fn) or isinstance(policy_fn, Policy | type):
        raise PolicyError(
            f"from_selective({policy_fn!r}) takes what create_selective_checkpoint_contexts takes, "
            "a function policy_fn(ctx, op, *args, **kwargs) or a list of overloads, and was given "
            f"a {type(policy_fn).__name__}"
        )
    return Selective(policy_fn)


@dataclass(frozen=True, repr=False)
class Selective(Policy):
    policy_fn: Callable[..., Any]

    def decide(self, value: Value) -> Verdict:
        if op_name(value.op) in _WITHOUT_POLICY:
            return NotSaved()
        with isolate():
            ctx = SelectiveCheckpointContext(is_recompute=False)
            outputs = tuple(map(_on_meta, value.outputs))
            ctx.op_output = outputs[0] if len(outputs) == 1 else outputs
            args, kwargs = tree_map(_on_meta, join_arguments(value.op, value.avals, value.params))
            answer = self.policy_fn(ctx, value.op, *args, **kwargs)
        if answer is CheckpointPolicy.PREFER_RECOMPUTE:  # the usual answer to all the rest
            return NotSaved()
        if isinstance(answer, CheckpointPolicy):
            return _VERDICTS[answer.name.partition("_")[2]]
        return as_verdict(answer, self, value.op)

    def __call__(self, op: object, /, *avals: Aval, **params: Any) -> Answer:
        return as_answer(self.decide(Value(op, avals, params)))

    @property
    def source(self) -> Source | None:
        """Where `policy_fn` is defined, if it is written in Python."""
        return source_of(self.policy_fn)

    def __repr__(self) -> str:
        return f"from_selective({getattr(self.policy_fn, '__qualname__', repr(self.policy_fn))})"


@dataclass(frozen=True, repr=False)
class _SaveListed:
    """By name, since overloads do not pickle."""

    names: tuple[str, ...]

    def __call__(self, ctx: object, op: object, *args: object, **kwargs: object) -> bool:
        return op_name(op) in self.names

    def __repr__(self) -> str:
        return f"[{', '.join(f'torch.ops.{name}' for name in self.names)}]"


def _overload_name(op: object) -> str:
    if isinstance(op, OpOverload | HigherOrderOperator):
        return op_name(op)
    raise PolicyError(
        f"from_selective([...]) takes overloads, as PyTorch does, such as "
        f"torch.ops.aten.mm.default, and was given {op!r} ({type(op).__name__}). Packets and "
        "strings are taken by save_ops"
    )


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Aval):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")
