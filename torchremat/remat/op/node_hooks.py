"""Hooks on the node that a checkpoint is in autograd's graph, and on its outputs.

All outputs of a checkpoint share one node. So a hook of the node that runs the backward pass of
another output comes to itself again, without end. Python sees no recursion: autograd goes on in
new threads. A hook of an output would be called with `None` in a backward pass of another.
"""

import functools
from collections.abc import Callable
from typing import Any

from torchremat.core.source import place_of
from torchremat.errors import HookError

# A hook that counts its calls may come to itself once or twice. Chosen by hand: each time holds
# what a backward pass holds.
_MOST_REENTRIES = 8


def call_where_needed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Call the hook of an output only where that has a gradient, as plain autograd does."""

    @functools.wraps(hook)
    def call_with_gradient(gradient: Any) -> Any:
        return None if gradient is None else hook(gradient)

    return call_with_gradient


def limit_hooks(node_class: Any) -> None:
    """Have hooks that users put on nodes of `node_class` raise where they do not end."""
    for name in ("register_hook", "register_prehook"):
        setattr(node_class, name, _limit_registered(getattr(node_class, name)))


def _limit_registered(register: Callable[..., Any]) -> Callable[..., Any]:
    def register_limited(node: Any, hook: Callable[..., Any]) -> Any:
        return register(node, _limit(hook))

    return register_limited


def _limit(hook: Callable[..., Any]) -> Callable[..., Any]:
    depth = 0

    @functools.wraps(hook)
    def call_limited(*gradients: Any) -> Any:
        nonlocal depth
        if depth > _MOST_REENTRIES:
            raise HookError(
                f"the hook {place_of(hook)} on the grad_fn of a checkpoint's output runs a "
                "backward pass that calls the hook again, without end: all outputs of a "
                "checkpoint share one grad_fn. Let the hook return at once where it is called "
                "from its own backward pass, or put it on a tensor made of the output."
            )
        depth += 1
        try:
            return hook(*gradients)
        finally:
            depth -= 1

    return call_limited
