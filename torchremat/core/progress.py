"""A progress bar for what takes longer than two seconds, where there is a terminal to show it."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

# Chosen by hand, so that short work does not flash a bar: nothing depends on the exact value.
AFTER_SECONDS = 2.0


@contextmanager
def show_progress(title: str) -> Iterator[Callable[[float], None]]:
    """A function to tell what fraction of the work is done; it shows a bar after two seconds.

    At the end a line says how long it took. Nothing is shown where standard error is not
    a terminal.

    >>> with show_progress("planning") as tell:
    ...     tell(0.5)
    """
    bar = _Bar(title)
    try:
        yield bar.tell
    finally:
        bar.stop()


class _Bar:
    def __init__(self, title: str) -> None:
        self.title = title
        self.start = time.monotonic()
        self.progress: Progress | None = None

    def tell(self, fraction: float) -> None:
        if self.progress is None:
            if not sys.stderr.isatty() or time.monotonic() - self.start < AFTER_SECONDS:
                return
            self.progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self.task = self.progress.add_task(self.title, total=1.0)
            self.progress.start()
        self.progress.update(self.task, completed=min(max(fraction, 0.0), 1.0))

    def stop(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress.console.print(f"{self.title}: {time.monotonic() - self.start:.1f} s")
