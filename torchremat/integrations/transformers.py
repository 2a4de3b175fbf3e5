"""Models and the `Trainer` of `transformers` with a policy or a budget.

Importing this module makes `gradient_checkpointing_enable` of every model of the library take a
policy, and with it all that calls it, such as `TrainingArguments(gradient_checkpointing=True)`:

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"policy": "budget:8GiB"})

Keys are those of `torchremat.nn.wrap`: `policy`, `select`, `prevent_cse`, `compile`. A policy that
decides on one value at a time is on each layer that the library would checkpoint. A budget or a
plan is on the model as a whole, and with `select` any policy is on each selected module. Without
these keys the library does what it always did.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from torchremat.core.source import warn_user
from torchremat.errors import NoMatchError, OptionError, nearest_names
from torchremat.integrations.callback import SessionCallback
from torchremat.integrations.training_only import TrainingPolicy, remove
from torchremat.policies.policy import PolicyLike, as_policy
from torchremat.remat.module_policies import PolicyByPattern

try:
    from transformers import PreTrainedModel, TrainerCallback
    from transformers.modeling_layers import GradientCheckpointingLayer
except ImportError as error:
    raise ImportError(
        "torchremat.integrations.transformers needs transformers 4.57 or newer: pip install "
        "'transformers>=4.57,<5' (and accelerate for its Trainer)"
    ) from error

__all__ = ["RematCallback", "disable", "enable"]


def __dir__() -> list[str]:
    return sorted(__all__)


_KEYS = ("policy", "select", "prevent_cse", "compile")
_OF_PYTORCH = (
    "use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop",
)  # fmt: skip
_HINT = (
    "The model is as it was after gradient_checkpointing_disable(). Give a policy for each layer "
    "('dots', 'full'), which leaves what is between them to the model, or name with select= the "
    "modules that can be traced: of a mixture of experts its self_attn. Layers that are skipped at "
    "random are called as a whole with layerdrop=0."
)

_enable_theirs = PreTrainedModel.gradient_checkpointing_enable
_disable_theirs = PreTrainedModel.gradient_checkpointing_disable


def enable() -> None:
    """Let `gradient_checkpointing_enable` of all models take a policy. Importing has done it.

    >>> enable()
    """
    PreTrainedModel.gradient_checkpointing_enable = gradient_checkpointing_enable
    PreTrainedModel.gradient_checkpointing_disable = gradient_checkpointing_disable


def disable() -> None:
    """Undo `enable`; what is on a model stays on it.

    >>> disable(); enable()
    """
    PreTrainedModel.gradient_checkpointing_enable = _enable_theirs
    PreTrainedModel.gradient_checkpointing_disable = _disable_theirs


def gradient_checkpointing_enable(
    self: Any, gradient_checkpointing_kwargs: Mapping[str, Any] | str | None = None
) -> None:
    """Activate gradient checkpointing: the library's own, or that of a policy.

    Args:
        self: the model.
        gradient_checkpointing_kwargs: `{"policy": "budget:8GiB"}`, or just its text; see the
            module. `use_reentrant` may stay where it is: there is nothing to choose. Without a key
            of `torchremat.nn.wrap`, the options of `torch.utils.checkpoint`.

    Raises:
        OptionError: (a `ValueError`) for a key that is none, with the nearest.
        Whatever `torchremat.nn.wrap` raises; then nothing has changed.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> size = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=2)
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **size))
    >>> model.gradient_checkpointing_enable({"policy": "dots"})
    >>> model.model.layers[1].forward
    <forward of model.layers.1 under checkpoint, policy=dots_saveable>
    >>> model.gradient_checkpointing_disable()
    """
    applied = _read_options(gradient_checkpointing_kwargs)
    if applied is not None:
        enable_remat(self, applied)
        return
    remove(self)
    _enable_theirs(self, gradient_checkpointing_kwargs)


def gradient_checkpointing_disable(self: Any) -> None:
    """Deactivate gradient checkpointing, the library's own or that of a policy."""
    is_ours = bool(remove(self)) | any(_is_ours(module) for module in self.modules())
    if not is_ours:
        _disable_theirs(self)
    elif _accepts_function(self):
        self._set_gradient_checkpointing(enable=False)


def enable_remat(model: Any, applied: TrainingPolicy) -> list[str]:
    """Put `applied` on `model` of `transformers`, and set the model's own switch.

    So the model itself turns off `use_cache`, with its own warning, and `is_gradient_checkpointing`
    is true. Returns the names of the modules that run under a checkpoint now.
    """
    if applied.select is None and not _is_for_the_whole(applied.policy):
        applied = TrainingPolicy(
            applied.policy, _layers_of(model), applied.prevent_cse, applied.compile, applied.hint
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


def _is_ours(module: nn.Module) -> bool:
    return vars(module).get("_gradient_checkpointing_func") is call_through


def _is_for_the_whole(policy: PolicyLike | PolicyByPattern | None) -> bool:
    return isinstance(policy, Mapping) or as_policy(policy).is_whole_graph


def _accepts_function(model: Any) -> bool:
    parameters = inspect.signature(model._set_gradient_checkpointing).parameters
    return bool(model.supports_gradient_checkpointing) and "value" not in parameters


def _layers_of(model: Any) -> type:
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
    return GradientCheckpointingLayer  # type: ignore[no-any-return]


# --- the keys ------------------------------------------------------------------------------------


def _read_options(given: Mapping[str, Any] | str | None) -> TrainingPolicy | None:
    if isinstance(given, str):
        given = {"policy": given}
    if not given:
        return None
    unknown = [key for key in given if key not in (*_KEYS, *_OF_PYTORCH)]
    if unknown:
        raise OptionError(
            f"gradient_checkpointing_kwargs has no key {unknown[0]!r}, "
            f"{nearest_names(str(unknown[0]), (*_KEYS, *_OF_PYTORCH))}. With a policy the keys are "
            f"{', '.join(_KEYS)}; without one those of torch.utils.checkpoint"
        )
    if not any(key in given for key in _KEYS):
        return None
    if "policy" not in given:
        raise OptionError(
            f"gradient_checkpointing_kwargs={dict(given)!r} has no 'policy': say what may be "
            "saved, as in {'policy': 'dots'}, or 'full' to save nothing"
        )
    _check_of_pytorch(given)
    policy = given["policy"]
    if not isinstance(policy, Mapping):
        policy = as_policy(policy)
    return TrainingPolicy(
        **{**{k: given[k] for k in _KEYS if k in given}, "policy": policy}, hint=_HINT
    )


def _check_of_pytorch(given: Mapping[str, Any]) -> None:
    refused = [key for key in _OF_PYTORCH[2:] if key in given]
    if refused:
        cure = (
            "from_selective(policy_fn) takes the policy of a context_fn"
            if refused[0] == "context_fn"
            else "leave it out"
        )
        raise OptionError(
            f"gradient_checkpointing_kwargs: {refused[0]!r} is an option of torch.utils.checkpoint,"
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

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the policy on the model."""
        model: nn.Module = kwargs["model"]
        if args.gradient_checkpointing:
            raise OptionError(
                "TrainingArguments(gradient_checkpointing=True) and a RematCallback both "
                "checkpoint the model: leave one of them out"
            )
        applied = TrainingPolicy(self.policy, self._session.select, hint=_HINT)
        base = next(_find_pretrained(model), None)
        if base is None:
            self._session.begin(model, lambda: applied.apply_to(model), lambda: remove(model))
            return
        undo = lambda: gradient_checkpointing_disable(base)  # noqa: E731
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
