"""Descriptions of residuals, and the log lines that list what a checkpoint saves."""

import logging
from collections.abc import Callable
from typing import Any

from torch import fx

from torchremat import config
from torchremat.core.avals import Aval
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.tracing.calls import Call
from torchremat.remat.tracing.function_trace import describe_fun
from torchremat.remat.tracing.input_labels import BoundCall, InputLabel
from torchremat.remat.tracing.trace_cache import Trace
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
    program: FunctionProgram,
    fun: Callable[..., Any],
    trace: Trace,
    args: Any,
    kwargs: Any,
    call: Call,
) -> None:
    """Log what a differentiated checkpoint of `fun` saves.

    At WARNING if `config.log_checkpoint_residuals` asks for it, else at DEBUG.
    """
    program.is_logged = config.log_checkpoint_residuals
    level = logging.WARNING if program.is_logged else logging.DEBUG
    if not log.isEnabledFor(level) or not program.region.wrt:
        return
    input_names = _name_inputs(fun, trace, args, kwargs, call)
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
    text = f"remat-decorated function {describe_fun(fun)} saving "
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


def _name_inputs(
    fun: Callable[..., Any], trace: Trace, args: Any, kwargs: Any, call: Call
) -> list[str]:
    bound = BoundCall(fun, args, kwargs)
    known = {id(t): str(n) for t, n in zip(bound.tensors, bound.labels, strict=True)}
    arguments = [known.get(id(t), f"argument {i}") for i, t in enumerate(call.tensors)]
    return [*arguments, *(label.removeprefix("the ") for label in trace.captured.labels)]
