"""Turn a graph into the fastest plain Python function that runs it.

The function takes its inputs as one list, which it empties, and drops every value after its last
use: a saved tensor is freed in the middle of the backward pass, not at its end. Operators are
called without the Python prologue of `OpOverload.__call__`, which costs 0.5 us each; dispatch
modes, profilers and flop counters see them as ever.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from torchremat import _torch
from torchremat.graph.hand_outs import Groups, Targets, find_hand_outs
from torchremat.graph.nodes import (
    BodyOperator,
    all_items,
    attribute,
    is_checkpoint,
    is_identity,
    results_of,
)
from torchremat.graph.notes import notes_of
from torchremat.graph.reuse import Reuse, Write, find_reuse
from torchremat.graph.symbolic_sizes import Size, symbols_in

Runner = Callable[[list[Any]], tuple[Any, ...]]
"""Runs a graph: from a list of inputs, which it empties, to a tuple of outputs.

The values of the symbols that sizes depend on come first: see `symbols_of`.
"""

StagedRunner = Callable[[list[Any], list[Any]], Iterator[None]]
"""Runs a graph in stages: each appends a group of outputs to the second list.

It keeps none of them, so that who takes them from the list is the only owner.
"""


def symbols_of(run: Runner | StagedRunner) -> tuple[str, ...]:
    """The names of the symbols whose values `run` takes before its inputs."""
    return getattr(run, "symbols", ())


def inputs_filled_by(run: Runner) -> tuple[int, ...]:
    """The positions of the inputs that `run` itself gives their new values."""
    return getattr(run, "inputs_filled", ())


def source_of(run: Runner | StagedRunner) -> str:
    """The Python that `run` was compiled from; empty if it was not."""
    return getattr(run, "source", None) or run.__doc__ or ""


_PLAIN_LITERALS = (int, bool, str, type(None))


def compile_graph(
    module: fx.GraphModule, name: str = "graph", reuse: Reuse | None = None
) -> Runner:
    """Compile the graph of `module` to a function from a list of inputs to a tuple of outputs.

    Operators run in place as `reuse` says: by default those that then write to no input.

    >>> import torch
    >>> from torch import fx
    >>> class Double(torch.nn.Module):
    ...     def forward(self, x):
    ...         return (torch.add(x, x),)
    >>> run = compile_graph(fx.symbolic_trace(Double()))
    >>> inputs = [torch.ones(2)]
    >>> run(inputs), inputs
    ((tensor([2., 2.]),), [])
    """
    run: Runner = _CodeWriter(
        module, name, find_reuse(module) if reuse is None else reuse
    ).compile()
    return run


def compile_in_stages(
    module: fx.GraphModule, name: str, groups: Groups, reuse: Reuse, targets: Targets = ()
) -> StagedRunner:
    """Compile the graph of `module` to a generator function, which hands out `groups` of outputs.

    No operator reads an output, nor an input that is its target, once it is handed out.

    >>> import torch
    >>> from torch import fx
    >>> class Powers(torch.nn.Module):
    ...     def forward(self, x):
    ...         square = torch.mul(x, x)
    ...         return (torch.mul(square, x), square)
    >>> module = fx.symbolic_trace(Powers())
    >>> given = []
    >>> stages = compile_in_stages(module, "powers", ((1,), (0,)), Reuse())([torch.ones(2)], given)
    >>> next(stages), len(given), next(stages), len(given)
    (None, 1, None, 2)
    """
    hand_outs = find_hand_outs(module, groups, targets, reuse)
    return _CodeWriter(module, name, reuse, groups, hand_outs).compile()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Code:
    """An argument that is written already."""

    text: str


_NONE: Mapping[fx.Node, Sequence[int]] = MappingProxyType({})


class _CodeWriter:
    def __init__(
        self,
        module: fx.GraphModule,
        name: str,
        reuse: Reuse,
        groups: Groups = (),
        hand_outs: Mapping[fx.Node, Sequence[int]] = _NONE,
    ) -> None:
        self.module = module
        self.name = name
        self.reuse = reuse
        self.groups = groups
        self.hand_outs = hand_outs
        self.lines: list[str] = []
        self.globals: dict[str, Any] = dict(_torch.NAMES_IN_SIZES)
        self.bound: dict[int, str] = {}
        self.last_use = reuse.last_uses(module.graph)
        self.unpacked: set[int] = set()

    def compile(self) -> Any:
        nodes = list(self.module.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        symbols = symbols_in(self.module)
        if inputs or symbols:
            self.lines.append(f"{', '.join([*symbols, *(n.name for n in inputs)])}, = inputs")
            self.lines.append("inputs.clear()")
            self._drop(n for n in inputs if n not in self.last_use)
        for node in nodes:
            self._write(node)
            for number in self.hand_outs.get(node, ()):
                self._hand_out(number)
        body = "\n    ".join(self.lines)
        parameters = "inputs, given" if self.groups else "inputs"
        source = f"def run({parameters}):\n    {body}\n"
        exec(compile(source, f"<torchremat {self.name}>", "exec"), self.globals)
        run: Any = self.globals["run"]
        run.__doc__ = source
        run.symbols = symbols
        run.inputs_filled = self.reuse.inputs_filled
        return run

    def _write(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            return
        if node.op == "output":
            if not self.groups:
                self.lines.append(f"return {self._tuple(results_of(self.module))}")
            return
        if id(node) in self.unpacked:
            return
        finished = [n for n in self.reuse.values_for(node) if self.last_use[n] is node]
        if node in self.reuse.writes:
            call = self._prepare_write(node, self.reuse.writes[node])
        elif node in self.reuse.outs:
            outs = {name: self._place(write) for name, write in self.reuse.outs[node].items()}
            call = self._call_of(notes_of(node).written_by, node.args, {**node.kwargs, **outs})
        elif is_checkpoint(node):
            call = self._prepare_body(node)
            self._drop(finished)
            finished = []
        else:
            call = self._call(node)
        items = all_items(node)
        if items:
            self._write_unpacking(node, items, call)
        else:
            self.lines.append(f"{node.name} = {call}")
            if node not in self.last_use:
                self._drop([node])
        self._drop(finished)

    def _hand_out(self, number: int) -> None:
        results = results_of(self.module)
        values = [results[i] for i in self.groups[number]]
        later = {results[i] for group in self.groups[number + 1 :] for i in group}
        self.lines.append(f"given.extend({self._tuple(values)})")
        self._drop(dict.fromkeys(v for v in values if isinstance(v, fx.Node) and v not in later))
        self.lines.append("yield")

    def _tuple(self, values: Sequence[Any]) -> str:
        return f"({''.join(f'{self._expression(value)}, ' for value in values)})"

    def _write_unpacking(self, node: fx.Node, items: dict[int, fx.Node], call: str) -> None:
        """Unpack all outputs at once: else all would live as long as the last."""
        self.unpacked.update(id(item) for item in items.values())
        names = [
            items[i].name if i in items else f"{node.name}_unused_{i}"
            for i in range(len(node.meta["val"]))
        ]
        self.lines.append(f"{', '.join(names)}, = {call}")
        unread = [n for i, n in enumerate(names) if i not in items or items[i] not in self.last_use]
        if unread:
            self.lines.append(f"del {', '.join(unread)}")

    def _prepare_write(self, node: fx.Node, write: Write) -> str:
        """Write in place, as far as that takes a line of its own; the value is what is returned."""
        form, memory = write.form, write.memory
        if form is None:
            return memory.name
        place = self._place(write)
        if form.is_out:
            return self._call_of(form.op, node.args, {**node.kwargs, "out": place})
        if form.part is None:
            return self._call_of(form.op, [place, *node.args[1:]], node.kwargs)
        copy = self._call_of(form.op, [place, node.args[1]], {})
        self.lines.append(f"{node.name} = {copy}")
        return memory.name

    def _place(self, write: Write) -> _Code:
        part = None if write.form is None else write.form.part
        if part is None:
            return _Code(write.memory.name)
        return _Code(self._call_of(part.op, [write.memory, *part.args], part.kwargs))

    def _drop(self, nodes: Any) -> None:
        names = [node.name for node in nodes]
        if names:
            self.lines.append(f"del {', '.join(names)}")

    def _call(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return self._bind(attribute(self.module, str(node.target)))
        if node.target is operator.getitem:
            value, index = node.args
            return f"{self._expression(value)}[{index}]"
        if is_identity(node):
            value = self._expression(node.args[0])
            is_output = any(user.op == "output" for user in node.users)
            return f"{self._bind(_alias)}({value})" if is_output else value
        return self._call_of(node.target, node.args, node.kwargs)

    def _call_of(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        arguments = [self._expression(a) for a in args]
        arguments += [f"{k}={self._expression(a)}" for k, a in kwargs.items()]
        return f"{self._bind(_function(target))}({', '.join(arguments)})"

    def _prepare_body(self, node: fx.Node) -> str:
        """The body empties its list of inputs, so that each is freed after its last use."""
        body, *inputs = node.args
        assert isinstance(body, fx.Node) and isinstance(node.target, BodyOperator)
        run = node.target.runner_of(attribute(self.module, str(body.target)))
        values = [*symbols_of(run), *map(self._expression, inputs)]
        self.lines.append(f"inputs = [{', '.join(values)}]")
        return f"{self._bind(run)}(inputs)"

    def _expression(self, value: Any) -> str:
        if isinstance(value, _Code):
            return value.text
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, Size):
            return f"({value!r})"
        if isinstance(value, _PLAIN_LITERALS):
            return repr(value)
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            items = self._tuple(value)
            return f"[{items[1:-1]}]" if isinstance(value, list) else items
        return self._bind(value)

    def _bind(self, value: Any) -> str:
        if id(value) not in self.bound:
            self.bound[id(value)] = f"_{len(self.bound)}"
            self.globals[self.bound[id(value)]] = value
        return self.bound[id(value)]


# An output is a tensor of its own, since autograd keeps a record of each.
_alias = _torch.get_boxed_call(torch.ops.aten.alias.default)


def _function(target: Any) -> Callable[..., Any]:
    if not isinstance(target, _torch.OpOverload):
        return target  # type: ignore[no-any-return]
    function = _torch.get_boxed_call(target)
    return _with_grad_mode(function) if target in _ASK_GRAD_MODE else function


# Kernels that return what their derivative needs only in grad mode, which is off in graphs.
_ASK_GRAD_MODE = {torch.ops.aten.mkldnn_rnn_layer.default}


def _with_grad_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), _torch.below_autograd():
            return function(*args, **kwargs)

    return call
