"""Names for values, so that policies can speak of them."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.errors import ArgumentTypeError

T = TypeVar("T")


class NameOp(_torch.HigherOrderOperator):
    """`name_p(x, name=...)` is `x` under a name. Nothing of it runs."""

    is_identity = True

    def __init__(self) -> None:
        super().__init__("name_p")  # type: ignore[no-untyped-call]

    def __call__(self, x: Tensor, /, *, name: str) -> Tensor:
        if _torch.innermost_proxy_mode() is None:
            return x
        return super().__call__(x, name=name)  # type: ignore[no-any-return,no-untyped-call]


name_p = NameOp()


def checkpoint_name(x: T, name: str) -> T:
    """Give the value `x` a name by which a policy can save it. It is the identity otherwise.

    Args:
        x: a tensor, or a tree of tensors, each of which gets the name.
        name: what policies such as `save_only_these_names` call it.

    Returns:
        `x`. The name is that of the value, not of the variable: saving it also serves readers of
        the value under an older variable. It costs nothing at run time.

    Raises:
        TypeError: if `name` is not a string.

    After `jax.ad_checkpoint.checkpoint_name`.

    >>> import torch
    >>> import torchremat as tr
    >>> @tr.checkpoint(policy=tr.checkpoint_policies.save_only_these_names("hidden"))
    ... def f(x):
    ...     return torch.sin(tr.checkpoint_name(torch.exp(x), "hidden"))
    >>> [str(r) for r in tr.saved_residuals(f, torch.ones(3))]  # doctest: +ELLIPSIS
    ["f32[3] named 'hidden' from ..."]
    """
    if not isinstance(name, str) or not name:
        raise ArgumentTypeError(
            f"checkpoint_name takes a name that is a non-empty string, but it is {name!r} "
            f"({type(name).__name__}): checkpoint_name(x, 'attention')"
        )
    if _torch.is_exporting():
        return x
    if torch.compiler.is_dynamo_compiling():  # in the body of a torch.cond, say
        mark: Callable[..., Any] = torch.ops.torchremat.named
    elif _is_recorded():
        mark = _Name.apply
    elif (listener := getattr(_recording, "listener", None)) is not None:
        mark = listener
    else:
        return x
    if isinstance(x, Tensor):
        return mark(x, name)  # type: ignore[no-any-return]
    return _torch.tree_map(lambda leaf: mark(leaf, name) if isinstance(leaf, Tensor) else leaf, x)  # type: ignore[no-any-return]


_recording = threading.local()


@contextmanager
def record_names() -> Iterator[None]:
    before = getattr(_recording, "by_compiler", False)
    _recording.by_compiler = True
    try:
        yield
    finally:
        _recording.by_compiler = before


@contextmanager
def listen_to_names(listener: Callable[[Tensor, str], Tensor]) -> Iterator[None]:
    """Call `listener(x, name)`, which returns `x`, for each name of a value in the block."""
    before = getattr(_recording, "listener", None)
    _recording.listener = listener
    try:
        yield
    finally:
        _recording.listener = before


def _is_recorded() -> bool:
    if _torch.innermost_proxy_mode() is None:
        return False
    return not _torch.is_in_stock_compiler() or getattr(_recording, "by_compiler", False)


class _Name(torch.autograd.Function):
    """The identity, recorded as `name_p`. Cotangents and tangents get no name."""

    @staticmethod
    def forward(x: Tensor, name: str) -> Tensor:
        return name_p(x, name=name)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        return cotangent, None

    @staticmethod
    def jvp(ctx: Any, tangent: Any, _: Any) -> Any:
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, name: str) -> Any:
        return _Name.apply(x, name), in_dims[0]  # type: ignore[no-untyped-call]


_torch.register_simple_rules(name_p, lambda x, *, name: x.detach())


def _name_in_dynamo(x: Tensor, name: str) -> Tensor:
    checkpoint = _torch.selective_policy_at_work()
    if isinstance(checkpoint, TakesNames):
        node = _torch.node_in_compiler(x)
        if node is not None:
            checkpoint.take_name(node, name)
    return checkpoint_name(x, name)


class TakesNames(ABC):
    @abstractmethod
    def take_name(self, node: fx.Node, name: str) -> None:
        """Decide anew on the value of `node`, now that it is called `name`."""


# Dynamo captures operators, but no higher-order operators of other libraries. This operator is
# composite: whoever traces a graph of Dynamo's runs `checkpoint_name` again.
_library = torch.library.Library("torchremat", "DEF")
_library.define("named(Tensor(a) x, str name) -> Tensor(a)")
_library.impl("named", _name_in_dynamo, "CompositeImplicitAutograd")
