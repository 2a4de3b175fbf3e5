"""`make_graph`: from a Python function to a `TypedGraph`; each checkpoint in it is one operator."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from torchremat.api_util import StaticArguments
from torchremat.autodiff.bodies import FunctionBody
from torchremat.autodiff.joint import TraceOptions, trace_joint
from torchremat.core.trees import Structure
from torchremat.errors import ArgumentTypeError, TraceError
from torchremat.graph.nodes import results_of
from torchremat.graph.notes import note_graph
from torchremat.graph.slicing import slice_graph
from torchremat.policies.policy import Policy
from torchremat.remat.escapes.leave_as_found import leave_as_found
from torchremat.remat.op import op_rules  # noqa: F401  (gives remat_p and name_p their meaning)
from torchremat.remat.op.remat_op import remat_p
from torchremat.remat.tracing.calls import Result, flatten_call, wrap_statics
from torchremat.remat.tracing.input_labels import BoundCall
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.module_paths import ModulePaths, below
from torchremat.tracing.no_grad_op import mark_no_grad
from torchremat.tracing.tracing import current_tracing
from torchremat.typed_graph.building import Input, build_graph
from torchremat.typed_graph.equations import Number
from torchremat.typed_graph.typed_graph import TypedGraph


def make_graph(
    fun: Callable[..., Any],
    *,
    static_argnums: int | tuple[int, ...] = (),
    return_shape: bool = False,
) -> Callable[..., Any]:
    """Make a function that traces `fun` for given arguments, and returns the graph.

    Nothing is computed. Tensors among the arguments become inputs; everything else (numbers,
    strings, `None`, static arguments) is part of the trace. Tensors that `fun` closes over, a
    module's parameters among them, become constants, each once. A number that `fun` returns is in
    the graph as a literal. A checkpoint in `fun` is one `remat_p` with a graph of its own, and a
    user's `autograd.Function` is one `function_p`. Values leave `no_grad` through a `no_grad_p`.

    Args:
        fun: a function of trees of tensors and Python values, or an `nn.Module`. Writes to its
            arguments or buffers are done by `eval_graph` at the end; other effects happen now.
        static_argnums: positions of arguments that are any Python values.
        return_shape: also return the result's tree, with avals in place of tensors and numbers.

    Returns:
        A function of the arguments of `fun` that returns a `TypedGraph`, or with `return_shape` a
        pair of it and a tree of avals.

    Raises:
        TypeError: if `fun` cannot be called; if an argument or result is not a tree of tensors and
            Python values. Also if Python needs the value of a traced tensor.
        EffectError: (a `RuntimeError`) if `fun` writes, under `no_grad`, to a value that may have
            a gradient.

    After `jax.make_jaxpr`.

    >>> import torch, torchremat as tr
    >>> def f(x):
    ...     return tr.checkpoint(lambda x: torch.cos(torch.sin(x)), policy="dots")(x), 1.0
    >>> tr.make_graph(f)(torch.ones(3))
    { lambda ; a:f32[3]. let
        b:f32[3] = remat_p[
          body={ lambda ; c:f32[3]. let
              d:f32[3] = aten.sin c
              e:f32[3] = aten.cos d
            in (e,) }
          policy=dots_saveable
        ] a
      in (b, 1.0:f32[]) }
    >>> tr.make_graph(f, return_shape=True)(torch.ones(3))[1]
    (f32[3], f32[])
    """
    if not callable(fun):
        raise ArgumentTypeError(
            f"make_graph takes a function or an nn.Module, but it was given {fun!r} "
            f"({type(fun).__name__}); the arguments go to what it returns: make_graph(f)(x)"
        )
    statics = StaticArguments(fun, static_argnums, ())

    @functools.wraps(fun)
    def trace(*args: Any, **kwargs: Any) -> Any:
        g = trace_graph(fun, args, kwargs, statics)
        return (g, g.out_structure.unflatten(g.out_avals)) if return_shape else g

    return trace


def trace_graph(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    statics: StaticArguments,
    *,
    lenient: bool = False,
    module_prefix: str = "",
) -> TypedGraph:
    """Trace `fun` for such a call. `lenient` lets any object be a Python value, as modules do."""
    flatten_call(args, kwargs, statics, lenient=lenient)  # raises for what is not an argument
    opaque = wrap_statics(args, kwargs, statics)
    in_structure = Structure.of(opaque).freeze_statics()
    tensors = in_structure.flatten(opaque)
    call = BoundCall(fun, *opaque)
    results: list[Structure] = []

    def flat(values: list[Tensor]) -> list[Any]:
        positional, named = in_structure.unflatten(values)
        result = fun(*positional, **named)
        Result(result, lambda: call.name)  # raises for what is no result
        results.append(Structure.of(result, _is_output, is_result=True))
        return results[-1].flatten(result)

    paths = ModulePaths({i: below(module_prefix, n) for i, n in call.roots.items()})
    specs = [InputSpec.of(tensor, any_level=True) for tensor in tensors]
    body, names = FunctionBody(lambda: flat, specs), [f"arg{i}" for i in range(len(specs))]
    is_outermost = current_tracing() is None
    found = leave_as_found(fun, (args, kwargs)) if is_outermost else nullcontext()
    options = TraceOptions(with_gradients=False, whole_calls=True)
    with torch.inference_mode(False), found:
        joint, tracing = trace_joint(body, specs, names, paths, options)
    _refuse_dtensors(call, [*specs, *tracing.captured_specs])
    mark_no_grad(joint.module.graph)
    labels = [*call.labels, *call.labels_of_captured(tracing.captured, paths)]
    values = [*[None] * len(specs), *tracing.captured]
    triples = zip(joint.inputs, labels, values, strict=True)
    inputs = [Input(node, label.text, tensor) for node, label, tensor in triples]
    outputs = results_of(joint.module)[: len(joint.outputs)]
    writes = [(inputs[i], value) for i, value in joint.mutations]
    return build_graph(joint.module, inputs, outputs, (in_structure, results[0]), writes)


def _is_output(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | Number)


def _refuse_dtensors(call: BoundCall, specs: Sequence[InputSpec]) -> None:
    if any(spec.sharding for spec in specs):
        raise TraceError(
            f"{call.name} reads a tensor that is spread over processes (a DTensor), which a graph "
            "cannot: make the graph of a function of local tensors (x.to_local())"
        )


def is_traced_whole() -> bool:
    """Whether a trace is in progress in which a checkpoint becomes one operator."""
    tracing = current_tracing()
    return tracing is not None and tracing.on_function is not None


def is_opened() -> bool:
    """Whether a trace is in progress in which a checkpoint is what its function does."""
    tracing = current_tracing()
    return tracing is not None and tracing.opens_calls


def call_in_graph(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    statics: StaticArguments,
    *,
    policy: Policy,
    lenient: bool,
    module_prefix: str,
) -> Any:
    """Call `fun` in a trace in which checkpoints are whole: record it as one `remat_p`."""
    g = trace_graph(fun, args, kwargs, statics, lenient=lenient, module_prefix=module_prefix)
    module = g.graph_module
    inputs = module.graph.find_nodes(op="placeholder")
    tensors = [value for value in g.outputs if isinstance(value, fx.Node)]
    body = slice_graph(module, inputs, [*tensors, *g.written])
    note_graph(body, policy=policy, is_tidy=True)
    operands = [*g.consts, *flatten_call(args, kwargs, statics, lenient=lenient).tensors]
    results = list(remat_p(body, *operands))
    with torch.no_grad():
        for i, value in zip(g.writes, results[len(tensors) :], strict=True):
            operands[i].copy_(value)
    left = iter(results)
    return g.out_structure.unflatten(
        [next(left) if isinstance(value, fx.Node) else value for value in g.outputs]
    )
