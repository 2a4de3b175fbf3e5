"""Out of memory in a graph: the error is told where that was, and what its policy says to it."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

import torch
from torch import fx

from torchremat.graph.codegen import source_of
from torchremat.remat.compiled import Compiled
from torchremat.remat.policy_protocol import Failed

if TYPE_CHECKING:
    from torchremat.remat.program import Program

# the allocator of the CPU has no class of its own for it
_OF_THE_CPU = "DefaultCPUAllocator: can't allocate memory"


def note_if_out_of_memory(error: RuntimeError, compiled: Compiled) -> None:
    """Add a note to `error`, which `compiled` raised, if it is that memory ran out."""
    program: Program | None = compiled.module.meta.get("program")
    if program is None or not _is_out_of_memory(error):
        return
    phase = "backward" if "slice" in compiled.module.meta else "forward"
    try:
        note = program.policy.out_of_memory(program, Failed(phase, _node_of(error, compiled)))
    except Exception as trouble:  # the error that matters is the first
        note = f"torchremat: what was planned cannot be told: {trouble!r}"
    if note is not None:
        error.add_note(note)


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or _OF_THE_CPU in str(error)


def _node_of(error: RuntimeError, compiled: Compiled) -> fx.Node | None:
    """The node whose line of the compiled function `error` comes from, if it has lines."""
    lines = source_of(compiled.run).splitlines()
    for frame, number in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith("<torchremat") or number > len(lines):
            continue
        name = lines[number - 1].partition(" = ")[0].partition(",")[0].strip()
        nodes = compiled.module.graph.nodes
        return next((node for node in nodes if node.name == name), None)
    return None
