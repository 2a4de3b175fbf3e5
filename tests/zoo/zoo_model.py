"""A model of the zoo: how it is built, what a batch of it is, and which parts are its blocks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Arguments = tuple[Any, ...] | Mapping[str, Any]


class CannotBeMadeError(Exception):
    """A model has no tiny configuration, or plain PyTorch does not train it."""


@dataclass(frozen=True)
class ZooModel:
    """One model. `build` and `batch` draw from PyTorch's generator, which the caller seeds."""

    library: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Arguments]
    """Positional arguments in a tuple, or arguments by name in a dict."""
    loss: Callable[[Any], Tensor] | None = None
    """Of what the model returns; `mean_of_squares` where it is None."""
    blocks: tuple[str, ...] = ()
    """The names of the blocks, where `find_blocks` does not find what people would checkpoint."""

    def loss_of(self, model: nn.Module, batch: Arguments) -> Tensor:
        output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        return (self.loss or mean_of_squares)(output)


def mean_of_squares(output: Any) -> Tensor:
    """A loss that every floating-point tensor of `output` has a part in.

    Raises:
        ValueError: if none needs a gradient.
    """
    tensors = [t for t in _tensors_in(output) if t.is_floating_point() and t.requires_grad]
    if not tensors:
        raise ValueError(f"nothing to train in {type(output).__name__}")
    return torch.stack([t.float().square().mean() for t in tensors]).sum()


def _tensors_in(output: Any) -> list[Tensor]:
    to_tuple = getattr(output, "to_tuple", None)
    leaves = pytree.tree_leaves(to_tuple() if to_tuple else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def find_blocks(model: nn.Module) -> list[str]:
    """The names of the parts that a user would checkpoint one by one.

    They are the layers that a library marks itself, or else what stands in the outermost lists and
    sequences of modules of one class, or else the model's own children.
    """
    marked = list(_find_marked(model, ""))
    return marked or list(_find_repeated(model, "")) or _find_children(model)


def _find_marked(module: nn.Module, name: str) -> Iterator[str]:
    for child_name, child in module.named_children():
        full_name = f"{name}{child_name}"
        if any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(child).__mro__):
            yield full_name
        else:
            yield from _find_marked(child, f"{full_name}.")


def _find_repeated(module: nn.Module, name: str) -> Iterator[str]:
    for child_name, child in module.named_children():
        full_name = f"{name}{child_name}"
        is_list = isinstance(child, (nn.ModuleList, nn.Sequential)) and _has_one_class(child)
        if is_list and _can_be_called(next(iter(child.children()))):
            yield from (f"{full_name}.{member}" for member, _ in child.named_children())
        else:
            yield from _find_repeated(child, f"{full_name}.")


def _has_one_class(modules: nn.Module) -> bool:
    children = list(modules.children())
    return len({type(m) for m in children}) == 1 and len(list(children[0].modules())) > 1


def _can_be_called(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _find_children(model: nn.Module) -> list[str]:
    return [
        name
        for name, child in model.named_children()
        if any(True for _ in child.parameters()) and _can_be_called(child)
    ]
