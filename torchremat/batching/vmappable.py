from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.batching.ragged.pile import ConcatAxis, Pile
from torchremat.errors import RegistrationError

ToElt = Callable[[Callable[[Any, Any], Any], Callable[[], Any], Any, Any], Any]
FromElt = Callable[[Callable[[Any, Any, Any], Any], Any, Any, Any], Any]


@dataclass(frozen=True)
class Vmappable:
    """A registered container type: its specs, its sizes, and how to take elements out and in."""

    spec_type: type
    axis_size_type: type
    to_elt: ToElt
    from_elt: FromElt
    make_iota: Callable[[Any], Any] | None

    def numbers(self, axis_size: Any, size: int) -> Any:
        """The number of each element along an axis, as the container counts them."""
        if self.make_iota is None or not isinstance(axis_size, self.axis_size_type):
            return torch.arange(size)
        return self.make_iota(axis_size)


_registered: dict[type, Vmappable] = {}


def register_vmappable(
    data_type: type,
    spec_type: type,
    axis_size_type: type,
    to_elt: ToElt,
    from_elt: FromElt,
    make_iota: Callable[[Any], Any] | None = None,
) -> None:
    """Let `vmap` map containers of `data_type` along what values of `spec_type` say.

    Args:
        data_type: the type of the containers; subclasses are types of their own.
        spec_type: the type of what stands for them in `in_axes` and `out_axes`.
        axis_size_type: the type of what `vmap(..., axis_size=)` may be given with them; mostly
            `int`. `from_elt` and `make_iota` are given it.
        to_elt: `to_elt(cont, get_idx, container, spec)` gives the element of one example, for which
            `cont(tensor, axis)` gives a tensor's, and `get_idx()` the number of the example.
        from_elt: `from_elt(cont, axis_size, element, spec)` gives the container of all, for which
            `cont(axis_size, tensor, axis)` gives the tensor of all.
        make_iota: `make_iota(axis_size)` gives the numbers of the examples; by default
            `torch.arange` does.

    Raises:
        RegistrationError: (a `ValueError`) if `data_type` is registered already, or is a tensor.

    >>> import torch, torchremat as tr
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Named:
    ...     names: tuple
    ...     data: torch.Tensor
    >>> @dataclass(frozen=True)
    ... class Along:
    ...     name: str
    >>> def to_elt(cont, get_idx, x, spec):
    ...     i = x.names.index(spec.name)
    ...     return Named(x.names[:i] + x.names[i + 1 :], cont(x.data, i))
    >>> def from_elt(cont, size, x, spec):
    ...     return Named((spec.name, *x.names), cont(size, x.data, 0))
    >>> register_vmappable(Named, Along, int, to_elt, from_elt)
    >>> double = tr.vmap(lambda x: Named(x.names, 2 * x.data), Along("j"), Along("j"), axis_size=3)
    >>> out = double(Named(("i", "j"), torch.ones(2, 3)))
    >>> out.names, out.data.shape
    (('j', 'i'), torch.Size([3, 2]))
    >>> unregister_vmappable(Named)
    """
    if data_type in _registered:
        raise RegistrationError(
            f"{data_type.__name__} is registered already: "
            f"unregister_vmappable({data_type.__name__}) first"
        )
    if issubclass(data_type, Tensor):
        raise RegistrationError(f"{data_type.__name__} is a tensor, which vmap maps as one")
    _registered[data_type] = Vmappable(spec_type, axis_size_type, to_elt, from_elt, make_iota)


def unregister_vmappable(data_type: type) -> None:
    """Undo `register_vmappable`.

    Raises:
        RegistrationError: (a `ValueError`) if `data_type` is not registered.
    """
    if _registered.pop(data_type, None) is None:
        raise RegistrationError(f"{data_type.__name__} is not registered as vmappable")


def is_vmappable(x: Any) -> bool:
    """Whether `x`, a value or a type, is a `Pile` or of a registered type.

    >>> is_vmappable(3)
    False
    """
    kind = x if isinstance(x, type) else type(x)
    return kind is Pile or kind in _registered


def vmappable_of(kind: type) -> Vmappable | None:
    """The registration of a type, or `None`."""
    return _registered.get(kind)


def is_axis_size(size: Any) -> bool:
    """Whether `size` is an axis size of a registered container."""
    return any(isinstance(size, v.axis_size_type) for v in _registered.values())


def num_examples(axis_size: Any) -> int | None:
    """How many elements an axis size of a container stands for; `None` if it does not say."""
    for kind in _registered.values():
        if kind.make_iota is not None and isinstance(axis_size, kind.axis_size_type):
            return int(kind.make_iota(axis_size).shape[0])
    return None


def holds_containers(tree: Any) -> bool:
    """Whether a registered container is a leaf of `tree`."""
    return bool(_registered) and any(
        vmappable_of(type(leaf)) for leaf in _torch.tree_flatten(tree, is_leaf=is_vmappable)[0]
    )


def is_spec(axis: Any) -> bool:
    """Whether `axis` is a spec: a `ConcatAxis`, or one of a registered container."""
    return isinstance(axis, ConcatAxis) or any(
        type(axis) is v.spec_type for v in _registered.values()
    )
