"""The recorder: it records the operators of one call as they run, and saves what must be saved.

It is a dispatch mode below autograd. There each operator is what a kernel computes: autocast has
cast, and composite operators have become others. So a replay runs the same kernels. Above autograd
a replay would do all of this again, in surroundings that may have changed.

The recorder refers to storages weakly: one that Python and autograd drop is freed at once. A value
that the policy lets be saved is saved once it is needed. Autograd may need it, or an operator that
reads it and whose own result will be recomputed.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from torchremat import _torch
from torchremat.autodiff.replay_rules import drops_nothing
from torchremat.core.accelerators import is_captured
from torchremat.remat.program.random_replay import generator_state
from torchremat.remat.tape.checksum import Checksum, WholeValue
from torchremat.remat.tape.contents import (
    Blank,
    Content,
    Entry,
    Geometry,
    Read,
    Slot,
    copy_storage,
    demote,
)
from torchremat.remat.tape.keeper import Keeper
from torchremat.remat.tape.limited_calls import TapeJob
from torchremat.remat.tape.operator_facts import (
    NUMBERS,
    REPLAYABLE,
    OperatorFacts,
    default_device,
    facts_of,
    fills_its_storage,
    is_plain,
    tensors_in,
    updates_statistics,
)
from torchremat.remat.tape.tape import Tape
from torchremat.remat.tape.tape_decisions import TapeDecision, TapeDecisions


class _Active(threading.local):
    recorder: "Recorder | None" = None


_active = _Active()


def is_taping() -> bool:
    """Whether this thread writes a tape, whose policy decides on all that runs."""
    return _active.recorder is not None


class Recorder(_torch.TorchDispatchMode):
    """Records `tape`. Enter `recording` around the call."""

    supports_higher_order_operators = True

    def __init__(
        self,
        decisions: TapeDecisions,
        check: type[Checksum | WholeValue] | None,
        job: TapeJob | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self.tape.check = check
        self._is_aside = False
        self._decisions = decisions
        self._slots: dict[int, Slot] = {}
        self.keeper = None if job is None else Keeper(job.begin_call(), decisions.policy, self.tape)
        self._unseen = 0
        """How many functions of the user are running whose kernels nobody may see."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        _active.recorder = self
        try:
            with self:
                yield
        finally:
            _active.recorder = None
            self._slots.clear()
            if self.keeper is not None:
                self.keeper.close()
            self.tape.finish()

    # --- operators -------------------------------------------------------------------------------

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_aside:
            return op(*args, **kwargs)
        facts = facts_of(op)
        if facts.is_view:
            return op(*args, **kwargs)
        if facts.is_pure and not self._unseen:
            results = op(*args, **kwargs)
            if type(results) is not Tensor or not self._record_pure(op, args, kwargs, results):
                _Call(self, facts, op, args, kwargs).finish(results, None)
            self._check_bytes()
            return results
        call = _Call(self, facts, op, args, kwargs)
        state = call.generator_state()
        call.copy_before_writes()
        results = op(*args, **kwargs)
        call.finish(results, state)
        self._check_bytes()
        return results

    def _check_bytes(self) -> None:
        if self.keeper is not None and self.keeper.is_above():
            with self._aside():
                self.keeper.relieve()

    def settle(self, result: object) -> None:
        """Let a policy that limits bytes look at the whole call, which has returned `result`."""
        if self.keeper is not None:
            with self._aside():
                self.keeper.settle(result)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False

    def _record_pure(self, op: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> bool:
        """Record what most calls are: tensors and numbers in, one new tensor out.

        Returns whether it is one; what `_Call` does takes twice the time.
        """
        reads: list[tuple[Content, Tensor]] = []
        given: list[Any] = []
        kind: list[Any] = []
        for value in args:
            if isinstance(value, Tensor):
                if not is_plain(value):
                    return False
                content = self.slot_of(value).content
                if content.is_undefined:
                    return False
                geometry = Geometry.of(value)
                reads.append((content, value))
                given.append(Read(content, geometry))
                kind.append(geometry)
            elif type(value) in NUMBERS:
                given.append(value)
                kind += (type(value), value)
            else:
                return False
        if not reads or kwargs or not is_plain(result) or self.knows(result):
            return False
        entry = Entry(self.tape.next_index(), op, given, kwargs)
        storage = result.untyped_storage()
        content = Content(entry, Geometry.of(result), storage.nbytes())
        entry.makes.append((0, weakref.ref(content)))
        self._slots[id(storage)] = Slot(storage, content)
        decision = self._decisions.decide(op, args, kwargs, [result], tuple(kind))[0]
        content.value, content.is_saved = decision.value, decision.is_saved
        content.reason = decision.reason
        entry.reads = tuple([read for read, _ in reads])
        if self.keeper is not None:
            self.keeper.note_made(content, decision, result)
        if not content.is_saved:
            self.tape.hold_reads(reads)
        return True

    def slot_of(self, tensor: Tensor) -> Slot:
        """The slot of its storage; a storage that is met for the first time is an input."""
        storage = tensor.untyped_storage()
        slot = self._slots.get(id(storage))
        if slot is None or slot.storage() is not storage:
            content = Content(None, Geometry.of(tensor), storage.nbytes())
            content.reason, content.input_id = "an input", id(storage)
            slot = self._slots[id(storage)] = Slot(storage, content)
            if self.keeper is not None:
                self.keeper.note_input(content, tensor)
        return slot

    def knows(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        slot = self._slots.get(id(storage))
        return slot is not None and slot.storage() is storage

    def add(self, tensor: Tensor, content: Content) -> None:
        storage = tensor.untyped_storage()
        self._slots[id(storage)] = Slot(storage, content)

    # --- what autograd saves ---------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        if not is_plain(tensor):
            return tensor
        content = self.slot_of(tensor).content
        content.is_packed = True
        if content.is_undefined and not content.is_saved:
            _save_undefined(content)
        with self._aside():
            return self.tape.pack(content, tensor)

    # --- names, functions ------------------------------------------------------------------------

    def name(self, tensor: Tensor, name: str) -> Tensor:
        """Decide anew on the value of `tensor`, now that it has this name."""
        if is_plain(tensor) and self.knows(tensor):
            content = self.slot_of(tensor).content
            if content.value is not None and not self._unseen:
                content.names = (*content.names, name)
                if self.keeper is None:  # a budget decides on values whatever their names are
                    self._decide_anew(content, tensor)
        return tensor

    def _decide_anew(self, content: Content, tensor: Tensor) -> None:
        assert content.value is not None
        decision = self._decisions.decide_named(content.value, content.names)
        if decision.is_saved and not content.is_saved:
            content.is_saved, content.reason = True, decision.reason
            if content.is_read or content.is_packed:
                self.tape.hold(content, tensor)
        elif content.is_saved and not decision.is_saved and demote(content):
            content.reason = decision.reason
            self.tape.drop(content)

    def call_function(self, cls: type, args: Any, apply: Callable[..., Any]) -> Any:
        """Call an `autograd.Function`; the values that one of the user's makes are saved."""
        if cls is CheckpointFunction:
            function, _, *inputs = args
            return function(*inputs)
        if not _torch.is_function_of_user(cls):
            return apply(*args)
        before = [(t, _torch.version_of(t)) for t in tensors_in(args) if is_plain(t)]
        self._unseen += 1
        try:
            return apply(*args)
        finally:
            self._unseen -= 1
            for tensor, version in before:
                if _torch.version_of(tensor) != version:
                    self._note_unseen_write(tensor)

    @property
    def is_unseen(self) -> bool:
        return self._unseen > 0

    def _note_unseen_write(self, tensor: Tensor) -> None:
        slot = self.slot_of(tensor)
        if slot.content.held is not None:
            slot.content.held, slot.content.is_lost = None, True
        content = Content(None, Geometry.of(tensor), slot.content.nbytes)
        content.reason = _UNSEEN
        slot.content = content

    def decide(self, call: "_Call", results: list[Tensor]) -> list[TapeDecision]:
        return self._decisions.decide(call.op, call.args, call.kwargs, results)


_UNSEEN = "a function with a derivative of its own makes it, which is not run again"
_UNDEFINED = "memory that no operator has written, so that something else may have"
_NO_STATE = "it draws random numbers, which a replay would draw anew"


def _save_undefined(content: Content) -> None:
    content.is_saved, content.reason = True, _UNDEFINED


class _Call:
    """One call of an operator, while it runs."""

    def __init__(
        self, recorder: Recorder, facts: OperatorFacts, op: Any, args: Any, kwargs: dict[str, Any]
    ) -> None:
        self.recorder = recorder
        self.facts = facts
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.is_replayable = facts.is_known and not recorder.is_unseen
        self._updates_statistics = updates_statistics(facts, args, kwargs)
        self._reads: list[tuple[Content, Tensor]] = []
        self._writes: list[tuple[Slot, Read | Blank, Tensor]] = []
        given = [self._note(value, i) for i, value in enumerate(args)]
        named = {name: self._note(value, name) for name, value in kwargs.items()}
        self._entry = Entry(recorder.tape.next_index(), op, given, named)

    def _note(self, value: Any, place: int | str) -> Any:
        if isinstance(value, Tensor):
            return self._note_tensor(value, place)
        if isinstance(value, list | tuple):
            return [self._note(item, place) for item in value]
        if not isinstance(value, REPLAYABLE):
            self.is_replayable = False
        return value

    def _note_tensor(self, tensor: Tensor, place: int | str) -> Any:
        facts = self.facts
        if not is_plain(tensor):
            self.is_replayable = False
            return None
        is_written = place in facts.written
        if facts.is_like and not is_written:
            return Blank(Geometry.of(tensor), tensor.device)
        slot = self.recorder.slot_of(tensor)
        content = slot.content
        geometry = Geometry.of(tensor)
        if self._updates_statistics and place in facts.statistics:
            given: Read | Blank = Blank(geometry, tensor.device, 1.0)
            self._writes.append((slot, given, tensor))
            return given
        if place in facts.overwritten and fills_its_storage(tensor):
            given = Blank(geometry, tensor.device)
        else:
            given = Read(content, geometry)
            if content.is_undefined and not is_written and tensor.numel():
                _save_undefined(content)
            self._reads.append((content, tensor))
        if is_written:
            self._writes.append((slot, given, tensor))
        return given

    def generator_state(self) -> tuple[Tensor, torch.device] | None:
        """The state that random numbers are drawn from, if they can be drawn again from it."""
        if not self.facts.is_random or drops_nothing(self.op, self.args, self.kwargs):
            return None
        if self.facts.replayed_by is None or not self.is_replayable or is_captured():
            self.is_replayable = False
            return None
        device = default_device(self.args, self.kwargs)
        return generator_state(self.kwargs.get("generator"), device), device

    def copy_before_writes(self) -> None:
        """Copy what has to be read again, and is about to be overwritten."""
        reads_old = self.facts.makes_more or len(self._writes) > 1
        for slot, given, tensor in self._writes:
            content = slot.content
            if reads_old and content.is_saved and isinstance(given, Read):
                self.recorder.tape.hold(content, tensor)
            if content.held is not None:
                content.held, content.storage = copy_storage(tensor), None
                content.reason = "a copy, made before the function writes to it"

    def finish(self, results: Any, state: tuple[Tensor, torch.device] | None) -> None:
        """Write the call down, now that it has run."""
        recorder, entry = self.recorder, self._entry
        found = tensors_in(results)
        made: list[tuple[Tensor, Content]] = []
        for i, tensor in enumerate(found):
            if is_plain(tensor) and not recorder.knows(tensor):
                content = Content(entry, Geometry.of(tensor), tensor.untyped_storage().nbytes())
                content.is_undefined = self.facts.is_uninitialised
                entry.makes.append((i, weakref.ref(content)))
                made.append((tensor, content))
                recorder.add(tensor, content)
        if not made and not self._writes:
            return
        self._fix_places(made)
        written = [self._content_after(*write) for write in self._writes]
        decisions = self._choose(found, made, written, state)
        for (slot, given, _), (_, content) in zip(self._writes, written, strict=True):
            slot.content = content
            entry.writes.append((given, weakref.ref(content)))
        if not self.is_replayable:
            for _, content in (*made, *written):
                content.maker = None
        entry.reads = tuple(content for content, _ in self._reads)
        if recorder.keeper is not None:
            for (tensor, content), decision in zip((*made, *written), decisions, strict=True):
                recorder.keeper.note_made(content, decision, tensor)
        if self.is_replayable and not all(content.is_saved for _, content in (*made, *written)):
            recorder.tape.hold_reads(self._reads)

    def _fix_places(self, made: list[tuple[Tensor, Content]]) -> None:
        """Say where a tensor is made, which else depends on the surroundings of the replay."""
        if self._reads or not made:
            return
        like = made[0][0]
        for name, value in (("dtype", like.dtype), ("device", like.device)):
            if name in self.facts.options:
                self._entry.kwargs[name] = value

    def _content_after(
        self, slot: Slot, given: Read | Blank, tensor: Tensor
    ) -> tuple[Tensor, Content]:
        old = slot.content
        content = Content(self._entry, Geometry.of(tensor), tensor.untyped_storage().nbytes())
        content.is_undefined = self.facts.is_uninitialised or (
            old.is_undefined and not fills_its_storage(tensor)
        )
        # nobody reads the state before, which may be saved: this one may be saved instead
        content.is_saved = isinstance(given, Read) and old.is_saved and old.held is None
        content.inherits = content.is_saved
        content.reason = old.reason
        if isinstance(given, Blank) and given.fill is not None:
            content.is_saved, content.reason, content.maker = True, "an input", None
            content.inherits = True
        return tensor, content

    def _choose(
        self,
        found: list[Tensor],
        made: list[tuple[Tensor, Content]],
        written: list[tuple[Tensor, Content]],
        state: tuple[Tensor, torch.device] | None,
    ) -> list[TapeDecision]:
        asked = found or [tensor for tensor, _ in written]
        decisions = self.recorder.decide(self, asked)
        forced = self._reason_to_save(state, made, written)
        numbers = {id(tensor): i for i, tensor in enumerate(asked)}
        chosen = []
        for tensor, content in (*made, *written):
            decision = decisions[numbers.get(id(tensor), 0)]
            content.value = decision.value
            if forced is not None:
                decision = replace(decision, is_saved=True, reason=forced)
            if not content.inherits:
                content.is_saved, content.reason = decision.is_saved, decision.reason
            chosen.append(decision)
        return chosen

    def _reason_to_save(
        self,
        state: tuple[Tensor, torch.device] | None,
        made: list[tuple[Tensor, Content]],
        written: list[tuple[Tensor, Content]],
    ) -> str | None:
        if not self.is_replayable:
            return _NO_STATE if self.facts.is_random else _UNSEEN
        if state is None:
            return None
        if sum(content.nbytes for _, content in (*made, *written)) <= state[0].nbytes:
            return "it draws random numbers, which take no more bytes than the generator's state"
        self._entry.state = state
        self._entry.op = self.facts.replayed_by
        self._entry.kwargs.pop("generator", None)
        return None
