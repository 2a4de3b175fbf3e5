"""Modules that run under `checkpoint`, and are in every other way what they were.

A wrapped module has one attribute more: `forward`, in its own `__dict__`, which hides that of its
class. So hooks of the module run outside the checkpoint, those of its submodules inside.
"""

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from torchremat import _torch
from torchremat.api_util import StaticArguments
from torchremat.compile.lowering import backend_of, check_backend
from torchremat.errors import ArgumentTypeError, ArgumentValueError, NoMatchError, NoStepError
from torchremat.graph.parallel_modules import parallel_kind
from torchremat.nn.select import Select, select_modules
from torchremat.remat.checkpoint import Checkpointed
from torchremat.remat.explain import Report, report_of_programs
from torchremat.remat.guards import Variable, variables_of
from torchremat.remat.policies import Policy, PolicyLike, as_policy
from torchremat.remat.program import FunctionProgram
from torchremat.remat.under_dynamo import checkpoint_in_compiler, outside_compiler

AnyModule = TypeVar("AnyModule", bound=nn.Module)
PolicyByPattern = Mapping[Select, PolicyLike | None]


def wrap(
    module: AnyModule,
    policy: PolicyLike | PolicyByPattern | None = None,
    *,
    select: Select | None = None,
    prevent_cse: Any = True,
    compile: str | None = None,
) -> AnyModule:
    """Make `module`, or the submodules that `select` means, run under `checkpoint`. In place.

    Classes, qualified names, `state_dict`, parameters, hooks, `train` and `eval`, `isinstance`,
    pickling and `copy.deepcopy` are as before; a copy is wrapped and independent. (`copy.copy` and
    `nn.DataParallel` share a module's attributes between modules, so what they make would run with
    the parameters of the original: unwrap first.) Wrapping twice replaces the first. Nothing is
    wrapped if there is an error.

    Args:
        module: what to wrap. A module that the model has in several places is wrapped once.
        policy: what may be saved, `None` for nothing but inputs; module names in it, as in
            `save_modules("layers.*.attn")`, are counted from `module`. A dict from selections to
            policies wraps each submodule under the policy of the first that matches it.
        select: `"layers.*"`, `"every:3"`, `"first:2,!layers.0"`, a class or a predicate:
            `torchremat.nn.select` has the rules. `None` is `module` itself.
        prevent_cse: as `checkpoint` takes it.
        compile: a backend that compiles the forward and backward graphs of each checkpoint:
            `"inductor"`, or `"aot_eager"` to look for what goes wrong. Random masks are then kept,
            not drawn again, and each new size is compiled anew. (`torch.compile(model)` around a
            wrapped model compiles what lies between the checkpoints, too.)

    Returns:
        `module`.

    Raises:
        NoMatchError: (a `ValueError`) if a selection matches nothing, with the nearest names.
        ValueError: if a selection cannot be read, is out of range, or has no effect; or if there is
            no such backend.
        TypeError: for a `module`, `select`, `policy` or `prevent_cse` that is none.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    >>> model = wrap(model, "dots", select="first:2")
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> sorted(model.state_dict()), type(model[0]).__name__
    (['0.bias', '0.weight', '2.bias', '2.weight'], 'Linear')
    """
    if not isinstance(module, nn.Module):
        kind = f"the class {module.__name__}" if isinstance(module, type) else repr(module)
        raise ArgumentTypeError(
            f"wrap takes an nn.Module, but it was given {kind}; a function is given to checkpoint"
        )
    if compile is not None:
        check_backend(compile, "compile")
    _check_prevent_cse(prevent_cse)
    for name, submodule, chosen in assigned_policies(module, policy, select):
        vars(submodule)["forward"] = RematForward(submodule, name, chosen, prevent_cse, compile)
    return module


