"""Imports the files of the room, which go on without the private parts that PyTorch lacks."""

from pathlib import Path

from .missing import supply_missing

_ROOM = Path(__file__).parents[1]

MISSING_PARTS = supply_missing(
    __package__.rpartition(".")[0],
    sorted(path.stem for path in _ROOM.glob("*.py") if path.stem != "__init__"),
)
"""The private names that this PyTorch lacks, of those that are needed at import."""
