"""Branches of which one way does nothing but raise, found in the code of the function that asks.

    if not valid.all():             the truth of `valid.all()` is needed to be True
        raise ValueError(...)
    assert not x.isnan().any()      that of `x.isnan().any()` to be False

    if not valid.all():             True too: who asked for `valid` is told what does not hold
        return valid

    return bool(valid.all())        as the caller needs it, which tests what is returned

A trace goes the other way. The code is that which Python runs, so that no source is needed.
"""

import builtins
import dis
import functools
import os
import sys
from bisect import bisect_right
from collections.abc import Sequence
from types import CodeType, FrameType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
# PyTorch calls these of modes and of subclasses between the user's line and the question
_BETWEEN = ("__torch_function__", "__torch_dispatch__", "handle_torch_function")


def find_needed_truth() -> bool | None:
    """The truth value with which the function that asks for it now goes on, where the other raises.

    `None` if both ways do something else than raise, or both raise.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_between(frame.f_code):
        frame = frame.f_back
    is_negated, is_returned = False, False
    while frame is not None:
        needed = _find_needed_in(frame.f_code, frame.f_lasti)
        if needed is not None:
            return needed != is_negated
        returned = _find_returned_in(frame.f_code, frame.f_lasti, is_returned)
        if returned is None or frame.f_globals.get("bool", bool) is not builtins.bool:
            return None
        is_negated ^= not returned
        frame, is_returned = frame.f_back, True
    return None


def _is_between(code: CodeType) -> bool:
    return code.co_name in _BETWEEN or code.co_filename.startswith(_PACKAGE)


# Python 3.11 has PRECALL, 3.13 TO_BOOL, 3.14 NOT_TAKEN
_WITHOUT_EFFECT = frozenset(("NOP", "EXTENDED_ARG", "CACHE", "PRECALL", "TO_BOOL", "NOT_TAKEN"))
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_ALWAYS_JUMP = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
_LEAVES = ("RETURN_", "YIELD_", "SEND")


# An instruction is met at each call of a function that is mapped; a large model has some hundreds.
@functools.lru_cache(maxsize=1024)
def _find_needed_in(code: CodeType, offset: int) -> bool | None:
    instructions = list(dis.get_instructions(code))
    places = {instruction.offset: i for i, instruction in enumerate(instructions)}
    at = bisect_right(list(places), offset) - 1  # Python 3.11 gives the cache after a call
    negated = instructions[at].opname == "UNARY_NOT"
    jumps_if = _jumps_if(instructions[at])
    while jumps_if is None:
        at += 1
        name = instructions[at].opname  # the last one returns or raises
        negated ^= name == "UNARY_NOT"
        jumps_if = _jumps_if(instructions[at])
        if jumps_if is None and name != "UNARY_NOT" and name not in _WITHOUT_EFFECT:
            return None
    jump = instructions[at]
    target, after = places[jump.argval], at + 1
    target_raises = _always_raises(instructions, places, target)
    if target_raises != _always_raises(instructions, places, after):
        return (jumps_if != target_raises) != negated
    fails = after if jumps_if != negated else target
    return True if _returns_condition(instructions[:at], instructions[fails:]) else None


@functools.lru_cache(maxsize=1024)
def _find_returned_in(code: CodeType, offset: int, is_truth: bool) -> bool | None:
    """The value that is returned where the question at `offset` is answered True.

    `None` if something else than it, or its negation, is returned. The instruction there asks for
    the truth, or calls a function that has returned it as `is_truth` says.

    >>> code = compile("lambda x: not x", "", "eval").co_consts[0]
    >>> at = next(i.offset for i in dis.get_instructions(code) if i.opname == "UNARY_NOT")
    >>> _find_returned_in(code, at, False)
    False
    """
    instructions = list(dis.get_instructions(code))
    at = bisect_right([i.offset for i in instructions], offset) - 1
    # Python 3.11 runs a call of a class such as `bool` at the PRECALL, once it has seen some
    at += instructions[at].opname == "PRECALL"
    name = instructions[at].opname
    asks = name in ("UNARY_NOT", "TO_BOOL") or _calls_bool(instructions, at)
    if not asks and not (is_truth and name.startswith("CALL")):
        return None
    value = name != "UNARY_NOT"
    for instruction in instructions[at + 1 :]:
        if instruction.opname == "RETURN_VALUE":
            return value
        if instruction.opname == "UNARY_NOT":
            value = not value
        elif instruction.opname not in _WITHOUT_EFFECT:
            return None
    return None


def _calls_bool(instructions: Sequence[dis.Instruction], at: int) -> bool:
    """Whether the instruction there calls the global `bool` with one argument."""
    call = instructions[at]
    if call.opname != "CALL" or call.arg != 1:
        return False
    pushed = 0
    for instruction in reversed(instructions[:at]):
        if instruction.opname == "PRECALL":
            continue
        if instruction.opcode in _JUMPS:
            return False
        pushed += dis.stack_effect(instruction.opcode, instruction.arg)
        if pushed >= 3:  # the function, a null, and the argument
            return (instruction.opname, instruction.argval) == ("LOAD_GLOBAL", "bool")
    return False


def _returns_condition(before: Sequence[dis.Instruction], way: Sequence[dis.Instruction]) -> bool:
    """Whether the code before asks for `x.all()`, of a variable `x`, and the `way` returns `x`."""
    made = [i for i in before if i.opname not in _WITHOUT_EFFECT and i.opname != "UNARY_NOT"]
    names = [i.opname for i in (*made[-3:], *way[:2])]
    return (
        len(names) == 5
        and names[0].startswith("LOAD_FAST")  # LOAD_FAST_BORROW in Python 3.14
        and names[1] in ("LOAD_METHOD", "LOAD_ATTR")
        and made[-2].argval == "all"
        and names[2] == "CALL"
        and names[3] == names[0]
        and names[4] == "RETURN_VALUE"
        and way[0].argval == made[-3].argval
    )


def _jumps_if(instruction: dis.Instruction) -> bool | None:
    """The truth value for which `instruction` jumps, if it tests one."""
    name = instruction.opname  # POP_JUMP_IF_TRUE, or POP_JUMP_FORWARD_IF_TRUE in Python 3.11
    if not name.startswith("POP_JUMP_") or not name.endswith(("_IF_TRUE", "_IF_FALSE")):
        return None
    return name.endswith("_IF_TRUE")


def _always_raises(
    instructions: Sequence[dis.Instruction], places: dict[int, int], start: int
) -> bool:
    """Whether each way on from `start` ends in an error that the function raises."""
    pending, seen = [start], set()
    while pending:
        at = pending.pop()
        if at in seen:
            continue
        seen.add(at)
        instruction = instructions[at]
        if instruction.opname == "RAISE_VARARGS":
            continue
        if instruction.opname.startswith(_LEAVES) or at + 1 == len(instructions):
            return False
        if instruction.opcode in _JUMPS:
            pending.append(places[instruction.argval])
        if not instruction.opname.startswith(_ALWAYS_JUMP):
            pending.append(at + 1)
    return any(instructions[at].opname == "RAISE_VARARGS" for at in seen)
