"""The texts of the errors are those of `jax.vmap`."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchremat import _torch
from torchremat.api_util import flatten_axes
from torchremat.batching.ragged.pile import Pile
from torchremat.batching.vmappable import is_spec, is_vmappable, num_examples, vmappable_of
from torchremat.core.avals import Aval
from torchremat.errors import ArgumentValueError, AxisError, AxisTypeError


def check_randomness(randomness: Any) -> None:
    """Raise unless `randomness` is one of the words that `vmap` takes."""
    known = ("error", "different", "same")
    if randomness not in known:
        raise ArgumentValueError(f"randomness must be one of {known}, but it is {randomness!r}")


def check_axes(in_axes: Any, out_axes: Any, caller: str = "vmap") -> None:
    """Raise unless axes are integers, `None` or specs, alone or in containers."""
    if not (in_axes is None or _is_axis(in_axes) or isinstance(in_axes, tuple)):
        raise AxisTypeError(
            f"{caller} in_axes must be an int, None, or a tuple of entries corresponding to the "
            f"positional arguments passed to the function, but got {in_axes!r}."
        )
    for name, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
        leaves = _torch.tree_flatten(axes, is_leaf=_is_axis)[0]
        if not all(leaf is None or _is_axis(leaf) for leaf in leaves):
            raise AxisTypeError(
                f"{caller} {name} must be an int, None, or (nested) container with those types as "
                f"leaves, but got {axes!r}."
            )


def _is_axis(axis: Any) -> bool:
    return type(axis) is int or is_spec(axis)


@dataclass(frozen=True, eq=False)
class MappedLeaves:
    """The leaves of the arguments of a mapped function, with the axis of each."""

    fun: Callable[..., Any]
    leaves: list[Any]
    axes: list[Any]
    spec: _torch.TreeSpec
    caller: str = "vmap"
    """The name of the transformation, for errors."""

    @classmethod
    def of(
        cls,
        fun: Callable[..., Any],
        in_axes: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        caller: str = "vmap",
    ) -> "MappedLeaves":
        """Keyword arguments are mapped along their first axis."""
        if isinstance(in_axes, tuple) and len(in_axes) != len(args):
            raise AxisError(
                f"{caller} in_axes must be an int, None, or a tuple of entries corresponding to "
                "the positional arguments passed to the function, but got "
                f"len(in_axes)={len(in_axes)}, len(args)={len(args)}"
            )
        leaves, spec = _torch.tree_flatten((args, dict(kwargs)), is_leaf=is_vmappable)
        axes = flatten_axes(f"{caller} in_axes", spec, (in_axes, 0), kws=True)
        return cls(fun, leaves, axes, spec, caller)

    def size(self, axis_size: Any) -> int:
        sizes = [
            None if axis is None or leaf is None else self._size_of(leaf, axis)
            for leaf, axis in zip(self.leaves, self.axes, strict=True)
        ]
        known = [size for size in sizes if size is not None]
        if not known and axis_size is None:
            self._refuse_no_size()
        given = axis_size if isinstance(axis_size, int) else num_examples(axis_size)
        if given is not None:
            known.append(given)
        if not known:
            self._refuse_no_size()
        if any(size != known[0] for size in known):
            self._refuse_sizes(sizes, axis_size)
        return known[0]

    def _size_of(self, leaf: Any, axis: Any) -> int | None:
        if isinstance(leaf, Pile):
            return len(leaf)
        registered = vmappable_of(type(leaf))
        if registered is not None:
            if not isinstance(axis, registered.spec_type):
                raise AxisTypeError(
                    f"{self.caller} was given {axis!r} as the axis of its {self._name_of(leaf)}: "
                    f"such a container is mapped along a {registered.spec_type.__name__}, in "
                    "in_axes, or not at all (None)."
                )
            return _size_of_container(leaf, axis)
        if not isinstance(leaf, Tensor | int | float | complex):
            raise AxisTypeError(
                f"{self.caller} was requested to map its {self._name_of(leaf)} along axis {axis}, "
                f"but it is {leaf!r} ({type(leaf).__name__}), which has no axes: give None for it "
                "in in_axes."
            )
        shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else ()
        if not isinstance(axis, int):
            raise AxisTypeError(
                f"{self.caller} was given {axis!r} as the axis of its {self._name_of(leaf)}, "
                f"which is {_kind_of(leaf)}: an axis of a tensor is an int or None."
            )
        if not -len(shape) <= axis < len(shape):
            needed = axis + 1 if axis >= 0 else -axis
            rank = f"{len(shape)} (its shape is {shape})"
            raise AxisError(
                f"{self.caller} was requested to map its argument along axis {axis}, which "
                f"implies that its rank should be at least {needed}, but is only {rank}: "
                f"{self._name_of(leaf)}"
            )
        return shape[axis]

    def _refuse_no_size(self) -> None:
        or_size = " or axis_size must be specified" if self.caller == "vmap" else ""
        if not self.leaves:
            args, kwargs = _torch.tree_unflatten(self.leaves, self.spec)
            raise AxisError(
                f"{self.caller} wrapped function must be passed at least one argument containing "
                f"an array{or_size}, got empty *args={args} and **kwargs={kwargs}"
            )
        raise AxisError(f"{self.caller} must have at least one non-None value in in_axes{or_size}")

    def _refuse_sizes(self, sizes: Sequence[int | None], axis_size: Any) -> None:
        names = self._names()
        lines = [] if axis_size is None else [f"  * the `axis_size` argument was {axis_size}"]
        for i, (size, count) in enumerate(Counter(s for s in sizes if s is not None).most_common()):
            first = sizes.index(size)
            example = f"axis {self.axes[first]} of {names[first]}"
            if count == 1:
                lines.append(f"  * one axis had size {size}: {example}")
            else:
                most = "most" if i == 0 else "some"
                lines.append(f"  * {most} axes ({count} of them) had size {size}, e.g. {example}")
        raise AxisError(
            f"{self.caller} got inconsistent sizes for array axes to be mapped:\n"
            + ";\n".join(lines)
        )

    def _name_of(self, leaf: Any) -> str:
        index = next(i for i, other in enumerate(self.leaves) if other is leaf)
        return self._names()[index]

    def _names(self) -> list[str]:
        """Describe each leaf: `argument x[0] of type f32[3]`."""
        tree = _torch.tree_unflatten(self.leaves, self.spec)
        paths = _torch.tree_flatten_with_path(tree, is_leaf=is_vmappable)[0]
        parameters = _parameters_of(self.fun, *tree)
        return [f"{_argument_at(p, parameters)} of type {_kind_of(leaf)}" for p, leaf in paths]


@contextmanager
def name_output(spec: _torch.TreeSpec, index: int, axes: Sequence[Any]) -> Iterator[None]:
    """Let an error of the block, which gives output `index` of `spec` its axis, say which it is."""
    try:
        yield
    except AxisError as error:
        paths = _torch.tree_flatten_with_path(_torch.tree_unflatten([0] * len(axes), spec))[0]
        place = _torch.keystr(paths[index][0])
        spec_given = f"at vmap out_axes{place}, got axis spec {axes[index]}"
        raise AxisError(f"{spec_given}: {error}") from None


def _size_of_container(leaf: Any, axis: Any) -> int | None:
    registered = vmappable_of(type(leaf))
    assert registered is not None
    sizes: list[int] = []

    def note(value: Any, dim: Any) -> Any:
        if isinstance(value, Tensor) and dim is not None:
            sizes.append(value.shape[dim])
            return value.select(dim, 0) if value.shape[dim] else value.sum(dim)
        return value

    registered.to_elt(note, lambda: 0, leaf, axis)
    return sizes[0] if sizes else None


def _parameters_of(fun: Callable[..., Any], args: Any, kwargs: Any) -> list[str]:
    try:
        return list(inspect.signature(fun).bind(*args, **kwargs).signature.parameters)
    except (TypeError, ValueError):
        return []


def _argument_at(path: Any, parameters: Sequence[str]) -> str:
    place, key, *rest = path
    if place.idx == 1:
        return f"kwargs{_torch.keystr((key, *rest))}"
    if key.idx < len(parameters):
        return f"argument {parameters[key.idx]}{_torch.keystr(tuple(rest))}"
    return f"args{_torch.keystr((key, *rest))}"


def _kind_of(leaf: Any) -> str:
    return str(Aval.of(leaf)) if isinstance(leaf, Tensor) else type(leaf).__name__