def unwrap(module: AnyModule) -> AnyModule:
    """Undo `wrap` in `module` and all of its submodules, in place, and return `module`.

    What was never wrapped stays as it is.

    >>> linear = nn.Linear(2, 2)
    >>> before = dict(vars(linear))
    >>> vars(unwrap(wrap(linear))) == before
    True
    """
    for submodule in module.modules():
        forward = wrapped_forward(submodule)
        if forward is not None:
            forward.forget()
            del vars(submodule)["forward"]
            if forward.hidden:
                vars(submodule)["forward"] = forward.hidden[0]
    return module


def report(module: nn.Module) -> Report:
    """What the last step kept, recomputed and offloaded, per wrapped module in `module`.

    Of each the last call that could be differentiated, one under `no_grad` keeps nothing. A wrapped
    module that ran inside another is a part of that one.

    Raises `NoMatchError` (a `ValueError`) if nothing in `module` is wrapped, and `RuntimeError` if
    nothing that is wrapped has run yet.

    >>> model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    >>> _ = model(torch.ones(2, 4))
    >>> sorted({row.decision for row in report(model)})
    ['input', 'parameter', 'recomputed']
    """
    found = [(n, f) for n, m in module.named_modules() if (f := wrapped_forward(m)) is not None]
    if not found:
        raise NoMatchError(
            f"nothing in {type(module).__name__} is wrapped; torchremat.nn.wrap(model, policy, "
            "select=...) does it"
        )
    programs: list[tuple[str, FunctionProgram]] = []
    for name, forward in found:
        program = forward.last_program
        if program is not None and not any(_is_inside(name, outer) for outer, _ in programs):
            programs.append((name, program))
    if not programs:
        names = ", ".join(name or type(module).__name__ for name, _ in found[:3])
        raise NoStepError(
            f"none of the {len(found)} wrapped modules ({names}{', ...' * (len(found) > 3)}) has "
            "run with gradients enabled: run a step, then ask for the report"
        )
    return report_of_programs(programs)


