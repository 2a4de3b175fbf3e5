"""Interrupts (Ctrl-C, a `SIGALRM` whose handler raises) that wait while they would do harm.

Python calls handlers of signals between any two steps of the main thread. What a handler raises
inside a trace would leave modes and patches entered. Where C++ has called Python and cannot take an
exception, it ends the process. So in a block of `hold_interrupts` handlers run as ever, and their
exceptions wait. The user's own code, `let_interrupts_in` and the end of the outermost block raise
them.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torchremat.core.source import is_library_file, is_user_file

_PACKAGES = f"{os.sep}site-packages{os.sep}"
_STDLIB = os.path.dirname(os.__file__) + os.sep
# What ends or pauses programs, and timers. To ask for all 64 takes a third of a millisecond, which
# calls that alternate between traces would notice.
_NAMES = ("INT", "BREAK", "ALRM", "VTALRM", "PROF", "TERM", "HUP", "QUIT", "USR1", "USR2")
_NUMBERS = tuple(int(getattr(signal, f"SIG{n}")) for n in _NAMES if hasattr(signal, f"SIG{n}"))


class InterruptedTrace(BaseException):
    """Ends what runs in a block of `hold_interrupts`, which raises the handler's own exception.

    A handler may raise an `Exception`, such as `TimeoutError`. Those who take any `Exception` for
    their own failure, and try something else, would keep it.
    """


class _Held:
    """Replaced handlers and what they raised. Only the main thread uses it, as Python's do."""

    def __init__(self) -> None:
        self.depth = 0
        self.handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self.error: BaseException | None = None
        self.is_raised = False
        """Whether the error has ended what runs: what cleans up after it is left alone."""

    def enter(self) -> None:
        self.depth += 1
        if self.depth == 1:
            for number in _NUMBERS:
                handler = signal.getsignal(number)
                if callable(handler) and handler is not _receive:
                    self.handlers[number] = handler
                    signal.signal(number, _receive)

    def leave(self) -> None:
        if self.depth == 1:
            while self.handlers:
                try:
                    self._restore()
                except BaseException as error:  # of a handler that is back in its place
                    self.error = error
        self.depth -= 1

    def _restore(self) -> None:
        for number in list(self.handlers):
            if signal.getsignal(number) is _receive:  # else the code in the block has set another
                signal.signal(number, self.handlers[number])
            del self.handlers[number]

    def take(self) -> BaseException | None:
        error, self.error, self.is_raised = self.error, None, False
        return error

    def raise_waiting(self) -> None:
        if self.error is not None and not self.is_raised:
            self.is_raised = True
            raise InterruptedTrace from self.error


_held = _Held()


def _receive(number: int, frame: FrameType | None) -> None:
    handler = _held.handlers.get(number)
    if handler is None:
        return
    try:
        handler(number, frame)
    except BaseException as error:
        if not _held.depth:
            raise
        _held.error = error
        if _is_in_users_code(frame):
            _held.raise_waiting()


def _is_in_users_code(frame: FrameType | None) -> bool:
    """Whether the user's code runs in `frame`, or what that called: not PyTorch, nor the library.

    Other packages than these are called by all three, and count as who called them.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if is_library_file(file):
            return False
        if is_user_file(file) and not file.startswith(_STDLIB) and _PACKAGES not in file:
            return True
        frame = frame.f_back
    return False


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Let exceptions of signal handlers wait; the outermost block raises the last of them."""
    if threading.current_thread() is not threading.main_thread():
        yield  # no handler runs here
        return
    try:
        _held.enter()
        yield
    finally:
        _held.leave()
        if not _held.depth and (error := _held.take()) is not None:
            raise error from error.__cause__  # not "during handling of InterruptedTrace"


def let_interrupts_in() -> None:
    """Raise what waits. Callers are ready for any exception here."""
    if _held.error is not None and threading.current_thread() is threading.main_thread():
        _held.raise_waiting()
