"""Models and the `Trainer` of `transformers` with a policy or a budget.

Importing this module makes `activation_checkpointing_enable` of every model of the library take a
policy, and with it all that calls it, such as `TrainingArguments(activation_checkpointing=True)`:

    model.activation_checkpointing_enable({"policy": "budget:8GiB"})

Releases before 5.23 call all of it `gradient_checkpointing`. Keys are those of
`torchremat.nn.wrap`: `policy`, `select`, `prevent_cse`, `compile`. A policy that decides on one
value at a time is on each layer that the library would checkpoint. A budget or a plan is on the
model as a whole, and with `select` any policy is on each selected module. Without these keys the
library does what it always did.

With a budget, `"loss_only": True` lets the model return its loss and no logits while it trains. A
budget with tiles then never has them whole.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from torchremat.core.source import warn_user
from torchremat.errors import NoMatchError, OptionError, nearest_names
from torchremat.integrations.callback import SessionCallback
from torchremat.integrations.training_only import Adapt, TrainingPolicy, remove
from torchremat.planning.budget import BudgetLike
from torchremat.policies.module_selection import Select
from torchremat.policies.policy import PolicyLike, as_policy
from torchremat.remat.module_policies import PolicyByPattern

try:
    from transformers import PreTrainedModel, TrainerCallback
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.utils import ModelOutput
except ImportError as error:
    raise ImportError(
        "torchremat.integrations.transformers needs transformers 4.57 or newer: pip install "
        "'torchremat[transformers]'"
    ) from error

__all__ = ["RematCallback", "disable", "enable"]


def __dir__() -> list[str]:
    return sorted(__all__)


_OF_WRAP = ("policy", "select", "prevent_cse", "compile")
_KEYS = (*_OF_WRAP, "loss_only")
_OF_PYTORCH = (
    "use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop",
)  # fmt: skip
_SWITCHES = ("enable", "disable")
_HINT = (
    "The model is as it was once checkpointing is disabled. Give a policy for each layer "
    "('dots', 'full'), which leaves what is between them to the model, or name with select= the "
    "modules that can be traced: of a mixture of experts its self_attn, or all of it with "
    "experts_implementation='grouped_mm' (transformers 5). Layers that are skipped at random are "
    "called as a whole with layerdrop=0."
)

# the library's own word for it, which 5.23 changed
_WORD = "activation" if hasattr(PreTrainedModel, "activation_checkpointing_enable") else "gradient"
_KWARGS = f"{_WORD}_checkpointing_kwargs"


def _find_last_called(switch: str) -> str:
    """The method that all ways to switch checkpointing in this release end with.

    In 5.23 those with the old name and the new one call each other, and this one last.
    """
    last = f"_{_WORD}_checkpointing_{switch}"
    return last if hasattr(PreTrainedModel, last) else last.removeprefix("_")


_THEIRS = {name: getattr(PreTrainedModel, name) for name in map(_find_last_called, _SWITCHES)}
_enable_theirs, _disable_theirs = _THEIRS.values()


def enable() -> None:
    """Let checkpointing of all models be switched on with a policy. Importing has done it.

    >>> enable()
    """
    for name, ours in zip(_THEIRS, (enable_checkpointing, disable_checkpointing), strict=True):
        setattr(PreTrainedModel, name, ours)


def disable() -> None:
    """Undo `enable`; what is on a model stays on it.

    >>> disable(); enable()
    """
    for name, theirs in _THEIRS.items():
        setattr(PreTrainedModel, name, theirs)


def enable_checkpointing(
    self: Any,
    gradient_checkpointing_kwargs: Mapping[str, Any] | str | None = None,
    every_n_layers: int = 1,
    offload: bool = False,
) -> None:
    """Activate checkpointing: the library's own, or that of a policy.

    Args:
        self: the model.
        gradient_checkpointing_kwargs: `{"policy": "budget:8GiB"}`, or just its text; see the
            module. `use_reentrant` may stay where it is: there is nothing to choose. Without a key
            of torchremat, the options of `torch.utils.checkpoint`.
        every_n_layers: the policy is on every so manieth layer, from the first one on.
        offload: only without a policy.

    Raises:
        OptionError: (a `ValueError`) for a key that is none, with the nearest, and for options
            that a policy or a selection takes the place of.
        Whatever `torchremat.nn.wrap` raises; then nothing has changed.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> size = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=2)
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **size))
    >>> enable_checkpointing(model, {"policy": "dots"})
    >>> model.model.layers[1].forward
    <forward of model.layers.1 under checkpoint, policy=dots_saveable>
    >>> disable_checkpointing(model)
    """
    applied = _read_options(gradient_checkpointing_kwargs)
    if applied is not None:
        if offload:
            raise OptionError(
                "offload=True is an option of the library's own checkpointing. With a policy, say "
                "what goes to the host: 'offload_dot_with_no_batch_dims' or 'offload_names:...'"
            )
        enable_remat(self, applied, every_n_layers)
        return
    remove(self)
    given = {"every_n_layers": (every_n_layers, 1), "offload": (offload, False)}
    # releases before 5.23 have neither
    more = {name: value for name, (value, default) in given.items() if value != default}
    _enable_theirs(self, gradient_checkpointing_kwargs, **more)


def disable_checkpointing(self: Any) -> None:
    """Deactivate checkpointing, the library's own or that of a policy."""
    is_ours = bool(remove(self)) | any(_is_ours(module) for module in self.modules())
    if not is_ours:
        _disable_theirs(self)
    elif _accepts_function(self):
        self._set_gradient_checkpointing(enable=False)


