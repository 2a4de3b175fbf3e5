"""Descriptions of residuals, and the log lines that list what a checkpoint saves."""

import logging
from collections.abc import Callable, Sequence

from torch import fx

from torchremat.core.avals import Aval
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.tracing.input_labels import InputLabel
from torchremat.remat.values.scope import Scope, ScopedValue
from torchremat.remat.values.value_labels import ValueLabel, ValueLabels

log = logging.getLogger("torchremat")


# --- descriptions --------------------------------------------------------------------------------


def describe_input(label: InputLabel) -> str:
    """The source of an input as text. A module's buffers are tensors that it closes over.

    >>> describe_input(InputLabel("argument", "x[0]"))
    'from the argument x[0]'
    >>> describe_input(InputLabel("buffer", "norm.running_mean"))
    'from the closed-over norm.running_mean'
    """
    return f"from the {'closed-over' if label.kind == 'buffer' else label.kind} {label.text}"


def describe_value(value: ScopedValue, label: ValueLabel, *, offloaded_to: str = "") -> str:
    what = f"jitted function {value.jitted_name!r}" if value.jitted_name else value.op
    text = f"named {label.name!r}" if label.is_given else f"output of {what}"
    text += f" from {label.source}" if label.source else ""
    return f"{text} (offloaded to {offloaded_to})" if offloaded_to else text


# --- the log -------------------------------------------------------------------------------------


def log_residuals(
    program: FunctionProgram, name: str, labels: Callable[[], Sequence[str]], *, loudly: bool
) -> None:
    """Log what a differentiated checkpoint saves, at WARNING if `loudly`, else at DEBUG.

    `name` is the name of its function. `labels` returns the names of the inputs of `program`
    (`argument x`); it is called only if there is a log.
    """
    level = logging.WARNING if loudly else logging.DEBUG
    if not log.isEnabledFor(level) or not program.region.wrt:
        return
    input_names = labels()
    inputs = [
        f"{_aval_of(program.root_joint.inputs[i])} from the {input_names[i]}"
        for i in program.saved_inputs
    ]
    scope = Scope.of_program(program, program.module_prefix)
    names = ValueLabels.of(scope)
    values = []
    for i, node in enumerate(program.residuals):
        value = scope.value_of(node)
        place = program.decisions.by_value[node].place if i in program.offloaded else ""
        if value.is_input:  # the function writes to it, so that a copy is saved
            text = f"a copy of the {input_names[scope.inputs.index(value.node)]}"
        else:
            text = describe_value(value, names.label_of(value), offloaded_to=place)
        values.append(f"{_aval_of(node)} {text}")
    text = f"remat-decorated function {name} saving "
    parts = []
    if inputs:
        parts.append("inputs with shapes:" + _indent_lines(inputs))
    if values:
        parts.append("these intermediates:" + _indent_lines(values))
    log.log(level, "%s%s", text, "\nand saving ".join(parts) or "nothing")


def _aval_of(node: fx.Node) -> Aval:
    return Aval.of(node.meta["val"])


def _indent_lines(lines: list[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)
