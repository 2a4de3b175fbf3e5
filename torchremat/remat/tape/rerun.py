"""The backward pass of a tape: what is needed of it runs again, each operator once."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.source import Source
from torchremat.errors import EffectError, RecomputationError
from torchremat.remat.program.random_replay import replay_of
from torchremat.remat.tape.contents import (
    Blank,
    Content,
    Entry,
    Geometry,
    Read,
    copy_storage,
)
from torchremat.remat.tape.operator_facts import tensors_in
from torchremat.remat.tape.tape import Tape, TapedTensor
from torchremat.tracing.ambient_state import without_autocast


def unpack(packed: Any) -> Any:
    """The tensor that autograd saved."""
    if not isinstance(packed, TapedTensor):
        return packed
    tensor = packed.tensor
    if tensor is not None:
        if _torch.version_of(tensor) != packed.version:
            _refuse_changed(packed.content, tensor)
        return tensor
    if packed.content.is_saved:
        return packed.geometry.view_of(_read_held(packed.content))
    with packed.tape.lock:
        tensor = _rerun_of(packed.tape).take(packed)
    if packed.check is not None and not packed.check.is_of(tensor):
        _refuse_unseen(packed.content, tensor)
    return tensor


def _rerun_of(tape: Tape) -> "Rerun":
    """The replay of the backward pass that runs; one of its own outside of any."""
    number = _torch.backward_pass_id()
    replay = tape.reruns.get(number) if number >= 0 else None
    if replay is None:
        replay = Rerun(tape)
        if number >= 0:
            tape.reruns[number] = replay
            _torch.call_after_backward(lambda: tape.reruns.pop(number, None))
    return replay


class Rerun:
    """One run of a tape, piece by piece as the backward pass asks.

    A result is freed when no operator that is still to run reads it and autograd has taken it.
    What an operator reads that has run before is there, so that none runs twice.
    """

    def __init__(self, tape: Tape) -> None:
        self._tensors: dict[int, Tensor] = {}
        self._taken: set[int] = set()
        self._done: set[int] = set()
        self._is_stale = False
        """Whether autograd has freed something that it never took."""
        packed = [p for p in tape.list_packed() if not p.content.is_saved]
        self._references = [weakref.ref(p, self._make_note(id(p))) for p in packed]
        self._regions: dict[int, list[Geometry]] = {}
        """The parts of a content that autograd has, is to have or had: they may be saved anew."""
        for p in packed:
            self._regions.setdefault(id(p.content), []).append(p.geometry)
        self._in_same_memory: dict[int, list[int]] = {}
        """The older contents of the memory of a content, as far as autograd has parts of them."""
        self._overwritten: set[int] = set()
        """Contents of which only these parts are left."""
        self._count()

    def _make_note(self, number: int) -> Callable[[object], None]:
        myself = weakref.ref(self)

        def note(_: object) -> None:
            rerun = myself()
            if rerun is not None and number not in rerun._taken:
                rerun._is_stale = True

        return note

    def _count(self) -> None:
        """Count who is still to read each content: operators that are to run, and autograd.

        No reference is left to the operators, nor to what they read: it is freed with the last
        saved tensor that needs it.
        """
        self._is_stale = False
        packed = [p for ref in self._references if (p := ref()) is not None]
        wanted = [p.content for p in packed if id(p) not in self._taken]
        self._waiting: Counter[int] = Counter(map(id, wanted))
        self._readers: Counter[int] = Counter()
        for entry in self._find_missing(wanted):
            self._expect(entry)
        for number in [n for n in self._tensors if self._waiting[n] <= 0]:
            del self._tensors[number]

    def _expect(self, entry: Entry) -> None:
        for content in entry.reads:
            self._waiting[id(content)] += 1
            self._readers[id(content)] += 1

    def take(self, packed: TapedTensor) -> Tensor:
        if self._is_stale:
            self._count()
        content = packed.content
        if id(content) not in self._tensors:
            self._run_for(content)
        tensor = packed.geometry.view_of(self._tensors[id(content)])
        self._taken.add(id(packed))
        self._release(content)
        return tensor

    def _find_missing(self, contents: Iterable[Content]) -> list[Entry]:
        """The operators, in order, that compute those of `contents` that are not there."""
        entries: dict[int, Entry] = {}
        stack = [c for c in contents if id(c) not in self._tensors]
        while stack:
            entry = stack.pop().maker
            assert entry is not None, "what no operator makes is saved"
            if entry.index not in entries:
                entries[entry.index] = entry
                stack += [c for c in entry.reads if not c.is_saved and not self._is_whole(c)]
        return [entries[index] for index in sorted(entries)]

    def _is_whole(self, content: Content) -> bool:
        return id(content) in self._tensors and id(content) not in self._overwritten

    def _run_for(self, content: Content) -> None:
        order = self._find_missing([content])
        for entry in order:
            if entry.index in self._done:  # it was freed, and is needed again
                self._expect(entry)
        self._waiting[id(content)] += 1  # until it is taken
        with without_autocast(), torch.enable_grad(), _torch.below_autograd():
            for entry in order:
                if torch.is_grad_enabled() is not entry.is_grad_enabled:
                    torch.set_grad_enabled(entry.is_grad_enabled)
                self._run(entry)
        self._waiting[id(content)] -= 1

    def _run(self, entry: Entry) -> None:
        built = _Arguments(self, entry)
        args = [built.of(value) for value in entry.args]
        kwargs = {name: built.of(value) for name, value in entry.kwargs.items()}
        if entry.state is None:
            results = entry.op(*args, **kwargs)
        else:
            state, device = entry.state
            results = replay_of(entry.op)(state, entry.op, device, args, kwargs)
        found = tensors_in(results)
        self._done.add(entry.index)
        for number, made in entry.makes:
            self._put(made(), found[number])
        for given, written in entry.writes:
            self._put(written(), built.tensors[id(given)])
            if isinstance(given, Read) and not built.is_copied(given.content):
                self._note_same_memory(given.content, written())
        for content in entry.reads:
            self._readers[id(content)] -= 1
            self._release(content)

    def _put(self, content: Content | None, tensor: Tensor) -> None:
        if content is not None and not content.is_saved and self._waiting[id(content)] > 0:
            self._tensors[id(content)] = tensor
            self._overwritten.discard(id(content))

    def _release(self, content: Content) -> None:
        self._waiting[id(content)] -= 1
        if self._waiting[id(content)] <= 0:
            self._tensors.pop(id(content), None)

    def tensor_of(self, content: Content) -> Tensor:
        if content.is_saved:
            return _read_held(content)
        return self._tensors[id(content)]

    def is_needed_after(self, read: Read) -> bool:
        """Whether somebody else needs what the operator that reads `read` is to overwrite."""
        content = read.content
        if content.is_saved or self._readers[id(content)] > 1:
            return True
        older = self._in_same_memory.get(id(content), [])
        regions = [region for n in (id(content), *older) for region in self._regions.get(n, ())]
        return any(self._readers[number] for number in older) or any(
            not region.is_apart_from(read.geometry) for region in regions
        )

    def _note_same_memory(self, old: Content, new: Content | None) -> None:
        self._overwritten.add(id(old))
        older = [*self._in_same_memory.pop(id(old), ()), id(old)]
        older = [number for number in older if number in self._regions]
        if older and new is not None:
            self._in_same_memory[id(new)] = older


class _Arguments:
    """The arguments of one operator: it writes to copies of what others still need."""

    def __init__(self, replay: Rerun, entry: Entry) -> None:
        self._replay = replay
        self._copies: dict[int, Tensor] = {}
        self.tensors: dict[int, Tensor] = {}
        for given, _ in entry.writes:
            if isinstance(given, Read):
                content = given.content
                if id(content) not in self._copies and replay.is_needed_after(given):
                    self._copies[id(content)] = copy_storage(replay.tensor_of(content))

    def is_copied(self, content: Content) -> bool:
        return id(content) in self._copies

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind is Read:
            content, geometry = value
            base = self._copies.get(id(content))
            if base is None:
                base = self._replay.tensor_of(content)
            tensor = self.tensors[id(value)] = geometry.view_of(base)
            return tensor
        if kind is Blank:
            tensor = self.tensors[id(value)] = value.geometry.empty(value.device)
            return tensor if value.fill is None else tensor.fill_(value.fill)
        if kind is list:
            return [self.of(item) for item in value]
        return value


def _read_held(content: Content) -> Tensor:
    tensor = content.held
    if tensor is None or content.is_lost:
        raise EffectError(
            f"a value {_describe(content)}, which the backward pass needs, was overwritten by an "
            "autograd.Function. Let the function write to a copy (x.clone())."
        )
    if content.version is not None and _torch.version_of(tensor) != content.version:
        _refuse_changed(content, tensor)
    return tensor


def _refuse_changed(content: Content, tensor: Tensor) -> None:
    raise EffectError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of shape {tuple(tensor.shape)} {_describe(content)} was written to "
        "after the checkpoint that saved it had used it. Write to a copy (x.clone()), or after "
        "the backward pass."
    )


def _refuse_unseen(content: Content, tensor: Tensor) -> None:
    raise RecomputationError(
        f"a value {_describe(content)}, of shape {tuple(tensor.shape)}, was not the same when it "
        "was recomputed. Something wrote to it, or to what it is made of, where PyTorch does not "
        "see it: through .numpy(), or in a kernel that is called by address. Or its operator does "
        "not give the same value twice. Let a policy save it (save_ops, save_modules, "
        "checkpoint_name), or write with operators of PyTorch."
    )


def _describe(content: Content) -> str:
    source: Source | None = None if content.value is None else content.value.source
    if content.value is None:
        return "that is an input"
    return f"that {content.value.op} computed" + (f" at {source}" if source else "")
