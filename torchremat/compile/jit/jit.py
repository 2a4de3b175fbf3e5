"""`jit`: a function whose graphs are compiled, and which may use up its arguments.

It is a checkpoint whose policy saves what plain autograd saves, traced and cached as any other.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.api_util import (
    ArgumentSelection,
    StaticArguments,
    donation_vector,
    rebase_donate_argnums,
)
from torchremat.compile.jit.donated_tensors import DonatedTensor, reason_not_donatable, take
from torchremat.compile.jit.jit_program import JitProgram
from torchremat.compile.lowering import check_backend
from torchremat.core.avals import Aval
from torchremat.core.source import current_source, name_of, warn_user
from torchremat.errors import ArgumentTypeError, DonationError, DonationWarning
from torchremat.graph.codegen import source_of
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.policies.builtin import plain_autograd
from torchremat.policies.policy import Policy, PolicyLike, as_policy
from torchremat.remat.checkpointed import Checkpointed
from torchremat.remat.dynamo import checkpoint_in_compiler
from torchremat.remat.op.make_graph import trace_graph
from torchremat.remat.op.remat_op import run_graph, run_program
from torchremat.remat.program.compilers import compiler_named
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.tracing.calls import flatten_call
from torchremat.remat.tracing.input_labels import BoundCall
from torchremat.remat.tracing.trace_cache import PolicyKey, Trace
from torchremat.typed_graph.typed_graph import TypedGraph

__all__ = ["Jitted", "Lowered"]


def __dir__() -> list[str]:
    return sorted(__all__)


@dataclass(frozen=True)
class Lowered:
    """A function compiled for arguments like those it was given: see `jit`.

    Attributes:
        graph: the forward graph, of ATen operators. From inputs and closed-over tensors it computes
            outputs, new values of what is written to, and residuals.
        backward_graph: from residuals and cotangents to gradients, if autograd records.
    """

    graph: fx.GraphModule
    backward_graph: fx.GraphModule | None
    _codes: tuple[str, ...]
    _jitted: "Jitted"

    def as_text(self) -> str:
        """The code that was generated, for the forward pass and then for the backward."""
        return "\n\n".join(self._codes)

    def compile(self) -> "Jitted":
        """The function, which has been compiled for such arguments."""
        return self._jitted

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return f"Lowered({self._jitted!r})"


class Jitted(Checkpointed):
    """A function under `jit`. Call it as the function itself."""

    may_write_tape = False

    def __init__(
        self,
        fun: Callable[..., Any],
        policy: Policy,
        statics: StaticArguments,
        donated: ArgumentSelection,
        backend: str,
    ) -> None:
        # before the rest, which takes over the attributes of `fun`, a module's say
        self._jit_options = (donated, backend)
        super().__init__(fun, policy, True, statics, compiler=compiler_named(backend))

    @property
    def donated(self) -> ArgumentSelection:
        """The selection of the arguments that are donated."""
        return self._jit_options[0]

    @property
    def backend(self) -> str:
        """The name of the backend that compiles the graphs."""
        return self._jit_options[1]

    @property
    def may_check(self) -> bool:  # type: ignore[override]
        """Whether a call whose checks fail can run anew: not once its arguments are used up."""
        return not self.donated

    def __repr__(self) -> str:
        return f"jit({self.fun!r}, backend={self.backend!r})"

    def _cache_key(self) -> tuple[Any, ...]:
        donated = self.donated
        return (*super()._cache_key(), self.backend, donated.argnums, donated.all_names)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        bound = super().__get__(instance, owner)
        if bound is not self:
            bound._jit_options = (self.donated.without_first(), self.backend)
        return bound

    def _may_be_dynamic(self) -> bool:
        """Whether one graph may serve many sizes: one that writes to its inputs never does.

        Nor does that of a plan, which is for the kernels of one size.
        """
        whole = self.policy.is_whole_graph
        return not self.donated and not whole and super()._may_be_dynamic()

    def _new_program(
        self, trace: Trace, key: PolicyKey, sizes: Sizes | None, args: Any, kwargs: Any
    ) -> FunctionProgram:
        program = JitProgram(
            trace.region,
            self.policy,
            module_prefix=self.module_prefix,
            backend=self.backend,
            donated=self._find_donated_inputs(args, kwargs) if self.donated else (),
        )
        program.jitted_name = name_of(self.fun).rpartition(".")[2]
        return program

    def _find_donated_inputs(self, args: Any, kwargs: Any) -> list[tuple[int, str]]:
        static = self.statics.positions(len(args), kwargs)
        names = self.statics.all_names
        dynamic = tuple(a for i, a in enumerate(args) if i not in static)
        named = {name: kwargs[name] for name in sorted(kwargs) if name not in names}
        numbers = rebase_donate_argnums(self.donated.positions(len(args), kwargs), static)
        flags = donation_vector(numbers, dynamic, named, self.donated.all_names)
        leaves = _torch.tree_flatten((dynamic, named))[0]
        flagged = [f for f, leaf in zip(flags, leaves, strict=True) if isinstance(leaf, Tensor)]
        call = BoundCall(self.fun, args, kwargs)
        known = {id(t): label.text for t, label in zip(call.tensors, call.labels, strict=True)}
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return [(i, known.get(id(tensors[i]), f"{i}")) for i, flag in enumerate(flagged) if flag]

    def _slow_call(self, call: Any, args: Any, kwargs: Any) -> Any:
        for tensor in call.tensors:
            if isinstance(tensor, DonatedTensor):
                raise DonationError(tensor.describe_misuse(_call_of(self.fun)))
        return super()._slow_call(call, args, kwargs)

    def _apply(
        self, trace: Trace, program: FunctionProgram, tensors: list[Tensor], sizes: Sizes | None
    ) -> tuple[Any, ...]:
        assert isinstance(program, JitProgram)
        if (
            _torch.innermost_proxy_mode() is not None
            or _torch.functorch_is_active()
            or _torch.in_dual_level()
        ):
            return super()._apply(trace, program, tensors, sizes)
        if program.donated and not any(isinstance(t, _torch.FakeTensor) for t in tensors):
            tensors = _donate(program, tensors, self.fun)
            program = program.donating
        return self._run(trace, program, tensors, sizes)

    def _run(
        self, trace: Trace, program: JitProgram, tensors: list[Tensor], sizes: Sizes | None
    ) -> tuple[Any, ...]:
        """Run `program` outside of transformations; without autograd if that records nothing."""
        if program.region.wrt:
            return super()._apply(trace, program, tensors, sizes)
        notes_views = bool(program.views)
        places = [p for kind, p in program.view_bases.values() if kind == "input"]
        bases = {position: tensors[position] for position in places}
        if program.writes:
            found = run_program(program, tensors, None, sizes, notes_views=notes_views)
        else:  # which empties the list: what is read for the last time is freed
            found = run_graph(program.forward, tensors, None, sizes, notes_views=notes_views)
        found = found[: program.num_outputs]
        return program.as_no_views(program.as_views(bases, found)) if notes_views else found

    def trace(self, *args: Any, **kwargs: Any) -> TypedGraph:
        """The function as a typed graph, as `make_graph` gives it."""
        return trace_graph(self.fun, args, kwargs, self.statics)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Compile for such arguments, run nothing, and show the graphs and the generated code."""
        call = flatten_call(args, kwargs, self.statics, lenient=self.lenient)
        _, program = self.prepare(call, args, kwargs)
        assert isinstance(program, JitProgram)
        if program.donated:
            program = program.donating
        wrt = program.region.wrt
        with_states = bool(wrt and program.replayed_random)
        compiled = [program.runtime_forward if with_states else program.forward]
        if wrt:
            given = (True,) * len(program.differentiable)
            needed = tuple(i in wrt for i in range(program.num_inputs))
            compiled.append(program.backward(given, needed, with_states=with_states))
        modules = [c.module for c in compiled]
        codes = tuple(source_of(c.run) for c in compiled)
        return Lowered(modules[0], modules[1] if modules[1:] else None, codes, self)


