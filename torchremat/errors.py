"""The errors and warnings that torchremat raises.

Each error is a subclass of the standard exception that fits, so that `except TypeError` works as a
user expects. `TorchrematError` is the base of all of them.
"""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "ArgumentTypeError", "ArgumentValueError", "AxisError", "AxisNameError", "AxisTypeError",
    "BudgetError", "BudgetSpellingError", "BudgetTypeError", "BudgetWarning", "ClosureError",
    "CollectiveError", "CollectiveTypeError", "CompilerWarning", "ConcretizationError",
    "DerivativeShapeError", "DerivativeTypeError", "DeviceError", "DonationError",
    "DonationWarning", "EffectError", "EffectWarning", "ForwardModeError", "GraphError",
    "HookError", "LoopWarning", "MissingRuleError", "NoMatchError", "NoStepError",
    "NotAvailableError", "OffloadWarning", "OptionError", "OverrideWarning",
    "ParallelModuleError", "PermutationError",
    "PlanError", "PlanWarning", "PolicyError", "PolicyFailedError", "PolicyValueError",
    "ProcessError",
    "PyTorchVersionError", "PyTorchVersionWarning", "RaggedError", "RaggedTypeError",
    "RecomputationError", "RegistrationError", "RegistrationTypeError", "RetraceError",
    "RetraceWarning", "RuleError", "RuleTypeError", "RuleValueError", "SegmentError",
    "SegmentTypeError", "SelectionWarning", "StepInBackwardError",
    "StepInBackwardWarning", "TorchrematError", "TraceError", "UnmatchedWarning",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)


def make_printable(text: str, keep: str = "") -> str:
    r"""`text` with escapes for what a terminal or a page would obey, save characters in `keep`.

    Names of modules, of values and of files may hold any character: those that clear a screen,
    begin a line, or turn the direction of writing.

    >>> print(make_printable("layers\n\x1b[2J.0"))
    layers\n\x1b[2J.0
    """
    if text.isprintable():
        return text
    pieces = (c if c.isprintable() or c in keep else _escape(c) for c in text)
    return "".join(pieces)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class _PrintableMessage:
    def __str__(self) -> str:
        return make_printable(super().__str__(), keep="\n\t")


class TorchrematError(_PrintableMessage, Exception):
    """The base of every error that torchremat raises on purpose."""


class ArgumentTypeError(TorchrematError, TypeError):
    """An argument of a function of this library is of a type that it does not take.

    Raised by any of them, where it is called.

    Cure: give what the message says; it also names what was given.
    """


class ArgumentValueError(TorchrematError, ValueError):
    """An argument of a function of this library is of the right type, and cannot have that value.

    Raised by any of them, where it is called: numbers out of range, text that cannot be read, trees
    that do not fit.

    Cure: give what the message says; it also names what was given.
    """


class NoStepError(TorchrematError, RuntimeError):
    """A report of a step is requested before there has been one.

    Raised by `nn.report` before the wrapped modules have run with gradients enabled.

    Cure: run a step first.
    """


class ConcretizationError(TorchrematError, TypeError):
    """Python needs the value of a traced tensor (`if x > 0`, `x.item()`, `float(x)`).

    Raised when a function is traced: at the first call of a checkpoint, in `make_graph`, `jit`,
    `plan`; and by `vmap`, for a tensor that is mapped.

    Cure: pass the value as a Python value that `static_argnums` names. Or choose with
    tensors, by `torch.where` or `torch.cond`. Or read the value outside the function.
    """


class EffectError(TorchrematError, RuntimeError):
    """The traced function did something that a graph cannot replay.

    Raised at the first call: random numbers of Python or NumPy, seeding, an attribute that a
    module's `forward` changes, `x.data = ...`, writes that a graph cannot hold together with a
    derivative. Also raised for a tensor that the function leaves where a graph cannot put it. A
    step of `while_loop` or `scan` that writes in place raises it, too.

    Cure: draw with `torch`, or outside; keep counters in buffers and write to them in place;
    return new values instead of writing.
    """


