"""The residuals of reverse-mode differentiation of a function, as a list or as lines of text."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchremat.core.avals import Aval
from torchremat.remat.tracing.input_labels import BoundCall
from torchremat.remat.values.residual_log import describe_input, describe_value
from torchremat.remat.values.value_labels import ValueLabels
from torchremat.report.observe import Observation, SavedStorage, observe_saved

__all__ = ["Residual"]


def __dir__() -> list[str]:
    return sorted(__all__)


@dataclass(frozen=True)
class Residual:
    """A tensor that the forward pass saves. It unpacks as `aval, source`.

    Attributes:
        aval: shape and dtype.
        source: where it comes from: `from the argument x['w'][0]`, `from a constant`,
            `named 'attn' from file.py:12 (f)`, `output of mm from file.py:12 (f)`,
            `output of jitted function 'g' from file.py:12 (g)`, ...
        nbytes: bytes of its storage, which counts once however many views of it are saved.
        node: the node of the traced graph that computes it, `None` if none does.
    """

    aval: Aval
    source: str
    nbytes: int
    node: fx.Node | None = None

    def __iter__(self) -> Any:
        return iter((self.aval, self.source))

    def __str__(self) -> str:
        return f"{self.aval} {self.source}"


def saved_residuals(f: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Residual]:
    """The tensors that reverse-mode differentiation of `f` saves from the forward pass.

    `f` is traced on fake tensors and not run: no memory is used, no random number drawn, no buffer
    changed. Differentiated are the inputs that require a gradient, or all floating-point arguments
    if none does. For a function without `checkpoint` the list is that of PyTorch's own autograd.

    Args:
        f: a function of trees of tensors and other values, or an `nn.Module`.
        *args: its arguments; real, fake or `meta` tensors.
        **kwargs: its keyword arguments.

    Returns:
        One `Residual` for each saved storage: literals, constants, arguments, tensors that `f`
        closes over (parameters among them), and then the values in the order of the program.

    Raises:
        TypeError: if `f` is not callable, or if there is nothing to differentiate.

    After `jax.ad_checkpoint.saved_residuals`.

    >>> import torch
    >>> import torchremat as tr
    >>> def f(w, x):
    ...     return torch.sin(torch.sin(x @ w))
    >>> w, x = torch.ones(3, 4), torch.ones(2, 3)
    >>> aval, source = saved_residuals(f, w, x)[0]
    >>> print(aval, source)
    f32[3,4] from the argument w
    >>> [str(r) for r in saved_residuals(tr.checkpoint(f), w, x)]
    ['f32[3,4] from the argument w', 'f32[2,3] from the argument x']
    """
    observation = observe_saved(BoundCall(f, args, kwargs))
    labels = ValueLabels.of(observation.scope)
    ordered = sorted(
        enumerate(observation.saved), key=lambda pair: _sort_key(pair, observation, labels)
    )
    return [_residual(saved, labels) for _, saved in ordered]


def print_saved_residuals(f: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Print what `saved_residuals` lists, a line each.

    After `jax.ad_checkpoint.print_saved_residuals`.

    >>> import torch
    >>> def f(x, y):
    ...     return torch.sin(x) * y
    >>> print_saved_residuals(f, torch.ones(3), torch.ones(3))
    f32[3] from the argument x
    f32[3] from the argument y
    f32[3] output of sin from <doctest ...>:2 (f)
    """
    for residual in saved_residuals(f, *args, **kwargs):
        print(residual)


def _residual(saved: SavedStorage, labels: ValueLabels) -> Residual:
    if saved.input is not None:
        source = describe_input(saved.input.label)
    elif saved.value is None:
        source = "from a literal"
    elif saved.value.is_constant:
        source = "from a constant"
    else:
        label = labels.label_of(saved.value)
        source = describe_value(saved.value, label, offloaded_to=saved.offloaded_to)
    node = None if saved.value is None else saved.value.node
    return Residual(saved.aval, source, saved.nbytes, node)


def _sort_key(
    numbered: tuple[int, SavedStorage], observation: Observation, labels: ValueLabels
) -> tuple[int, int]:
    """Literals, constants, inputs in their order, then the order of the program."""
    number, saved = numbered
    if saved.input is not None:
        return 2, observation.inputs.index(saved.input)
    if saved.value is None:
        return 0, number
    return (1, number) if saved.value.is_constant else (3, labels.position(saved.value))