def _donate(program: JitProgram, tensors: list[Tensor], fun: Any) -> list[Tensor]:
    """The inputs, with the storage of donated ones in new tensors; the user's can't be read."""
    twice = len(set(map(id, tensors))) < len(tensors)
    for i, label in program.donated:
        reason = reason_not_donatable(tensors[i])
        if twice and sum(other is tensors[i] for other in tensors) > 1:
            reason = "the same tensor is passed twice, so that its values are read by both names"
        if reason is None and i in program.needed_backward:
            reason = (
                "it is needed for the backward pass, which autograd records. Donate under "
                "torch.no_grad(), or what requires no gradient and is not multiplied with what does"
            )
        if reason is not None:
            raise DonationError(
                f"{_call_of(fun)} cannot be given the storage of its argument {label} "
                f"({Aval.of(tensors[i])}): {reason}."
            )
    donation, call = program.donation, _call_of(fun)
    if donation.unusable and not program.has_warned:
        program.has_warned = True
        labels = dict(program.donated)
        avals = ", ".join(f"{labels[i]}: {Aval.of(tensors[i])}" for i in donation.unusable)
        warn_user(
            f"Some donated buffers were not usable: {avals}. {call} has no output of that size and "
            "dtype left for them, or writes to them; they stay as they are.",
            DonationWarning,
        )
    given = list(tensors)
    for i in donation.taken:
        given[i] = take(tensors[i], call)
    return given


