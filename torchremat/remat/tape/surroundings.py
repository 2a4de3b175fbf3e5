"""Where an operator that runs comes from: the user's line, and the module that runs."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType

from torch import nn

from torchremat.core.source import Source, is_user_file
from torchremat.tracing.modules.module_paths import ModulePaths

# the outer of the two methods that `module(...)` runs through; it has few variables to look at
_CALL = nn.Module._wrapped_call_impl.__code__

_USER, _MODULE, _OTHER = range(3)


class Surroundings:
    """Reads the stack, above the frame `base` alone; hooks of modules would switch fast paths off.

    A module that is met outside any other has the name of its class, if `roots` has none for it.
    """

    def __init__(self, prefix: str, roots: Sequence[tuple[str, nn.Module]]) -> None:
        self._prefix = prefix
        self._paths = ModulePaths({})
        for name, module in roots:
            self._paths.add_root(module, ".".join(filter(None, (prefix, name))))
        self._kinds: dict[CodeType, int] = {_CALL: _MODULE}
        self.base: FrameType | None = None

    @contextmanager
    def above(self, frame: FrameType) -> Iterator[None]:
        """Read no further down than `frame` in the block."""
        before, self.base = self.base, frame
        try:
            yield
        finally:
            self.base = before

    def read(self) -> tuple[tuple[CodeType, int] | None, str]:
        """The innermost line of the user's as code and line number, and the module's name."""
        line, kinds = None, self._kinds
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.base:
            code = frame.f_code
            kind = kinds.get(code)
            if kind is None:
                kind = kinds[code] = _USER if is_user_file(code.co_filename) else _OTHER
            if kind == _USER:
                if line is None:
                    line = (code, frame.f_lineno)
            elif kind == _MODULE:
                return line, self._name(frame.f_locals["self"], frame)
            frame = frame.f_back
        return line, self._prefix

    def _name(self, module: nn.Module, frame: FrameType) -> str:
        name = self._paths.name_of(module)
        if name is None:
            self._add_outermost(module, frame)
            name = self._paths.name_of(module) or type(module).__name__
        return name

    def _add_outermost(self, module: nn.Module, frame: FrameType) -> None:
        outer: FrameType | None = frame
        while outer is not None and outer is not self.base:
            if outer.f_code is _CALL:
                module = outer.f_locals["self"]
            outer = outer.f_back
        self._paths.add_root(module, type(module).__name__)


def source_at(line: tuple[CodeType, int] | None) -> Source | None:
    return None if line is None else Source(line[0].co_filename, line[1], line[0].co_name)