class TraceError(TorchrematError, TypeError):
    """An argument or result of a function to trace is not a tree of tensors and scalars.

    Raised when a function is called or traced with sparse or nested tensors, or with nothing to
    differentiate. Also raised for an object that is not a tensor, number, string or `None`, nor a
    tree of them.

    Cure: name what is not a tensor in `static_argnums` or `static_argnames`, register its type as
    a tree, or pass the tensors that it holds.
    """


class ParallelModuleError(TraceError):
    """A module that gathers from other processes runs inside of what is checkpointed.

    Raised at the first call, of `fully_shard`, `FullyShardedDataParallel` and
    `DistributedDataParallel`. It does not run on a tape either: its parameters come and go.

    Cure: wrap that module itself (`nn.wrap` with `select`), or the `.module` of a
    `DistributedDataParallel`.
    """


class PolicyError(TorchrematError, TypeError):
    """The policy is unknown, or answered something that is not a verdict.

    Raised where a policy is made or given; for its answers, when a function is traced.

    Cure: answer `True`, `False`, `Saveable`, `Recompute` or `Offloadable(src, dst)`; give a
    policy of `checkpoint_policies`, its spelling, or a callable.
    """


class PolicyFailedError(TorchrematError, RuntimeError):
    """A policy of the user's raised an error while a compiler captured a program.

    Raised at the first call of a function under `torch.compile`, which would report the policy's
    own error as one of the compiler's. Without a compiler that error reaches the user as it is.

    Cure: mend the policy. Its arguments are operators, avals (shape, dtype, device) and numbers:
    there are no tensors yet whose values it could read.
    """


class NoMatchError(TorchrematError, ValueError):
    """A selection of modules matches nothing.

    Raised by `nn.wrap` for a `select` or a dict of policies that finds no submodule, and by
    `nn.report` where nothing is wrapped.

    Cure: take one of the nearest names that the message gives; `dict(model.named_modules())`
    has all.
    """


class GraphError(TorchrematError, ValueError):
    """A graph breaks a rule that every typed graph obeys, or does not fit its use.

    Raised by functions of graphs: a node without an aval, a graph that is not linear,
    graphs that do not fit together. The message prints the graph around the fault.

    Cure: make the graph with `make_graph`, and give what the rule in the message says.
    """


class RetraceError(TorchrematError, RuntimeError):
    """A function, traced a second time for a higher derivative, computed something else.

    Raised in a derivative of higher order, which traces the function again at the time of the
    backward pass. Also in one of fewer outputs, if a user's backward pass returns a constant.

    Cure: keep what the function reads (globals, closures, modules) as it was until all
    derivatives are taken.
    """


class RecomputationError(TorchrematError, RuntimeError):
    """A recomputed value differs from the value of the forward pass.

    Raised in a backward pass with `config.verify_recomputation = "bitwise"`, with the first
    value that differs, its module and line.

    Cure: save that value (`save_modules`, `save_only_these_names`), or use a deterministic
    operator (`torch.use_deterministic_algorithms`).
    """


class StepInBackwardError(TorchrematError, RuntimeError):
    """An optimizer cannot update its parameters in the backward pass, or its gradients are gone.

    Raised by `optim.step_in_backward` for an optimizer that needs all gradients at once. Raised
    later for code that reads a consumed gradient, and for a setting that changed too late.

    Cure: the message has it: `max_norm=`, `accumulate=`, or `step()` after the backward pass.
    """


class StepInBackwardWarning(_PrintableMessage, UserWarning):
    """Gradients that updates have consumed were scaled by 1, which changes nothing.

    Given once by `clip_grad_norm_` after a backward pass that updated parameters, while the norm is
    below its limit. A norm above it is a `StepInBackwardError`.

    Cure: give the limit to `optim.step_in_backward` as `max_norm=`, or clip no more.
    """


