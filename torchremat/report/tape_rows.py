"""The rows of a report on a call that wrote a tape."""

from collections import Counter
from collections.abc import Mapping

import torch

from torchremat.remat.program.decisions import Outcome
from torchremat.remat.tape.tape import TapeRow, TapeSummary
from torchremat.remat.tracing.input_labels import InputLabel
from torchremat.remat.values.scope import op_base_name
from torchremat.report.report_rows import Row
from torchremat.tracing.modules.module_paths import below


def rows_of_tape(summary: TapeSummary, state: Mapping[int, InputLabel]) -> list[Row]:
    """A row for each value of a tape; `state`: as `report_of_programs` has it."""
    numbers: Counter[str] = Counter()
    inputs = [_input_row(row, state, numbers) for row in summary.rows if row.value is None]
    return inputs + [_value_row(row, numbers) for row in summary.rows if row.value is not None]


def _input_row(row: TapeRow, state: Mapping[int, InputLabel], numbers: Counter[str]) -> Row:
    label = state.get(row.storage_id)
    name = _add_number("input", numbers) if label is None else label.text
    is_parameter = label is not None and label.kind == "parameter"
    decision: Outcome = "parameter" if is_parameter else "input"
    reason = "a parameter" if is_parameter else "an argument, or a tensor that it closes over"
    module = name.rpartition(".")[0] if label is not None else ""
    return _row(row, name, "", module, decision, reason)


def _value_row(row: TapeRow, numbers: Counter[str]) -> Row:
    assert row.value is not None
    op, module = op_base_name(row.value.op), row.value.module
    name = row.names[-1] if row.names else _add_number(below(module, op.rstrip("_")), numbers)
    return _row(row, name, op, module, "saved" if row.is_saved else "recomputed", row.reason)


def _row(row: TapeRow, name: str, op: str, module: str, decision: Outcome, reason: str) -> Row:
    source = None if row.value is None else row.value.source
    shape: tuple[int, ...] = tuple(row.geometry.size)
    dtype: torch.dtype = row.geometry.dtype
    return Row(name, op, module, source, shape, dtype, row.nbytes, decision, reason, "tape")


def _add_number(name: str, numbers: Counter[str]) -> str:
    numbers[name] += 1
    return name if numbers[name] == 1 else f"{name}_{numbers[name] - 1}"
