"""Errors for calls that a function does not take, with what to write in their place."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torchremat.errors import ArgumentTypeError, nearest_names

_F = TypeVar("_F", bound=Callable[..., Any])

OPTIONS_OF_TORCH = {
    "use_reentrant": "leave out use_reentrant: there is one way, which needs no choice",
    "preserve_rng_state": "leave out preserve_rng_state: random numbers are always the same again",
    "early_stop": "leave out early_stop: only what is needed is recomputed",
    "context_fn": "write context_fn as policy=checkpoint_policies.from_selective(policy_fn)",
    "determinism_check": "leave out determinism_check: config.verify_recomputation compares values",
    "debug": "leave out debug: config.verify_recomputation names the first value that differs",
    "budget": "write budget={value!r} as policy='budget:{value}'",
}
"""Cures for options that `torch.utils.checkpoint` has, and for a common guess."""


def refuse_unknown(cures: Mapping[str, str], arguments: str = "") -> Callable[[_F], _F]:
    """Let a function raise `ArgumentTypeError` with a cure for options that it does not have.

    Python's own message names the option alone. `cures` have `{value}` where the given value goes.
    `arguments` is what to write for more positional arguments than the function takes.

    >>> @refuse_unknown({"reentrant": "leave out reentrant"})
    ... def tool(fun, *, policy=None):
    ...     return fun
    >>> tool(max, reentrant=False)
    Traceback (most recent call last):
    torchremat.errors.ArgumentTypeError: tool: leave out reentrant
    >>> tool(max, polcy="dots")
    Traceback (most recent call last):
    torchremat.errors.ArgumentTypeError: tool: there is no option 'polcy', nearest: 'policy'
    """

    def decorate(function: _F) -> _F:
        parameters = inspect.signature(function).parameters.values()
        names = tuple(p.name for p in parameters)
        most = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > most or any(name not in names for name in kwargs):
                unknown = {k: v for k, v in kwargs.items() if k not in names}
                texts = [arguments] if len(args) > most and arguments else []
                texts += [_describe(k, v, cures, names) for k, v in unknown.items()]
                if texts:
                    raise ArgumentTypeError(f"{function.__name__}: {'; '.join(texts)}")
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _describe(name: str, value: Any, cures: Mapping[str, str], known: tuple[str, ...]) -> str:
    if name in cures:
        return cures[name].format(value=value)
    return f"there is no option {name!r}, {nearest_names(name, known)}"