class DonationError(TorchrematError, RuntimeError):
    """A tensor that must not be donated was donated, or a donated tensor is used.

    Raised by a function of `jit`: for a donated parameter that is needed, views of it, a tensor
    that is donated twice; and by each use of a donated tensor's values.

    Cure: use the outputs instead of the donated tensor. If the tensor is needed later, pass a
    clone, or leave the argument out of `donate_argnums`.
    """


class DerivativeTypeError(TorchrematError, TypeError):
    """A value has no derivative: it is an integer, or of another tree or dtype than expected.

    Raised by `grad`, `vjp`, `jvp`, `jacfwd` and their kin.

    Cure: convert integers to a floating dtype, return what is not differentiated with
    `has_aux=True`, and give tangents and cotangents the structure and dtype of their values.
    """


class DerivativeShapeError(TorchrematError, ValueError):
    """A tangent or cotangent has another shape than the value that it belongs to.

    Raised by `jvp`, and by the functions that `vjp` and `linearize` return.

    Cure: give it the shape of the value; the message has both.
    """


class MissingRuleError(TorchrematError, AttributeError):
    """A function with rules of its own is called before they are defined.

    Raised by a call of a `custom_jvp`, a `custom_vjp` or a `custom_vmap`.

    Cure: define the rules first: `f.defjvp(rule)`, `f.defvjp(fwd, bwd)`, `f.def_vmap(rule)`.
    """


class RuleTypeError(TorchrematError, TypeError):
    """A rule for derivatives returns, or gets, a tree of the wrong structure.

    Raised when the rules of a `custom_jvp` or `custom_vjp` run.

    Cure: return what the message shows: of `fwd` a pair (output, residuals), of `bwd` a tuple
    with an entry for each argument.
    """


class RuleValueError(TorchrematError, ValueError):
    """A rule for derivatives gives cotangents of the wrong shapes or dtypes.

    Raised when the `bwd` of a `custom_vjp` runs.

    Cure: give each cotangent the shape and dtype of its argument.
    """


class ForwardModeError(TorchrematError, TypeError):
    """A function that has only a rule for reverse mode is differentiated in forward mode.

    Raised by `jvp`, `linearize`, `jacfwd` and `hessian` over a `custom_vjp`.

    Cure: give the function a rule for forward mode, from which reverse mode follows:
    `custom_jvp`.
    """


class ClosureError(TorchrematError, RuntimeError):
    """A function with rules is differentiated with respect to a tensor that it closes over.

    Raised when a `custom_jvp` or `custom_vjp` reads a tensor that is differentiated and is not
    among its arguments.

    Cure: make the tensor an argument of the function.
    """


class HookError(TorchrematError, RecursionError):
    """A hook on the `grad_fn` of a checkpoint's output runs a backward pass that ends in the hook.

    Raised in that backward pass. All outputs of a checkpoint share one `grad_fn`: the hook is
    called for each of them.

    Cure: let the hook return where it is called from its own backward pass. Or put it on a tensor
    that is made of the output (`y.view_as(y)`).
    """


class DonationWarning(_PrintableMessage, UserWarning):
    """A donated tensor's storage is of no use: no output has its size and dtype.

    Given by a function of `jit`, the first time. The tensor stays as it was.

    Cure: take the argument out of `donate_argnums`, or let an output have its size and dtype.
    """


class UnmatchedWarning(_PrintableMessage, UserWarning):
    """A name, operator or pattern of a policy matches nothing in what was traced.

    Given when a function is traced under the policy; the message has the nearest names that exist.

    Cure: correct the name, or take it out of the policy; `explain` lists names, operators and
    modules.
    """


class SelectionWarning(_PrintableMessage, UserWarning):
    """A selection of modules wraps modules inside others that it wraps, and may not mean to.

    Given by `nn.wrap`, and wherever there is a `select`, for a position and a pattern that are
    joined by `,`: `every:2,**.attn`. What is inside both is recomputed twice.

    Cure: write `every:2 & **.attn` for the `attn` of every second block.
    """


