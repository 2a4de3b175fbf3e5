"""Selections of a model's submodules: by name, class, predicate or position."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

from torchremat.core.source import warn_user
from torchremat.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    NoMatchError,
    SelectionWarning,
    nearest_names,
)

Select: TypeAlias = (
    str | type | tuple[type, ...] | Callable[[nn.Module], Any] | Callable[[str, nn.Module], Any]
)
"""A selection as text, a class or several, or a predicate of a module or of its name and it."""

_KEYWORDS = {"every": "every:3", "first": "first:2", "last": "last:2", "range": "range:4-8"}


def select_modules(root: nn.Module, select: Select | None) -> list[tuple[str, nn.Module]]:
    """The submodules of `root` that `select` means, with their qualified names, in model order.

    `root` itself is not among them, except for `None`, which means `root` alone. A module that has
    several names is matched under each of them, and found once, under the first. Containers
    without a `forward` (`ModuleList`, `ModuleDict`) are passed over: nothing calls them.

    - Text is terms joined with `,`. A term with `!` before it excludes what it matches (that
      module, not what it contains), wherever it stands. A term is a pattern or a position.
    - A pattern matches qualified names part by part: `*`, `?` and `[01]` (as in `fnmatch`) within a
      part, so that `layers.*` is `layers.0` and not `layers.0.attn`; `**` is any number of parts,
      none included: `**.attn` is every `attn`. A pattern that would match nothing is one in which
      `*` crosses dots, as in `save_modules`: `*.attn` is every `attn` too, where no module on top
      has one. What a pattern matches inside another match is selected too.
    - `&` narrows a term: `every:2 & blocks.*.attn` is what one of both matches that is, or lies in,
      what the other matches: the `attn` of every second block. It binds closer than `,`.
    - A position is one of `every:3` (0, 3, 6, ...), `first:2`, `last:2` and `range:4-8` (4 to 8,
      both included). It counts from 0 over the longest `ModuleList` of the model, the first of
      several that are as long. A `ModuleDict` whose keys are numbers counts as a list. A model
      without these counts over its longest `Sequential`.
    - A class (or a tuple of them) matches its instances, a predicate the modules for which it is
      true: `predicate(module)`, or `predicate(name, module)` if it requires two arguments. Of
      matches inside one another only the outermost is selected.

    Warns with `SelectionWarning` where a pattern joined by `,` only selects modules inside those of
    a position: their values are then recomputed twice.

    Raises `NoMatchError` (a `ValueError`) with the nearest names if a term, or the whole, matches
    nothing. Raises `ValueError` for text that is not a selection or a position that is out of
    range, and `TypeError` for any other object.

    >>> model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(5))})
    >>> [name for name, _ in select_modules(model, "first:3, last:1, !layers.0")]
    ['layers.1', 'layers.2', 'layers.4']
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(4)))
    >>> [name for name, _ in select_modules(model, "every:2 & *.1")]
    ['0.1', '2.1']
    """
    if select is None:
        _check_has_forward(root)
        return [("", root)]
    model = _Model.of(root)
    if isinstance(select, str):
        return model.in_order(_ids_by_text(model, select))
    ids = _ids_by_predicate(model, _as_predicate(select))
    if not ids:
        raise NoMatchError(_describe_no_instance(model, select))
    return model.in_order(ids)


@dataclass(frozen=True, eq=False)
class _Model:
    root: nn.Module
    names: tuple[tuple[str, nn.Module], ...]
    containers: tuple[tuple[str, nn.Module], ...]

    @classmethod
    def of(cls, root: nn.Module) -> "_Model":
        found = [pair for pair in root.named_modules(remove_duplicate=False) if pair[0]]
        names = tuple(pair for pair in found if has_forward(pair[1]))
        containers = tuple(pair for pair in found if not has_forward(pair[1]))
        return cls(root, names, containers)

    def in_order(self, ids: set[int]) -> list[tuple[str, nn.Module]]:
        return [(n, m) for n, m in self.root.named_modules() if n and id(m) in ids]

    def describe_nearest(self, name: str) -> str:
        names = [name for name, _ in self.names]
        return f"the modules of {type(self.root).__name__}, {nearest_names(name, names)}"


def has_forward(module: nn.Module) -> bool:
    """Whether `module` computes something when it is called.

    >>> has_forward(nn.Linear(2, 2)), has_forward(nn.ModuleList())
    (True, False)
    """
    forward = inspect.getattr_static(type(module), "forward")
    return forward is not nn.Module.forward or "forward" in vars(module)


def _check_has_forward(root: nn.Module) -> None:
    if not has_forward(root):
        raise ArgumentValueError(
            f"a {type(root).__name__} has no forward of its own, so nothing would be wrapped. Say "
            "which of the modules in it are meant: select='*' selects all of them"
        )


# --- text ----------------------------------------------------------------------------------------


def _ids_by_text(model: _Model, text: str) -> set[int]:
    terms = [term.strip() for term in text.split(",")]
    if not all(part.strip() for term in terms for part in term.removeprefix("!").split("&")):
        raise ArgumentValueError(
            f"select={text!r} has an empty term. Join patterns and positions with one ',' or '&': "
            "'layers.*,!layers.0' or 'first:2 & **.attn', say"
        )
    included = [term for term in terms if not term.startswith("!")]
    excluded = [term.removeprefix("!").strip() for term in terms if term.startswith("!")]
    if not included:
        raise ArgumentValueError(
            f"select={text!r} only excludes. Say first what to select: 'layers.*,{text}', say"
        )
    found = {term: _ids_by_term(model, term) for term in included}
    _warn_of_nesting(model, text, found)
    chosen = set[int]().union(*found.values())
    chosen -= set[int]().union(*(_ids_by_term(model, term) for term in excluded))
    if not chosen:
        raise NoMatchError(f"select={text!r} excludes all that it selects")
    return chosen


def _warn_of_nesting(model: _Model, text: str, found: dict[str, set[int]]) -> None:
    """Warn of `every:2,**.attn`, which is read as the `attn` of every second block."""
    positions = [term for term in found if ":" in term and "&" not in term]
    for pattern, ids in found.items():
        for position in positions:
            if ":" not in pattern and _inside(model, ids, found[position]):
                warn_user(
                    f"select={text!r}: a ',' joins, so modules of {pattern!r} lie inside those of "
                    f"{position!r}, and are recomputed twice. For what is in both, write "
                    f"'{position} & {pattern}'",
                    SelectionWarning,
                )


def _inside(model: _Model, ids: set[int], outer: set[int]) -> set[int]:
    around = [f"{name}." for name, module in model.names if id(module) in outer]
    return {
        id(module)
        for name, module in model.names
        if id(module) in ids and id(module) not in outer and name.startswith(tuple(around))
    }


def _ids_by_term(model: _Model, term: str) -> set[int]:
    first, *others = (_ids_by_part(model, part.strip()) for part in term.split("&"))
    for other in others:
        first = (first & other) | _inside(model, first, other) | _inside(model, other, first)
    if not first:
        raise NoMatchError(
            f"{term!r} matches nothing: of the modules that its parts match, none of one is, or "
            "lies in, one of the other"
        )
    return first


def _ids_by_part(model: _Model, term: str) -> set[int]:
    if ":" in term:
        return _ids_by_position(model, term)
    pattern = term.split(".")
    found = {id(module) for name, module in model.names if _matches(pattern, name.split("."))}
    if not found:  # then a `*` crosses dots
        found = {id(module) for name, module in model.names if fnmatchcase(name, term)}
    if not found:
        raise NoMatchError(
            f"{term!r} matches nothing{_explain_no_match(model, term)}. "
            f"Of {model.describe_nearest(term)}"
        )
    return found


def _matches(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(pattern[1:], parts[start:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(pattern[1:], parts[1:])


def _explain_no_match(model: _Model, pattern: str) -> str:
    for name, module in model.containers:
        if _matches(pattern.split("."), name.split(".")):
            return (
                f" that can be called: {name} is a {type(module).__name__}, which has no forward; "
                f"what it holds is '{pattern}.*'"
            )
    return ""


# --- positions -----------------------------------------------------------------------------------


def _ids_by_position(model: _Model, term: str) -> set[int]:
    keyword, _, argument = term.partition(":")
    if keyword not in _KEYWORDS:
        raise ArgumentValueError(
            f"{term!r}: there is no {keyword!r} to select by, {nearest_names(keyword, _KEYWORDS)}. "
            f"Positions are {', '.join(_KEYWORDS.values())}; patterns have no ':'"
        )
    numbers = _numbers(term, keyword, argument)
    name, blocks = _blocks(model, term)
    chosen = _positions(keyword, numbers, len(blocks))
    if chosen is None:
        raise ArgumentValueError(_describe_range(term, keyword, name, len(blocks)))
    ids = {id(blocks[i]) for i in chosen if has_forward(blocks[i])}
    if not ids:
        raise NoMatchError(f"{term!r} finds in {name} only modules that have no forward")
    return ids


def _numbers(term: str, keyword: str, argument: str) -> tuple[int, ...]:
    pattern = r"(\d+)-(\d+)" if keyword == "range" else r"(\d+)"
    match = re.fullmatch(pattern, argument.strip(), re.ASCII)
    if match is None:
        raise ArgumentValueError(
            f"{term!r} cannot be read; it is spelled like {_KEYWORDS[keyword]!r}"
        )
    numbers = tuple(map(int, match.groups()))
    if sorted(numbers) != list(numbers):
        raise ArgumentValueError(
            f"{term!r} ends before it starts: write range:{numbers[1]}-{numbers[0]}, which has "
            "both of its ends in it"
        )
    return numbers


def _positions(keyword: str, numbers: tuple[int, ...], count: int) -> range | None:
    """The positions among `count` modules, or `None` if one is out of range."""
    if keyword == "range":
        return range(numbers[0], numbers[1] + 1) if numbers[1] < count else None
    number = numbers[0]
    if not 1 <= number <= count:
        return None
    whole = {
        "every": range(0, count, number),
        "first": range(number),
        "last": range(count - number, count),
    }
    return whole[keyword]


def _describe_range(term: str, keyword: str, name: str, count: int) -> str:
    rule = f"within 0-{count - 1}" if keyword == "range" else f"at least 1 and at most {count}"
    return f"{term!r} is out of range: {name} holds {count} modules, so it must be {rule}"


def _blocks(model: _Model, term: str) -> tuple[str, list[nn.Module]]:
    """The longest `ModuleList`, or else `Sequential`, after its name for a message."""
    modules = list(model.root.named_modules())
    for kinds in ((nn.ModuleList, nn.ModuleDict), (nn.Sequential,)):
        lists = [
            (name, [block for block in _entries(module) if block is not None])
            for name, module in modules
            if isinstance(module, kinds)
        ]
        if any(blocks for _, blocks in lists):
            name, blocks = max(lists, key=lambda pair: len(pair[1]))
            return name or f"the {type(model.root).__name__}", blocks
    raise NoMatchError(
        f"{term!r} counts over the longest ModuleList, ModuleDict of numbers or Sequential, and "
        f"{type(model.root).__name__} has none; select by name. Of {model.describe_nearest(term)}"
    )


def _entries(
    module: nn.ModuleList | nn.ModuleDict | nn.Sequential,
) -> Iterable[nn.Module | None]:
    if not isinstance(module, nn.ModuleDict):
        return module
    return module.values() if all(key.isdecimal() for key in module) else ()


# --- classes and predicates ----------------------------------------------------------------------


def _as_predicate(select: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(select, type) or (select and type(select) is tuple and _all_types(select)):
        return lambda _, module: isinstance(module, select)
    if isinstance(select, nn.Module) or not callable(select):
        cure = "; join patterns with ','" if isinstance(select, list | tuple | set) else ""
        raise ArgumentTypeError(
            "select must be a pattern such as 'layers.*', a position such as 'every:3', a class or "
            f"a predicate, but it is {select!r} ({type(select).__name__}){cure}"
        )
    if _num_required(select) == 2:
        return lambda name, module: bool(select(name, module))
    return lambda _, module: bool(select(module))


def _all_types(values: tuple[Any, ...]) -> bool:
    return all(isinstance(value, type) for value in values)


def _num_required(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters)


def _ids_by_predicate(model: _Model, predicate: Callable[[str, nn.Module], bool]) -> set[int]:
    return {id(module) for module in _outermost(model.root, "", predicate)}


def _outermost(
    module: nn.Module, name: str, predicate: Callable[[str, nn.Module], bool]
) -> Iterator[nn.Module]:
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if has_forward(child) and predicate(path, child):
            yield child
        else:
            yield from _outermost(child, path, predicate)


def _describe_no_instance(model: _Model, select: Any) -> str:
    if not isinstance(select, type | tuple):
        return f"the predicate is true of no module in {type(model.root).__name__}"
    kinds = select if isinstance(select, tuple) else (select,)
    wanted = " or ".join(kind.__name__ for kind in kinds)
    classes = {type(module).__name__ for _, module in model.names}
    itself = (
        f". The {type(model.root).__name__} is one itself: leave out select to mean it"
        if isinstance(model.root, select)
        else ""
    )
    return (
        f"{type(model.root).__name__} has no {wanted} in it. Of the classes in it, "
        f"{nearest_names(kinds[0].__name__, classes)}{itself}"
    )