def enable_remat(model: Any, applied: TrainingPolicy, every_n_layers: int = 1) -> list[str]:
    """Put `applied` on `model` of `transformers`, and set the model's own switch.

    So the model itself turns off `use_cache`, with its own warning, and says that it checkpoints.
    Returns the names of the modules that run under a checkpoint now.
    """
    is_for_layers = applied.select is not None or not _is_for_the_whole(applied.policy)
    if applied.adapt is not None and is_for_layers:
        raise OptionError(
            "loss_only=True is for the model as a whole, and this policy is for parts of it: give "
            "a budget, such as 'budget:30%+tile', without select="
        )
    if applied.select is None and not _is_for_the_whole(applied.policy):
        applied = replace(applied, select=_select_layers(model, every_n_layers))
    elif every_n_layers != 1:
        chosen = "select=" if applied.select is not None else "a policy for the whole model"
        raise OptionError(
            f"every_n_layers={every_n_layers} chooses layers, as {chosen} does: leave one of "
            "them out"
        )
    names = applied.apply_to(model)
    if _accepts_function(model):
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=call_through)
    return names


def call_through(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `function`. Layers that run under `checkpoint` call this in place of the library's own.

    >>> call_through(max, 1, 2)
    2
    """
    return function(*args, **kwargs)


def return_loss_only(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model that returns its loss and nothing else, where it has one."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        found = forward(*args, **kwargs)
        if not isinstance(found, ModelOutput) or found.get("loss") is None:
            warn_user(
                "loss_only=True has no effect: the model returned no loss by name. Give it labels, "
                "and leave return_dict=True",
                UserWarning,
            )
            return found
        return type(found)(loss=found["loss"])

    return run


def _is_ours(module: nn.Module) -> bool:
    return vars(module).get("_gradient_checkpointing_func") is call_through


def _is_for_the_whole(policy: PolicyLike | PolicyByPattern | None) -> bool:
    return isinstance(policy, Mapping) or as_policy(policy).is_whole_graph


def _accepts_function(model: Any) -> bool:
    parameters = inspect.signature(model._set_gradient_checkpointing).parameters
    return bool(model.supports_gradient_checkpointing) and "value" not in parameters


def _select_layers(model: Any, every: int) -> Select:
    kind = type(model).__name__
    if not model.supports_gradient_checkpointing:
        raise OptionError(
            f"{kind} does not support gradient checkpointing, so it has no layers for a policy: "
            "name them with select=, or give a budget, which is for the model as a whole"
        )
    if not any(isinstance(module, GradientCheckpointingLayer) for module in model.modules()):
        raise NoMatchError(
            f"{kind} has no GradientCheckpointingLayer: it calls its layers in a way of its own. "
            "Name them with select=, as in {'policy': 'dots', 'select': 'model.layers.*'}"
        )
    if every == 1:
        return GradientCheckpointingLayer  # type: ignore[no-any-return]
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    chosen = set(map(id, layers[::every]))
    return lambda module: id(module) in chosen


# --- the keys ------------------------------------------------------------------------------------


def _read_options(given: Mapping[str, Any] | str | None) -> TrainingPolicy | None:
    if isinstance(given, str):
        given = {"policy": given}
    if not given:
        return None
    unknown = [key for key in given if key not in (*_KEYS, *_OF_PYTORCH)]
    if unknown:
        raise OptionError(
            f"{_KWARGS} has no key {unknown[0]!r}, "
            f"{nearest_names(str(unknown[0]), (*_KEYS, *_OF_PYTORCH))}. With a policy the keys are "
            f"{', '.join(_KEYS)}; without one those of torch.utils.checkpoint"
        )
    if not any(key in given for key in _KEYS):
        return None
    if "policy" not in given:
        raise OptionError(
            f"{_KWARGS}={dict(given)!r} has no 'policy': say what may be "
            "saved, as in {'policy': 'dots'}, or 'full' to save nothing"
        )
    _check_of_pytorch(given)
    policy = given["policy"]
    if not isinstance(policy, Mapping):
        policy = as_policy(policy)
    return TrainingPolicy(
        **{**{k: given[k] for k in _OF_WRAP if k in given}, "policy": policy},
        hint=_HINT,
        adapt=_read_loss_only(given.get("loss_only", False)),
    )


def _read_loss_only(given: Any) -> Adapt | None:
    if not isinstance(given, bool):
        raise OptionError(f"loss_only={given!r} is neither True nor False")
    return return_loss_only if given else None


def _check_of_pytorch(given: Mapping[str, Any]) -> None:
    refused = [key for key in _OF_PYTORCH[2:] if key in given]
    if refused:
        cure = (
            "from_selective(policy_fn) takes the policy of a context_fn"
            if refused[0] == "context_fn"
            else "leave it out"
        )
        raise OptionError(
            f"{_KWARGS}: {refused[0]!r} is an option of torch.utils.checkpoint,"
            f" which a policy takes the place of: {cure}"
        )
    if given.get("use_reentrant"):
        warn_user(
            "use_reentrant=True is ignored: with a policy a graph is replayed, which is neither "
            "reentrant nor not. Leave it out",
            UserWarning,
        )
    if not given.get("preserve_rng_state", True):
        warn_user(
            "preserve_rng_state=False is ignored: with a policy random numbers are always drawn "
            "as they were. Leave it out",
            UserWarning,
        )


# --- the Trainer ---------------------------------------------------------------------------------


class RematCallback(SessionCallback, TrainerCallback):  # type: ignore[misc]
    """Put a policy or a budget on the model of a `Trainer` for the time of its training.

    `Trainer(model, args, callbacks=[RematCallback(budget="8GiB")])`. The report of the first step
    and the measured peak of the second are logged: a line each on the logger `torchremat` (INFO;
    the whole report at DEBUG), and in the Trainer's own log `remat_saved_bytes`,
    `remat_recomputed_bytes` and `remat_peak_bytes`. At the end the model is as it was; after an
    error too where the training runs inside `with callback:`.

    Args:
        policy: what may be saved: a policy, its spelling, or a dict from selections to those.
        budget: instead of it bytes of peak memory, as `memory_budget` takes them.
        select: the modules that it is for, as `torchremat.nn.wrap` takes it, by their names in the
            model of `transformers` (also where `peft` is around it).
        loss_only: whether the model returns its loss and no logits while it trains, so that a
            budget with tiles never has them whole. The trainer must not read them.

    Attributes:
        report: the report of the first step.
        peak_bytes: the most bytes alive at one time that the second step's forward and backward
            passes allocated (with `gradient_accumulation_steps`, all of them).

    Raises:
        OptionError: (a `ValueError`) unless one of `policy` and `budget` is given.

    >>> callback = RematCallback(budget="50%")
    >>> callback.policy
    memory_budget('50%')
    """

    def __init__(
        self,
        policy: PolicyLike | PolicyByPattern | None = None,
        *,
        budget: BudgetLike | None = None,
        select: Select | None = None,
        loss_only: bool = False,
    ) -> None:
        super().__init__(policy, budget=budget, select=select)
        self._adapt = _read_loss_only(loss_only)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the policy on the model."""
        model: nn.Module = kwargs["model"]
        if getattr(args, f"{_WORD}_checkpointing"):
            raise OptionError(
                f"TrainingArguments({_WORD}_checkpointing=True) and a RematCallback both "
                "checkpoint the model: leave one of them out"
            )
        applied = TrainingPolicy(self.policy, self._session.select, hint=_HINT, adapt=self._adapt)
        base = next(_find_pretrained(model), None)
        if base is None:
            self._session.begin(model, lambda: applied.apply_to(model), lambda: remove(model))
            return
        undo = lambda: disable_checkpointing(base)  # noqa: E731
        self._session.begin(base, lambda: enable_remat(base, applied), undo)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step begins."""
        self._session.step_begins()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The gradients of a step are there."""
        self._session.passes_end()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is over."""
        self._session.step_ends()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the figures to what the Trainer logs."""
        figures = self._session.figures()
        if kwargs.get("logs") is not None:
            kwargs["logs"].update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as it was."""
        self._session.end()


def _find_pretrained(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


enable()
