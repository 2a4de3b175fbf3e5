"""Plans as JSON: what a file must say, checked before anything of it is used.

Each error names the file, the line and the value: `plan.json:31: order.saved[2] is 99, ...`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import pairwise
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from torchremat.autodiff.tiles.tile_joint import Tiling
from torchremat.errors import ArgumentValueError, PlanError
from torchremat.planning.costs.device_rates import Rates
from torchremat.planning.step.fingerprint import fingerprint_of

FORMAT = "torchremat plan"

# The version of the files, which changes when older ones cannot be read: they are refused.
VERSION = 1

DECISIONS = ("saved", "recomputed", "offloaded", "tiled")

Where = tuple[str | int, ...]
"""The keys and positions that lead to a value."""


def parse_plan(text: str, file: str) -> dict[str, Any]:
    """The content of a plan that was written as JSON.

    Raises `PlanError` for what is not a plan, is of another version, or says what no plan can.

    >>> parse_plan('{"format": "torchremat plan", "version": 9}', "plan.json")
    Traceback (most recent call last):
    torchremat.errors.PlanError: plan.json is a plan of version 9, and this torchremat reads ...
    """
    try:
        content = json.loads(
            text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeats
        )
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{file} is not a plan: it is not JSON, or was cut off ({error}). Save it again"
        ) from error
    except (RecursionError, ValueError) as error:  # nested too deeply; no number, or a huge one
        raise PlanError(f"{file} is not a plan: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PlanError(f"{file} is not a plan of torchremat, though it is JSON")
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        raise PlanError(
            f"{file} is a plan of version {version!r}, and this torchremat reads version "
            f"{VERSION}. Make it again with tr.plan"
        )
    _Check(content, text, file).run()
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a figure of a plan")


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is given twice")
    return found


_COUNTS = ("peak_bytes", "saved_bytes", "recompute_flops", "offloaded_bytes", "reserved_bytes",
           "updates_in_backward", "state_on_host_bytes")  # fmt: skip
_SECONDS = ("recompute_seconds", "lower_bound_seconds", "link_seconds")
_OF_BASELINE = ("peak_bytes", "saved_bytes", "seconds", "flops", "reserved_bytes")
_OF_ORDER = ("saved", "forward", "backward", "offloaded")
_LATER = ("offloaded_bytes", "link_seconds", "reserved_bytes", "gap_reason", "updates_in_backward",
          "state_on_host_bytes")  # fmt: skip
"""They are not in the first files of this version."""
# of 64 bits, as sizes are in PyTorch
_MOST = 2**63 - 1


class _Check:
    def __init__(self, content: dict[str, Any], text: str, file: str) -> None:
        self.content, self.text, self.file = content, text, file

    def run(self) -> None:
        for name in ("budget", *_COUNTS):
            self._check(_is_count, "bytes or operations: an integer from 0", name)
        for name in _SECONDS:
            self._check(_is_seconds, "seconds: a number from 0", name)
        for name in _OF_BASELINE:
            kind = _is_seconds if name == "seconds" else _is_count
            self._check(kind, "a number from 0", "baseline", name)
        for name in ("device", "fingerprint", "gap_reason"):
            self._check(_is_text, "text", name)
        self._refuse_others(("baseline",), _OF_BASELINE)
        self._check_tiling()
        self._check_rates()
        self._check_lists()
        self._refuse_others(("order",), _OF_ORDER)
        self._check_decisions()
        if self.content["fingerprint"] != fingerprint_of(self.content["graph"]):
            raise PlanError(f"{self.file} is a plan that was changed: its fingerprint does not fit")
        self._check_order()
        self._check_figures()

    def _refuse_others(self, where: tuple[str], known: Sequence[str]) -> None:
        for name in self.content[where[0]]:
            if name not in known:
                value = self.content[where[0]][name]
                self._refuse((*where, name), value, f"there are only {', '.join(known)}")

    def _check_tiling(self) -> None:
        if self.content.get("tiling") is None:
            return
        self._check(_is_count, "a number of tiles", "tiling", "num_tiles")
        if "num_segments" in self.content["tiling"]:  # which the first files did not have
            self._check(_is_count, "a number of segments", "tiling", "num_segments")
        if not any(self.content["tiling"].get(name) for name in ("num_tiles", "num_segments")):
            self._refuse(("tiling", "num_tiles"), 0, "there are no segments of loops either")
        self._check(lambda value: isinstance(value, bool), "true or false", "tiling", "again")
        self._refuse_others(("tiling",), [field.name for field in fields(Tiling)])

    def _check_rates(self) -> None:
        rates = self.content.get("rates")
        if rates is None:
            return
        self._check(lambda value: isinstance(value, dict), "rates with names", "rates")
        self._check(_is_text, "text", "rates", "name")
        self._refuse_others(("rates",), [field.name for field in fields(Rates)])
        try:
            Rates(**rates)
        except (TypeError, ArgumentValueError) as error:
            self._refuse(("rates",), rates, str(error))

    def _check_lists(self) -> None:
        self._check(_is_list_of(_is_text), "a list of lines of text", "graph")
        for name in _OF_ORDER:
            self._check(_is_list_of(_is_count), "a list of positions", "order", name)

    def _check_decisions(self) -> None:
        self._check(lambda value: isinstance(value, dict), "names with decisions", "decisions")
        for name in self.content["decisions"]:
            self._check(lambda value: value in DECISIONS, f"one of {DECISIONS}", "decisions", name)

    def _check_order(self) -> None:
        graph, order = self.content["graph"], self.content["order"]
        for name, positions in order.items():
            for i, position in enumerate(positions):
                where = ("order", name, i)
                if position >= len(graph):
                    self._refuse(where, position, f"there are {len(graph)} nodes")
                if name in ("forward", "backward") and not _is_operator(graph[position]):
                    self._refuse(where, position, f"node {position} runs nothing")
        for name in ("saved", "offloaded"):
            positions = order.get(name, ())
            for i, pair in enumerate(pairwise(positions), 1):
                if pair[1] <= pair[0]:
                    self._refuse(("order", name, i), pair[1], "positions rise, each once")
        both = set(order["saved"]).intersection(order.get("offloaded", ()))
        if both:
            i = order["saved"].index(min(both))
            self._refuse(("order", "saved", i), min(both), "it is offloaded too")

    def _check_figures(self) -> None:
        content = self.content
        peak, budget = content["peak_bytes"], content["budget"]
        if peak > budget:
            self._refuse(("peak_bytes",), peak, f"the budget is {budget}")
        added, bound = content["recompute_seconds"], content["lower_bound_seconds"]
        if bound > added:
            self._refuse(("lower_bound_seconds",), bound, f"the plan adds {added}")
        counts = [list(content["decisions"].values()).count(what) for what in DECISIONS]
        away = content["order"].get("offloaded", ())
        for name, count, positions in (
            ("saved", counts[0], content["order"]["saved"]),
            ("offloaded", counts[2], away),
        ):
            if count > len(positions):
                reason = f"{count} decisions say {name}"
                self._refuse(("order", name), len(positions), reason, of="the length of ")

    def _check(self, holds: Callable[[Any], bool], kind: str, *where: str) -> None:
        value: Any = self.content
        for i, key in enumerate(where):
            if not isinstance(value, dict):
                self._refuse(where[:i], value, "it is to be an object with names")
            if key not in value:
                if key in _LATER or where == ("order", "offloaded"):
                    return
                raise PlanError(f"{self.file} is a plan that lacks something: {'.'.join(where)}")
            value = value[key]
        if not holds(value):
            self._refuse(where, value, f"it is to be {kind}")

    def _refuse(self, where: Where, value: Any, reason: str, of: str = "") -> None:
        name = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in where).lstrip(".")
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        line = _line_of(self.text, where)
        raise PlanError(
            f"{self.file}:{line}: {of}{name} is {shown}, but {reason}. The file was changed: make "
            "the plan again with tr.plan"
        )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MOST  # false of nan and infinity


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(holds, value))


def _is_operator(line: str) -> bool:
    return not line.startswith(("input ", "constant ", "outputs "))


def _line_of(text: str, where: Sequence[str | int]) -> int:
    """The line on which the value at `where` begins, in text that is JSON."""
    decoder = json.JSONDecoder()
    at = _skip_space(text, 0)
    for key in where:
        begin, at = text[at], _skip_space(text, at + 1)
        position = 0
        while True:
            found: str | int = position
            if begin == "{":
                found, at = scanstring(text, at + 1)
                at = _skip_space(text, _skip_space(text, at) + 1)  # beyond the colon
            if found == key:
                break
            at = _skip_space(text, decoder.raw_decode(text, at)[1])
            at = _skip_space(text, at + 1)  # beyond the comma
            position += 1
    return text.count("\n", 0, at) + 1


def _skip_space(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at