class RetraceWarning(_PrintableMessage, UserWarning):
    """A function is traced again and again, for something that changes from call to call.

    Given after several traces; the message says what causes them. A wrapped module is not traced
    for other values from then on: calls without a trace run on a tape.

    Cure: pass a number that keeps changing as a tensor, or leave unchanged what the function
    closes over.
    """


class EffectWarning(_PrintableMessage, UserWarning):
    """The traced function did something that a graph does not replay.

    Given by earlier versions only. Now a tensor that is left in a list, a dict or a module is put
    there at each call. What cannot be replayed is an `EffectError`.

    Cure: none is needed; the name stays for filters of warnings.
    """


class OverrideWarning(_PrintableMessage, UserWarning):
    """A policy decides on all that a function does, also inside a `torch.utils.checkpoint` in it.

    Given when a function or module under a policy is traced: its own checkpoints count no more.

    Cure: take `torch.utils.checkpoint` out (in transformers, `gradient_checkpointing_disable()`),
    or put the policy on other parts only.
    """


class BudgetWarning(_PrintableMessage, UserWarning):
    """A step of a job that has begun cannot keep within the budget, and runs above it.

    Given once, with the bytes, under `memory_budget(on_infeasible="best")`.

    Cure: make batches smaller, give a larger budget, or declare the largest step beforehand, with
    `nn.wrap(..., example=...)`, which raises `BudgetError` before the first step.
    """


class PlanWarning(_PrintableMessage, UserWarning):
    """A plan is replayed on a device where other values would be worth saving.

    Given once for a policy. Results and the peak are as planned; the step takes more time than one
    with a plan that was made for the device.

    Cure: make the plan for the device, with `device=` or a `cost_model` that was measured on it.
    """


class OffloadWarning(_PrintableMessage, UserWarning):
    """A policy offloads a value that cannot be offloaded or finds no room: it stays there.

    Given when a checkpoint is traced whose policy names a place that does not exist for a value, or
    whose graphs are compiled. Also given when the pool of host memory is full, once for each size.

    Cure: name `"device"` and `"pinned_host"`, leave the compiler out, raise
    `config.host_pool_nbytes`, or offload less.
    """


class PolicyValueError(TorchrematError, ValueError):
    """A policy was made with a value that it cannot have, or is spelled wrongly.

    Raised where a policy is made or read from text: an empty name, overlapping lists of names,
    a spelling that means nothing, an unknown solver.

    Cure: see the nearest spelling in the message, and the table of spellings of policies.
    """


