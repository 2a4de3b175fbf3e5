"""`checkpoint` in a program that Dynamo captures.

A compiler has no use for our operator: in its graph a checkpoint becomes PyTorch's own, and what
the policy says becomes marks on the operators inside, which PyTorch's partitioner honours.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.autodiff.replay_rules import selects
from torchremat.core.avals import Aval
from torchremat.core.source import warn_user
from torchremat.errors import (
    CompilerWarning,
    OffloadWarning,
    PolicyError,
    PolicyFailedError,
    TorchrematError,
)
from torchremat.graph.nodes import base_of, call_of
from torchremat.graph.notes import note, notes_of
from torchremat.graph.ops import split_arguments
from torchremat.policies.ask_for_compiler import decide_for_compiler
from torchremat.policies.checkpoint_name import TakesNames
from torchremat.policies.policy import Policy, PolicyLike, Value, as_policy
from torchremat.policies.verdicts import NotSaved, Offloadable, Recompute, Verdict
from torchremat.tracing.modules.dynamo_stack import module_name, source_of


def checkpoint_in_compiler(
    fun: Callable[..., Any], policy: PolicyLike | None, *args: Any, **kwargs: Any
) -> Any:
    """Call `fun` under `policy`; Dynamo traces this.

    Inside of a derivative of `torch.func` it calls `fun` as it is: PyTorch's checkpoint works by
    hooks of saved tensors, which `torch.func` refuses.
    """
    if _is_inside_derivative():
        return fun(*args, **kwargs)
    contexts = functools.partial(_contexts, policy)
    return torch.utils.checkpoint.checkpoint(
        fun, *args, use_reentrant=False, context_fn=contexts, **kwargs
    )


def _is_inside_derivative() -> bool:
    """Whether `torch.func` differentiates what Dynamo traces now; it runs when Dynamo meets it."""
    is_inside = _torch.differentiates()
    if is_inside:
        warn_user(
            "in a compiled function, grad, vjp and jacrev ignore the checkpoints inside: PyTorch's "
            "compiler has none within torch.func. Values are right, but nothing is recomputed to "
            "save memory. Call the derivative outside of the compiled function, or let autograd "
            "differentiate the compiled function",
            CompilerWarning,
        )
    return is_inside


_torch.mark_as_constant(_is_inside_derivative)


def _contexts(policy: PolicyLike | None) -> tuple[Any, Any]:
    decide = _Decide(as_policy(policy))
    contexts: tuple[Any, Any] = torch.utils.checkpoint.create_selective_checkpoint_contexts(decide)
    for context in contexts:  # names of values, for the policy of a compiler around it
        context.supports_higher_order_operators = True
    return contexts


@functools.cache
def outside_compiler() -> Callable[..., Any]:
    """Calls a function with arguments as it is, where Dynamo would capture what it does.

    For policies that decide on a whole graph: no mark on operators says what they want.
    """

    def call(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    reason = (
        "a checkpoint whose policy decides on a whole graph runs outside of the compiler. To have "
        "it compiled, give the policy to the compiler: torch.compile(..., backend='torchremat', "
        "options={'policy': ...})"
    )
    return torch.compiler.disable(call, reason=reason)  # type: ignore[no-any-return]


class _Decide(TakesNames):
    """A policy for `create_selective_checkpoint_contexts`."""

    def __init__(self, policy: Policy) -> None:
        if policy.is_whole_graph:
            raise PolicyError(
                f"{policy!r} decides on all values of a graph at once, which a checkpoint inside a "
                "compiled function cannot have it do. Give it to the compiler: torch.compile(..., "
                "backend='torchremat', options={'policy': ...}); or make the checkpoint outside of "
                "the function"
            )
        self.policy = policy
        self.has_warned = False

    def __call__(self, _: Any, op: Any, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _torch.tree_map(_aval, (args, kwargs))
        return self._mark(op, args, kwargs, fx.traceback.current_meta)

    def take_name(self, node: fx.Node, name: str) -> None:
        base = base_of(node)
        call = call_of(base)
        if call.op != "call_function" or "recompute" not in call.meta:
            return
        names = (*notes_of(call).names, name)
        note(call, names=names)
        args, kwargs = fx.node.map_arg((call.args, call.kwargs), lambda n: _aval(n.meta.get("val")))
        mark = self._mark(call.target, args, kwargs, call.meta, names, _aval(base.meta.get("val")))
        call.meta["recompute"] = base.meta["recompute"] = mark

    def _mark(
        self,
        op: Any,
        args: Any,
        kwargs: Mapping[str, Any],
        meta: Mapping[str, Any],
        names: tuple[str, ...] = (),
        output: Any = None,
    ) -> Any:
        avals, params = split_arguments(op, args, kwargs)
        outputs = (output,) if isinstance(output, Aval) else ()
        value = Value(op, avals, params, names, module_name(meta), source_of(meta), outputs)
        verdict = _ask_policy(self.policy, value)
        if isinstance(verdict, Offloadable) and not self.has_warned:
            self.has_warned = True
            warn_user(
                f"{self.policy} offloads values, which a checkpoint inside a compiled function "
                "does not: they are saved on their device. Without the compiler they are offloaded",
                OffloadWarning,
            )
        is_safe_to_replay = isinstance(verdict, NotSaved) and not selects(op)
        recomputes = is_safe_to_replay or isinstance(verdict, Recompute)
        return _torch.MUST_RECOMPUTE if recomputes else _torch.MUST_SAVE


def _ask_policy(policy: Policy, value: Value) -> Verdict:
    """Ask `policy`; its errors come to the user as they are.

    A `TypeError` becomes another error: Python's operators read one as "not mine".
    """
    try:
        return decide_for_compiler(policy, value)
    except TorchrematError as error:
        told = PolicyFailedError(str(error)) if isinstance(error, TypeError) else error
        raise _torch.to_user(told, sys._getframe()) from error.__cause__


def _aval(value: Any) -> Any:
    return Aval.of(value) if isinstance(value, Tensor) else value
