"""A call of a user's function: its tensors, and the name of each in the user's code."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from torch import Tensor, nn

from torchremat import _torch
from torchremat.core.open_objects import close_objects, open_objects
from torchremat.core.source import is_user_file, name_of, unwrap_function
from torchremat.errors import ArgumentTypeError, nearest_names
from torchremat.remat.tape.operator_facts import is_plain
from torchremat.remat.tracing.guards.variables import variables_of
from torchremat.tracing.modules.module_paths import ModulePaths

_KINDS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY,
    inspect.Parameter.VAR_KEYWORD,
)


@dataclass(frozen=True)
class InputLabel:
    """The name of a tensor in the user's code: `argument x['w'][0]`, `parameter fc.weight`, ..."""

    kind: Literal["argument", "parameter", "buffer", "closed-over"]
    text: str

    def __str__(self) -> str:
        return f"{self.kind} {self.text}"


class BoundCall:
    """A function with arguments, flattened into tensors and the rest.

    >>> import torch
    >>> def f(x, *rest, scale):
    ...     return (x["w"][0] + rest[0]) * scale
    >>> call = BoundCall(f, ({"w": [torch.ones(2)]}, torch.ones(2)), {"scale": torch.ones(())})
    >>> [str(label) for label in call.labels]
    ["argument x['w'][0]", 'argument rest[0]', 'argument scale']
    >>> call.run([torch.zeros(2), torch.ones(2), torch.ones(())])
    tensor([1., 1.])
    """

    def __init__(
        self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if not callable(fun):
            raise ArgumentTypeError(
                f"the first argument must be a function of tensors or an nn.Module, but it is "
                f"{_describe(fun)}. Give the function itself, then its arguments: "
                "saved_residuals(f, x), not saved_residuals(f(x))"
            )
        self.fun = fun
        self._args = args
        self._kwargs = dict(kwargs)
        self.tensors: list[Tensor] = []
        self.labels: list[InputLabel] = []
        self._modules: list[tuple[str, nn.Module]] = []
        for label, leaf in self._leaves():
            if isinstance(leaf, Tensor):
                self.tensors.append(leaf)
                self.labels.append(InputLabel("argument", label))
            elif isinstance(leaf, nn.Module):
                self._modules.append((label, leaf))
        inner = unwrap_function(fun)
        owner = getattr(inner, "__self__", inner)
        if isinstance(owner, nn.Module):
            self._modules.insert(0, ("", owner))
        self._closed_over: dict[str, Any] = {}
        for name, leaf in _find_closed_over(fun):
            self._closed_over.setdefault(name, leaf)
        self._modules += [(n, v) for n, v in self._closed_over.items() if isinstance(v, nn.Module)]

    @property
    def name(self) -> str:
        return name_of(self.fun)

    @property
    def arguments(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Those by position and those by name."""
        return self._args, self._kwargs

    @property
    def roots(self) -> dict[int, str]:
        return {id(module): name for name, module in reversed(self._modules)}

    def run(self, tensors: Sequence[Tensor]) -> Any:
        left = iter(tensors)

        def replace(value: Any) -> Any:
            return next(left) if isinstance(value, Tensor) else value

        opened = open_objects((self._args, self._kwargs))
        args, kwargs = close_objects(_torch.tree_map(replace, opened))
        return self.fun(*args, **kwargs)

    def is_known_to_require_grad(self) -> bool:
        """Whether an argument, or something that the function is seen to close over, does."""
        return any(map(_torch.requires_grad_at_any_level, self.list_tensors()))

    def list_tensors(self) -> list[Tensor]:
        """The arguments, what the function is seen to close over, and those of its modules."""
        tensors = [*self.tensors, *(v for v in self._closed_over.values() if isinstance(v, Tensor))]
        for _, module in self._modules:
            tensors += [*module.parameters(), *module.buffers()]
        return tensors

    def labels_of_captured(self, tensors: Sequence[Tensor], paths: ModulePaths) -> list[InputLabel]:
        known: dict[int, InputLabel] = {}
        for name, value in self._closed_over.items():
            if isinstance(value, Tensor):
                known.setdefault(id(value), InputLabel("closed-over", name))
        known |= labels_of_state(paths)
        for name, module in reversed(self._modules):
            known |= labels_in(name, module)
        return [
            known.get(id(tensor), InputLabel("closed-over", f"tensor {i}"))
            for i, tensor in enumerate(tensors)
        ]

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        """The leaves of the arguments in the order in which `run` wants tensors, with names."""
        names = self._parameter_names()
        for path, leaf in _torch.tree_flatten_with_path(open_objects((self._args, self._kwargs)))[
            0
        ]:
            which: Any
            first: Any
            which, first, *rest = path
            root = names[first.idx if which.idx == 0 else first.key]
            yield root + _torch.keystr(tuple(rest)), leaf

    def _parameter_names(self) -> dict[Any, str]:
        """The parameter of each argument by position or keyword: `x`, `args[1]`, `kwargs['y']`."""
        try:
            declared = list(inspect.signature(_find_signed(self.fun)).parameters.values())
        except (TypeError, ValueError):  # builtins have none
            declared = []
        by_kind = {kind: [p.name for p in declared if p.kind is kind] for kind in _KINDS}
        positional = [*by_kind[_KINDS[0]], *by_kind[_KINDS[1]]][: len(self._args)]
        (rest,) = by_kind[_KINDS[2]] or ["args"]
        rests = (f"{rest}[{i}]" for i in range(len(self._args) - len(positional)))
        names: dict[Any, str] = dict(enumerate([*positional, *rests]))
        named = {*by_kind[_KINDS[1]], *by_kind[_KINDS[3]]}
        (others,) = by_kind[_KINDS[4]] or ["kwargs"]
        return names | {k: k if k in named else f"{others}[{k!r}]" for k in self._kwargs}


def refuse_misspelt(
    tool: Callable[..., Any], fun: Callable[..., Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise `ArgumentTypeError` for a misspelt option of `tool`, which `fun` would be handed.

    Many models take any keyword (`**kwargs`), and would ignore it.

    >>> def tool(fun, *args, policy=None, **kwargs):
    ...     refuse_misspelt(tool, fun, kwargs)
    >>> try:
    ...     tool(max, polcy="dots")
    ... except TypeError as error:
    ...     print(error)
    tool has no option 'polcy', nearest: 'policy', nor has max such an argument
    """
    taken = _parameters_of(fun, _KINDS[1], _KINDS[3])
    options = _parameters_of(tool, _KINDS[3])
    for name, value in kwargs.items():
        if (
            name not in taken
            and not isinstance(value, Tensor)
            and get_close_matches(name, options, cutoff=0.75)
        ):
            raise ArgumentTypeError(
                f"{tool.__name__} has no option {name!r}, {nearest_names(name, options)}, nor has "
                f"{name_of(fun)} such an argument"
            )


def _parameters_of(fun: Callable[..., Any], *kinds: Any) -> list[str]:
    try:
        declared = inspect.signature(_find_signed(fun)).parameters.values()
    except (TypeError, ValueError):  # builtins have none
        return []
    return [p.name for p in declared if p.kind in kinds]


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r} ({type(value).__name__})"


def _find_signed(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The callable whose signature counts: for a module, its `forward`."""
    inner = fun if isinstance(fun, functools.partial) else unwrap_function(fun)
    return inner.forward if isinstance(inner, nn.Module) else fun


def labels_of_state(paths: ModulePaths) -> dict[int, InputLabel]:
    known: dict[int, InputLabel] = {}
    for module in paths.seen:
        for identity, label in labels_in(paths.name_of(module) or "", module).items():
            known.setdefault(identity, label)
    return known


def labels_in(root: str, module: nn.Module) -> dict[int, InputLabel]:
    prefix = f"{root}." if root else ""
    labels = {id(b): InputLabel("buffer", prefix + n) for n, b in module.named_buffers()}
    return labels | {
        id(p): InputLabel("parameter", prefix + n) for n, p in module.named_parameters()
    }


def labels_of_storages(module: nn.Module) -> dict[int, InputLabel]:
    """The labels of parameters and buffers by the `id` of their storages, which views have too."""
    labels = labels_in("", module)
    state = [t for t in (*module.parameters(), *module.buffers()) if is_plain(t)]
    return {id(t.untyped_storage()): labels[id(t)] for t in reversed(state)}


def _find_closed_over(fun: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The tensors and modules that `fun`, and user's functions that it calls, close over.

    Those that stand in lists, tuples and dicts are found too, as `layers[0]`; what a partial holds
    counts as closed over.
    """
    stack = [fun]
    seen: set[int] = set()
    while stack:
        fun = stack.pop()
        while isinstance(fun, functools.partial):
            yield from _name_leaves(fun.keywords)
            fun = fun.func
        inner = unwrap_function(fun)
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        for variable in variables_of(inner):
            value = variable.get()
            name = variable.label.removeprefix("closed-over ")
            if isinstance(value, Tensor | nn.Module | list | tuple | dict):
                yield from _name_leaves({name: value})
            elif callable(value) and _is_of_user(unwrap_function(value)):
                stack.append(value)


def _name_leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        for path, leaf in _torch.tree_flatten_with_path(open_objects(value))[0]:
            if isinstance(leaf, Tensor | nn.Module):
                yield name + _torch.keystr(path), leaf


def _is_of_user(fun: Any) -> bool:
    code = getattr(getattr(fun, "__func__", fun), "__code__", None)
    return code is not None and is_user_file(code.co_filename)
