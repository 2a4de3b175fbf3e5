"""Messages between processes besides their data: the call that each makes next, why one stops.

They write it into the store of the default process group, which works while a collective hangs.
"""

import itertools
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

from torchremat import _torch
from torchremat.errors import ProcessError
from torchremat.parallel.devices import process_count, process_index

_PREFIX = "torchremat"
_PATIENCE = timedelta(seconds=2)
"""How long to wait before looking again whether those that are waited for are still there."""


class _Agreed:
    def __init__(self) -> None:
        self.texts: set[str] = set()
        self.num_rounds = 0
        # the store of a group that is made anew may be that of the one before, with what is in it
        self.number = next(_numbers)


_numbers = itertools.count()
_agreed: weakref.WeakKeyDictionary[Any, _Agreed] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def can_share() -> bool:
    """Whether there are other processes, which share a store with this one.

    Those of the backend `fake`, with which PyTorch plays many processes in one, cannot.
    """
    return process_count() > 1 and distributed.get_backend() != "fake"


def agree(text: str, what: str) -> None:
    """Raise unless every process says the same `text` about what it calls next, `what`.

    Nothing is exchanged about what was agreed on before: processes run one program, and what is new
    to one of them is new to all.

    Raises:
        ProcessError: if one says something else, is gone, or says nothing for as long as the
            timeout that the process group was made with.
    """
    if not can_share():
        return
    withdraw()
    with _lock:
        agreed = _so_far()
        if text in agreed.texts:
            return
        said = gather_texts(text, f"calls {what} in a way that is new to it, {text}")
        if len(set(said)) > 1:
            raise ProcessError(_difference(said, what))
        agreed.texts.add(text)


def _so_far() -> _Agreed:
    group = distributed.group.WORLD
    if group not in _agreed:
        _agreed[group] = _Agreed()
    return _agreed[group]


def gather_texts(text: str, does: str) -> list[str]:
    """The texts of all processes, by number, each of which calls this: what it `does` to users."""
    store, here = _torch.store_of_processes(), process_index()
    publish_host(store)
    with _lock:
        agreed = _so_far()
        round_ = f"{_PREFIX}/agree/{agreed.number}/{agreed.num_rounds}"
        agreed.num_rounds += 1
    keys = [f"{round_}/{rank}" for rank in range(process_count())]
    store.set(keys[here], text)
    try:
        wait_for(store, dict(zip(keys, range(len(keys)), strict=True)))
    except ProcessError as error:
        silent = [rank for rank, key in enumerate(keys) if not has(store, key)]
        raise ProcessError(
            f"process {here} {does}, and {name_processes(silent)} did not{error}: every process "
            f"must make the same calls, with the same shapes, in the same order. {describe_peers()}"
        ) from error
    return [store.get(key).decode() for key in keys]


def _difference(said: Sequence[str], what: str) -> str:
    most = max(set(said), key=said.count)
    different = [rank for rank, text in enumerate(said) if text != most]
    lines = "".join(f"\n  process {rank}: {text}" for rank, text in enumerate(said))
    if said.count(most) * 2 <= len(said):
        different = list(range(len(said)))
    return (
        f"{name_processes(different)} {'differs' if len(different) == 1 else 'differ'} in the call "
        f"of {what}: every process must make the same calls, with the same shapes, in the same "
        f"order.{lines}"
    )


def wait_for(store: Any, keys: dict[str, int]) -> None:
    """Return when all keys are set, each by the process of that number.

    Raises `ProcessError` if one of these is gone, and after the timeout that the process group was
    made with.
    """
    give_up = time.monotonic() + _torch.timeout_of_processes().total_seconds()
    while True:
        left = give_up - time.monotonic()
        if left <= 0:
            raise ProcessError(" in the time that the process group allows")
        try:
            store.wait(list(keys), min(_PATIENCE, timedelta(seconds=left)))
            return
        except RuntimeError:
            silent = [rank for key, rank in keys.items() if not has(store, key)]
            if gone := [rank for rank in silent if _is_gone(store, rank)]:
                raise ProcessError(f", as {_describe_ranks(gone, 'gone')}") from None


def publish_error(error: BaseException) -> None:
    if not can_share():
        return
    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    with suppress(RuntimeError):  # the store went with the process that had it
        _torch.store_of_processes().set(_word_of(process_index()), text)
        _own_word.is_left = True


class _OwnWord:
    is_left = False


_own_word = _OwnWord()


def withdraw() -> None:
    """Of a process that was thought to stop, and goes on."""
    if _own_word.is_left:
        _torch.store_of_processes().set(_word_of(process_index()), "")
        _own_word.is_left = False


def describe_peers() -> str:
    try:
        store, here = _torch.store_of_processes(), process_index()
        others = [rank for rank in range(process_count()) if rank != here]
        store.set(_word_of(here), "")
        with suppress(RuntimeError):  # those that stop for the same reason are about to say so
            store.wait([_word_of(rank) for rank in others], _PATIENCE)
        words = {r: store.get(_word_of(r)).decode() for r in others if has(store, _word_of(r))}
        gone = [rank for rank in others if _is_gone(store, rank)]
    except RuntimeError:
        return "The store of the process group cannot be reached: the process that has it is gone."
    said = [f"Process {rank} stopped with {text}." for rank, text in words.items() if text]
    if gone:
        said.append(f"{_describe_ranks(gone, 'gone').capitalize()}.")
    silent = [rank for rank in others if rank not in words and rank not in gone]
    if silent:
        said.append(
            f"{name_processes(silent).capitalize()}: no failure so far, at work or waiting."
        )
    return " ".join(said) or "The others have failed here too."


def publish_host(store: Any) -> None:
    """Let others of this host see whether this process is gone."""
    if _published.get(store) is None:
        _published[store] = True
        here = json.dumps([socket.gethostname(), os.getpid()])
        store.set(f"{_PREFIX}/place/{process_index()}", here)


_published: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _is_gone(store: Any, rank: int) -> bool:
    """Whether a process of this host, which has published its place, runs no more."""
    key = f"{_PREFIX}/place/{rank}"
    if not has(store, key):
        return False
    host, pid = json.loads(store.get(key))
    if host != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return True
    except OSError:  # another user's, or no Linux
        return False
    return state in "ZX"


def _word_of(rank: int) -> str:
    return f"{_PREFIX}/stopped/{rank}"


def has(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:
        return False


def name_processes(ranks: Sequence[int]) -> str:
    """Name processes in a message.

    >>> name_processes([1]), name_processes([1, 2])
    ('process 1', 'processes 1, 2')
    """
    listed = ", ".join(map(str, ranks))
    return f"process {listed}" if len(ranks) == 1 else f"processes {listed}"


def _describe_ranks(ranks: Sequence[int], what: str) -> str:
    return f"{name_processes(ranks)} {'is' if len(ranks) == 1 else 'are'} {what}"
