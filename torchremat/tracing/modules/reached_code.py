"""Code that a function ran while it was traced, as far as it led to an operator."""

import sys
import threading
from types import CodeType, FrameType
from typing import Any

from torchremat.core.source import is_computing

GlobalsOf = dict[CodeType, dict[str, Any]]
"""The namespace that each code was run in."""


class ReachedCode:
    """A block, and the code of the frames between it and the operators recorded in it."""

    def __init__(self) -> None:
        self.globals_of: GlobalsOf = {}
        self._start: FrameType | None = None

    def __enter__(self) -> "ReachedCode":
        self._start = sys._getframe(1)
        _in_progress.blocks.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _in_progress.blocks.pop()
        self._start = None


class _BlocksInProgress(threading.local):
    def __init__(self) -> None:
        self.blocks: list[ReachedCode] = []


_in_progress = _BlocksInProgress()


def note_frames() -> None:
    """Note the code on the stack: each block in progress has what ran since it began."""
    blocks = _in_progress.blocks[::-1]
    found: GlobalsOf = {}
    frame: FrameType | None = sys._getframe(1) if blocks else None
    while frame is not None and blocks:
        if frame is blocks[0]._start:
            blocks.pop(0).globals_of.update(found)
        elif is_computing(frame.f_code.co_filename):
            found[frame.f_code] = frame.f_globals
        frame = frame.f_back


def note_code(globals_of: GlobalsOf) -> None:
    """Note code that ran in an earlier trace, which serves the blocks in progress."""
    for block in _in_progress.blocks:
        block.globals_of.update(globals_of)