def _is_inside(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


# --- the arguments -------------------------------------------------------------------------------


def _check_prevent_cse(prevent_cse: object) -> None:
    leaves, _ = _torch.tree_flatten(prevent_cse)
    if not all(isinstance(leaf, bool) for leaf in leaves):
        raise ArgumentTypeError(
            "prevent_cse must be a bool, or a tuple or tree of bools over the arguments, but it is "
            f"{prevent_cse!r}"
        )


def _check_traceable(name: str, module: nn.Module) -> None:
    kind = type(module).__name__
    called = f"{name!r} ({kind})" if name else f"the {kind}"
    if isinstance(module, torch.jit.ScriptModule):
        raise ArgumentTypeError(
            f"{called} is compiled by TorchScript, so there is no Python to trace: wrap the module "
            "that it was made from"
        )
    for path, inner in module.named_modules():
        inner_kind = parallel_kind(inner)
        if inner_kind is not None and (inner is not module or "fully_shard" not in inner_kind):
            place = f"{path!r} in it" if path else "it"
            raise ArgumentTypeError(
                f"{called} cannot be traced as a whole, since {place} {inner_kind}, which works "
                "between modules: wrap the modules inside, torchremat.nn.wrap(model, policy, "
                "select='layers.*') say, or the model that a DistributedDataParallel is made from. "
                "torchremat.nn.split_budget makes one budget into policies for layers"
            )
    if "_orig_mod" in dict(module.named_children()):
        raise ArgumentTypeError(
            f"{called} is a module compiled by torch.compile: wrap the module that it was made "
            "from, or in it, before it is compiled"
        )


def assigned_policies(
    module: nn.Module, policy: PolicyLike | PolicyByPattern | None, select: Select | None
) -> list[tuple[str, nn.Module, Policy]]:
    """The modules that `wrap` wraps, each with its name and its policy. Raises as `wrap` does."""
    assigned = _assigned_policies(module, policy, select)
    for name, submodule, _ in assigned:
        _check_traceable(name, submodule)
    return assigned


def _assigned_policies(
    module: nn.Module, policy: PolicyLike | PolicyByPattern | None, select: Select | None
) -> list[tuple[str, nn.Module, Policy]]:
    if not isinstance(policy, Mapping):
        chosen = as_policy(policy)
        return [(name, found, chosen) for name, found in select_modules(module, select)]
    if select is not None:
        raise ArgumentValueError(
            f"select={select!r} and a dict of policies both say which modules are meant; leave out "
            "select, whose ',' and '!' the keys of the dict have too"
        )
    if not policy:
        raise ArgumentValueError(
            "the dict of policies is empty: give it a pattern, {'layers.*': 'dots'}"
        )
    assigned: dict[int, tuple[str, nn.Module, Policy]] = {}
    for pattern, value in policy.items():
        chosen = as_policy(value)
        if pattern is None:
            raise ArgumentTypeError(
                "the keys of a dict of policies are patterns, but one of them is None"
            )
        found = select_modules(module, pattern)
        left = [pair for pair in found if id(pair[1]) not in assigned]
        if not left:
            raise ArgumentValueError(
                f"{pattern!r}: {chosen!r} has no effect: keys before it match {found[0][0]!r} and "
                "all else that it matches. Write the narrower pattern first"
            )
        assigned |= {id(found): (name, found, chosen) for name, found in left}
    return list(assigned.values())


# --- the forward of a wrapped module -------------------------------------------------------------


class RematForward:
    """What a wrapped module has as `forward`: its own forward under `checkpoint`.

    It refers to its module weakly, and nothing that it holds refers to the module, so that dropping
    a wrapped module frees it at once. To `inspect.signature` and other readers of `__wrapped__`,
    `__self__` and `__func__` it looks like the bound method that it hides.

    Attributes:
        name: qualified name of the module in what was given to `wrap`.
        policy: what may be saved.
        prevent_cse: as `checkpoint` takes it.
        compile: the backend that compiles the graphs, if any.
        hidden: the `forward` that the module itself, not its class, had before, if any.
    """

    __slots__ = (
        "__weakref__", "_function", "_key", "_module", "_uncompiled", "compile", "hidden", "name",
        "policy", "prevent_cse",
    )  # fmt: skip

    name: str
    policy: Policy
    prevent_cse: Any
    compile: str | None
    hidden: tuple[()] | tuple[Any]
    _key: int
    _module: weakref.ref[nn.Module]
    _function: Callable[..., Any]
    _uncompiled: Callable[..., Any] | None

    def __init__(
        self,
        module: nn.Module,
        name: str,
        policy: Policy,
        prevent_cse: Any,
        compile: str | None = None,
    ) -> None:
        before = wrapped_forward(module)
        if before is not None:
            before.forget()
            hidden = before.hidden
        else:
            hidden = (vars(module)["forward"],) if "forward" in vars(module) else ()
        self.__setstate__(
            {
                "module": module,
                "name": name,
                "policy": policy,
                "prevent_cse": prevent_cse,
                "compile": compile,
                "hidden": hidden,
            }
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the module, under `checkpoint`."""
        if args and args[0] is self._module():  # a method may have been made of it
            args = args[1:]
        function = functools.partial(self._function, self._module())
        if torch.compiler.is_exporting():
            return function(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            if self._uncompiled is not None:
                return self._uncompiled(self, args, kwargs)
            return checkpoint_in_compiler(function, self.policy, *args, **kwargs)
        run = _running.get(self._key)
        if run is None:
            run = _running.setdefault(self._key, _CheckpointedForward(self, self._key))
        return run(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<forward of {self.name or 'a module'} under checkpoint, policy={self.policy!r}>"

    @property
    def __self__(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError(
                f"{self!r}: the module is gone. Keep the module and call it; its forward alone "
                "does not keep it"
            )
        return module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        if self.hidden:
            return self.hidden[0]  # type: ignore[no-any-return]
        module = self.__self__
        function = inspect.getattr_static(type(module), "forward")
        bind = getattr(type(function), "__get__", None)
        bound: Callable[..., Any] = bind(function, module, type(module)) if bind else function
        return bound

    @property
    def __func__(self) -> Any:  # what wraps the method of a model, for autocast say, takes it
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is not self._module():  # a copy, of a forward that wraps this one
                return type(module).forward(module, *args, **kwargs)
            return self(*args, **kwargs)

        original = self._original
        functools.update_wrapper(run, original)
        vars(run)["__wrapped__"] = self
        if isinstance(original, FunctionType):
            vars(run)["__signature__"] = inspect.signature(original)
        return run

    @property
    def _original(self) -> Any:
        return getattr(self.__wrapped__, "__func__", self.__wrapped__)

    @property
    def __code__(self) -> Any:  # torch.export reads it
        return self._original.__code__

    @property
    def __name__(self) -> str:
        return getattr(self.__wrapped__, "__name__", "forward")

    @property
    def last_program(self) -> FunctionProgram | None:
        """The program of the last call that could be differentiated."""
        run = _running.get(self._key)
        return None if run is None else run.last_program

    def forget(self) -> None:
        """Forget what was traced."""
        _running.pop(self._key, None)

    # pickling, and with it copying: as a bound method is, together with its object

    def __getstate__(self) -> dict[str, Any]:
        names = ("name", "policy", "prevent_cse", "compile", "hidden")
        return {"module": self.__self__, **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self._key = next(_keys)
        self._module = weakref.ref(state.pop("module"))
        for name, value in state.items():
            setattr(self, name, value)
        self._function = _function_of(self.__self__, self)
        self._uncompiled = outside_compiler() if self.policy.is_whole else None


def wrapped_forward(module: nn.Module) -> RematForward | None:
    """The forward that `wrap` gave to `module`, if it did."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, RematForward) else None


class _CheckpointedForward(Checkpointed):
    """The checkpoint of a module's forward, which does not keep the module alive."""

    def __init__(self, forward: RematForward, key: int) -> None:
        module, running = forward.__self__, _running

        def forget(_: weakref.ref[nn.Module]) -> None:
            running.pop(key, None)

        self._forward = weakref.ref(forward)
        self._module = weakref.ref(module, forget)
        self._function = forward._function
        fun = self.fun
        statics = StaticArguments(fun, (), ())
        super().__init__(
            fun,
            forward.policy,
            forward.prevent_cse,
            statics,
            lenient=True,
            module_prefix=forward.name,
            compiler=backend_of(forward.compile),
        )
        vars(self).pop("__wrapped__", None)

    @property
    def fun(self) -> Callable[..., Any]:
        """The original forward, bound to the module. Whoever keeps it keeps the module."""
        return MethodType(self._function, self._module())

    @fun.setter
    def fun(self, value: Callable[..., Any]) -> None:
        """Made anew each time."""

    def _variables(self) -> list[Variable]:
        forward = self._forward()
        return variables_of(self.fun if forward is None else forward.__wrapped__)


def _function_of(module: nn.Module, forward: RematForward) -> Callable[..., Any]:
    """A function of a module and arguments that is its forward, and does not hold the module."""
    if not forward.hidden:
        function = inspect.getattr_static(type(module), "forward")
        if isinstance(function, FunctionType):
            return function
    reference = weakref.ref(forward)

    def call_original(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = reference()
        assert forward is not None, "the module was unwrapped while autograd needed its forward"
        return forward.__wrapped__(*args, **kwargs)

    call_original.__qualname__ = f"{type(module).__qualname__}.forward"
    return call_original


_keys: Iterator[int] = itertools.count()
_running: dict[int, _CheckpointedForward] = {}
"""The checkpoint of each `RematForward` that has been called, while its module lives.

Not in the `RematForward`: traces hold the attributes of the module, `forward` among them, and a
reference back to the traces would be a cycle.
"""
