"""The names in code: globals that it reads and sets, attributes, texts."""

import dis
import functools
from collections.abc import Iterator, Set
from types import CodeType


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """`code`, and that of the functions, lambdas and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> Set[str]:
    """The names of globals, attributes and imports in `code`, in the order in which they come."""
    return {name: None for c in codes_in(code) for name in c.co_names}.keys()


@functools.lru_cache(maxsize=4096)
def texts_in(code: CodeType) -> Set[str]:
    """The texts in `code` that may be names of attributes: of `getattr(x, "scale")`, say."""
    constants = [c for inner in codes_in(code) for c in inner.co_consts]
    constants += [c for several in constants if isinstance(several, tuple) for c in several]
    return frozenset(c for c in constants if isinstance(c, str) and c.isidentifier())


def globals_read_by(code: CodeType) -> Set[str]:
    """The globals and builtins that `code` reads, in the order in which they come."""
    return _globals_of(code)[0]


def globals_set_by(code: CodeType) -> Set[str]:
    return _globals_of(code)[1]


_READS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"))
"""All else that `code.co_names` has are attributes and imports. The last two are in classes."""


@functools.lru_cache(maxsize=4096)
def _globals_of(code: CodeType) -> tuple[Set[str], Set[str]]:
    instructions = [i for c in codes_in(code) for i in dis.get_instructions(c)]
    read = {i.argval: None for i in instructions if i.opname in _READS}
    return read.keys(), frozenset(i.argval for i in instructions if i.opname == "STORE_GLOBAL")
