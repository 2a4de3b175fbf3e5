"""How the command ends: exit codes, errors in a few lines, warnings in one, quiet pipes.

0: done. 1: it failed. 2: the arguments are wrong. 130: Ctrl-C. 141: the reader of its output ended.
"""

import io
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from torchremat.errors import TorchrematError, make_printable

# as shells number them: 128 + SIGINT, 128 + SIGPIPE
FAILED, INTERRUPTED, PIPE_CLOSED = 1, 130, 141


class UserCodeError(click.ClickException):
    """The user's own code raised while it was loaded or called."""

    def __init__(self, doing: str, cause: BaseException) -> None:
        super().__init__(f"{doing} raised {_describe_foreign(cause)}")


class Command(click.Group):
    """A group of commands that ends with `PIPE_CLOSED` when nobody reads its output any more."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # or a closed pipe is noticed only when Python ends
        except BrokenPipeError:
            _discard_output()
            ctx.exit(PIPE_CLOSED)
        return result

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of the file, not of the alphabet."""
        return list(self.commands)

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        settings: dict[str, bool] = {}  # --debug writes to it, wherever it stands
        extra["standalone_mode"] = False
        try:
            with _print_own_warnings():
                code = super().main(args, prog_name, obj=settings, **extra)
        except (KeyboardInterrupt, click.Abort):
            click.echo("interrupted", err=True)
            code = INTERRUPTED
        except Exception as error:
            code = _print_error(error, debug=settings.get("debug", False))
        sys.exit(code if isinstance(code, int) else 0)


def _print_error(error: Exception, *, debug: bool) -> int:
    if debug and not isinstance(error, click.UsageError):
        traceback.print_exception(error)
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    click.echo(f"Error: {describe_error(error)}", err=True)
    if not debug and not isinstance(error, TorchrematError | OSError):
        click.echo("--debug shows where it was raised", err=True)
    return FAILED


def describe_error(error: Exception) -> str:
    """The message of our own errors as it is, that of others with type and place.

    >>> describe_error(ValueError("no"))
    'ValueError: no'
    """
    if isinstance(error, TorchrematError):
        return str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{os.fspath(error.filename)!s}: {error.strerror}"
    return _describe_foreign(error)


def _describe_foreign(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    place = place_of(error)
    return make_printable(f"{text}\n  at {place}" if place else text, keep="\n\t")


def place_of(error: BaseException) -> str:
    """The innermost line of the user's own code that an error passed, as `model.py:12 (make)`.

    >>> place_of(ValueError("raised nowhere"))
    ''
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    if not own:
        return ""
    return f"{_short_path(own[-1].filename)}:{own[-1].lineno} ({own[-1].name})"


def _is_library(filename: str) -> bool:
    parts = Path(filename).parts
    package = str(Path(__file__).parents[2])
    return (
        filename.startswith(("<", package))
        or "site-packages" in parts
        or filename.startswith(os.path.dirname(os.__file__))
    )


def _short_path(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def _discard_output() -> None:
    """Discard the text that is buffered for a closed pipe; Python complains of it at its end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = io.StringIO()  # it is not a file


@contextmanager
def _print_own_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if category.__module__.startswith("torchremat."):
                click.echo(f"Warning: {message}", err=True)
            else:
                shown(message, category, *rest, **more)

        warnings.showwarning = show
        yield