class BudgetError(TorchrematError, RuntimeError):
    """No plan keeps within the budget; `least_bytes` is the least that can be met.

    Raised by `plan`, and by the first call under `memory_budget`. The message names the operator
    that needs the most, and the other values that it needs.

    Cure: give a budget of at least `least_bytes`, make the batch smaller, or let values be
    offloaded.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.least_bytes)


class BudgetTypeError(TorchrematError, TypeError):
    """A budget is neither a number nor text.

    Raised by `plan`, `pareto` and `memory_budget`.

    Cure: give an `int` or text (`"2GiB"`) for bytes, a `float` in (0, 1] or text (`"50%"`) for
    a fraction of the plain peak. Text is also `"least"` or `"time:+10%"`.
    """


class BudgetSpellingError(TorchrematError, ValueError):
    """A budget is misspelt, not positive, or a fraction above 1.

    Raised by `plan`, `pareto` and `memory_budget`.

    Cure: bytes are a positive `int` or text such as `"2GiB"` or `"500MB"`, a fraction is in (0,
    1] or text such as `"50%"`. `"least"` and `"time:+10%"` are the other two.
    """


class PlanError(TorchrematError, ValueError):
    """A plan cannot be read, or is of another graph or another version.

    Raised by `Plan.load`, and by pictures of a report without a timeline. Also raised by a policy
    that replays a plan for another function, or for other shapes, dtypes or modes.

    Cure: make the plan again, with `plan`, for this call; the message says where the graphs
    differ.
    """


class OptionError(TorchrematError, ValueError):
    """An option does not exist, or has a value that it cannot have.

    Raised by `jit`, `nn.wrap(compile=...)` and the backend `"torchremat"` of `torch.compile`. Also
    raised where an attribute of `torchremat.config` is set that is not a setting.

    Cure: take one of the nearest names that the message gives.
    """


class SegmentError(TorchrematError, ValueError):
    """Offsets or lengths of segments do not fit the data.

    Raised by `segment_sum`, `ragged_attention` and their kin.

    Cure: give offsets that do not decrease, from 0 to the number of rows at most.
    """


class SegmentTypeError(TorchrematError, TypeError):
    """An operator on segments was given no tensor, or one of a dtype that it does not take.

    Raised by `segment_sum`, `ragged_attention` and their kin.

    Cure: give tensors, all of one floating dtype and device, and offsets of an integer dtype.
    """


class AxisError(TorchrematError, ValueError):
    """A value lacks an axis that `vmap` needs, or sizes of axes do not agree.

    Raised by `vmap` and its kin; the message says which argument, which axis and which sizes.

    Cure: let `in_axes` name an axis that the argument has, of one size in all arguments; `None`
    for what is not mapped.
    """


class AxisTypeError(TorchrematError, TypeError):
    """An argument for an axis of `vmap` is not an axis, or the value has no axes.

    Raised by `vmap` and its kin.

    Cure: an axis is an `int`, `None` or `pile_axis`, or a tree prefix of these; return tensors
    for what `out_axes` gives an axis.
    """


class RegistrationError(TorchrematError, ValueError):
    """A rule or a type cannot be registered so, or is not registered.

    Raised by `primitive_batchers` and its kin, and by `register_vmappable`.

    Cure: register for an `OpOverload` (`torch.ops.aten.sin.default`), and
    `unregister_vmappable` a type before it is registered anew.
    """


class RegistrationTypeError(RegistrationError, TypeError):
    """A rule is registered for what is not an operator.

    Raised by `primitive_batchers` and its kin, `defvectorized`, `defbroadcasting`, `defreducer`.

    Cure: register for an `OpOverload`, such as `torch.ops.aten.sin.default`.
    """


class RuleError(TorchrematError, ValueError):
    """A user's batching rule returned no valid result, or cannot be used here.

    Raised when a rule of `primitive_batchers` or of a `custom_vmap` runs.

    Cure: return a pair of output and axis, or a list of outputs and a list of their axes.
    """


class CompilerWarning(_PrintableMessage, UserWarning):
    """A compiler leaves something out; the results are right all the same.

    Given when inductor should compile a graph with tensors on a GPU, and Triton is not installed:
    operators run one after the other. Given too when Dynamo meets a checkpoint inside of `grad`,
    `vjp` or `jacrev`: nothing is recomputed for it.

    Cure: install Triton (`pip install triton`; it comes with PyTorch for CUDA and ROCm), or choose
    `"eager"`. Call the derivative outside of the compiled function.
    """


class LoopWarning(_PrintableMessage, UserWarning):
    """An operator that has no batching rule runs in a loop, once for each example.

    Given by `vmap`; it names the operator and its line. The result is right, and slow.

    Cure: use an operator that has a rule, or give it one: `primitive_batchers`, `custom_vmap`.
    """


class RaggedError(TorchrematError, ValueError):
    """Sizes that differ from element to element of a batch were used where they cannot be.

    Raised by `Pile` and by `vmap` along `pile_axis`: the sizes of two piles differ, Python
    needs a size as a number, an operator has no form for such sizes.

    Cure: write it with operators of tensors (`torch.where`, `torch.arange(n)`), make ragged
    tensors outside and pass them as a `Pile`, or pad.
    """


class RaggedTypeError(TorchrematError, TypeError):
    """A Pile lacks `pile_axis`, `pile_axis` lacks a Pile, or elements make up no Pile.

    Raised by `vmap` along `pile_axis`, and by `Pile.from_list`.

    Cure: give `pile_axis` in `in_axes` for a `Pile`, and in `out_axes` for an output whose
    sizes differ; make piles of tensors of one dtype and rank.
    """


class DeviceError(TorchrematError, RuntimeError):
    """A kind of device, or a process, does not exist here.

    Raised by `devices`, `local_devices` and their kin; and by a checkpoint or `jit` of a function
    that names a device of another machine.

    Cure: name one of the kinds or processes that the message lists; more processes need
    `torch.distributed.init_process_group`.
    """


class ProcessError(TorchrematError, RuntimeError):
    """Processes that work together did not: one stopped, or was given something else.

    Raised by `pmap`, and by `plan` and budgets where several processes plan one step, in each
    process that goes on: the message names the one that differs, failed, is gone or silent.

    Cure: let all processes make the same calls, with arguments of the same shapes; where one has
    failed, its own error says why. A call that takes longer than the timeout of the process group
    needs `torch.distributed.init_process_group(timeout=...)`.
    """


class AxisNameError(TorchrematError, NameError):
    """No axis of this name is in scope, or it cannot be reached.

    Raised by collectives (`psum`, `axis_index`, ...).

    Cure: bind the name: `vmap(fun, axis_name=name)` around the function.
    """


class CollectiveError(TorchrematError, ValueError):
    """A collective over a named axis was given sizes, groups or dimensions that do not fit it.

    Raised by `all_gather`, `all_to_all`, `psum_scatter` and their kin.

    Cure: let the size of the dimension be that of the axis, or a multiple of it with
    `tiled=True`.
    """


class CollectiveTypeError(TorchrematError, TypeError):
    """A collective over a named axis was given something that is neither tensor nor number.

    Raised by collectives (`psum`, ...).

    Cure: convert it with `torch.as_tensor`.
    """


class PermutationError(CollectiveError, AssertionError):
    """A permutation of a named axis is none, or leaves out some of it.

    Raised by `ppermute` and `pshuffle`.

    Cure: let each index be a source at most once and a destination at most once; `pshuffle`
    needs all of them.
    """


class NotAvailableError(TorchrematError, NotImplementedError):
    """This version lacks a feature or no longer has it, such as an option of JAX's.

    Raised where the feature is requested; the message says what does the same.

    Cure: do what the message says.
    """


class PyTorchVersionError(TorchrematError, RuntimeError):
    """The installed PyTorch lacks a private part that the library needs.

    Raised where the part is used, on a PyTorch that is newer than those that were tested. The
    message names the part, the version, and the newest tested one.

    Cure: take a newer torchremat, or the newest tested PyTorch. `torchremat env --check` says what
    works.
    """


class PyTorchVersionWarning(_PrintableMessage, UserWarning):
    """The installed PyTorch is newer than those that the library was tested with.

    Given once, at import.

    Cure: `torchremat env --check` tries what works; take a newer torchremat if there is one.
    """


def nearest_names(name: str, known: Iterable[str], *, limit: int = 3) -> str:
    """The part of a message that names those of `known` that are like `name`, else the first.

    >>> nearest_names("atn", ["attn", "mlp"])
    "nearest: 'attn'"
    >>> nearest_names("x", ["attn", "mlp"])
    "there are: 'attn', 'mlp'"
    >>> nearest_names("x", [])
    'there are none'
    """
    names = sorted(set(known))
    if not names:
        return "there are none"
    if near := get_close_matches(name, names, n=limit):
        return "nearest: " + ", ".join(map(repr, near))
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return "there are: " + ", ".join(map(repr, names[:limit])) + more