def _call_of(fun: Any) -> str:
    return f"jit({name_of(fun)}) at {current_source() or 'an unknown line'}"


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    policy: PolicyLike | None = None,
    backend: str = "inductor",
) -> Any:
    """Compile `fun`, a function of trees of tensors, and its derivative.

    It is traced and compiled once for each kind of call, as `tr.checkpoint` traces it. Closures,
    writes, random numbers and modules mean the same as there; dropping `fun` frees all of it.
    `jit(fun).trace(*args)` is its graph, as of `make_graph`; `jit(fun).lower(*args)` shows both
    compiled graphs and the generated code (`.as_text()`). Inside another transformation (`vmap`, a
    checkpoint, another `jit`) it is part of that, and donates nothing.

    Args:
        fun: a function of trees of tensors, numbers, strings and `None`; or an `nn.Module`. Without
            it, a decorator is returned.
        static_argnums: positions of arguments that are any Python values, part of the key.
        static_argnames: the same by name.
        donate_argnums: positions of arguments, trees, that the call may use up: their storage is
            that of outputs of the same size and dtype, or freed after its last use. Later only
            their shape, dtype and device can be read. A leaf that no output can use stays as it is.
        donate_argnames: the same by name. Either way an argument may be passed by position or name.
        policy: what is saved for the backward, as in `tr.checkpoint`; `None` is what plain autograd
            saves, and leaves a checkpoint inside to its own policy.
        backend: what runs the graphs. `"inductor"` compiles them, anew for each size: where sizes
            vary, pad to a few, or let `torch.compile(fun, dynamic=True, backend="torchremat")`
            make code for many. In `"eager"` and `"aot_eager"` operators run one after the other,
            and one graph serves many sizes unless arguments are donated. The graph of `"aot_eager"`
            is that of a compiler: checkpoints inside it are replaced by their operators.

    Returns:
        The compiled function.

    Raises:
        TypeError: for a `fun` that cannot be called, or argument numbers that are none.
        ValueError: for an unknown backend, an argument that `fun` does not have, or one that is
            both static and donated.
        DonationError: (a `RuntimeError`) at a call, if a donated tensor is a parameter, a view, a
            base of views, passed twice, or needed for the backward. Later, at any use of the values
            of a donated tensor.

    Warns:
        DonationWarning: if no output can use the storage of a donated tensor.

    After `jax.jit`.

    >>> import torch
    >>> step = jit(lambda p, g: p - 0.5 * g, donate_argnums=0, backend="eager")
    >>> p = torch.ones(3)
    >>> q = step(p, torch.ones(3))
    >>> q
    tensor([0.5000, 0.5000, 0.5000])
    >>> p + 1
    Traceback (most recent call last):
      ...
    torchremat.errors.DonationError: add uses the values of a tensor f32[3] that was donated to
    jit(<lambda>) at <doctest ...>:1 (<module>): ...
    """
    check_backend(backend)
    if fun is None:
        return functools.partial(
            jit,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            policy=policy,
            backend=backend,
        )
    if not callable(fun):
        raise ArgumentTypeError(
            f"jit takes a function or an nn.Module, but it was given {fun!r} "
            f"({type(fun).__name__}); options are given by keyword: jit(fun, donate_argnums=0)"
        )
    if torch.compiler.is_dynamo_compiling():  # it is part of that program
        return fun if policy is None else functools.partial(checkpoint_in_compiler, fun, policy)
    static_argnums, donate_argnums = _as_tuple(static_argnums), _as_tuple(donate_argnums)
    statics = StaticArguments(fun, static_argnums, static_argnames, lenient=True)
    donated = ArgumentSelection(fun, donate_argnums, donate_argnames, kind="donate", lenient=True)
    statics.check_signature("Jitted function")
    donated.check_signature("Jitted function")
    statics.refuse_shared(donated)
    return Jitted(
        fun, plain_autograd if policy is None else as_policy(policy), statics, donated, backend
    )


def _as_tuple(argnums: Any) -> Any:
    return tuple(argnums) if isinstance(argnums, list) else argnums
