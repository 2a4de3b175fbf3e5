"""Models of `transformers` with a policy train as without, and are afterwards what they were."""

import copy
import doctest
import gc
import json
import pickle
import warnings
from dataclasses import replace

import pytest
import torch

import torchremat as tr
from tests.architectures import ARCHITECTURES, IS_5
from tests.helpers import assert_same
from tests.nn.test_architectures import assert_trains_as_plain
from torchremat.errors import (
    BudgetError,
    BudgetSpellingError,
    ConcretizationError,
    NoMatchError,
    OptionError,
    PolicyValueError,
)
from torchremat.measure import LiveBytes

transformers = pytest.importorskip("transformers")

from torchremat.integrations import transformers as integration  # noqa: E402
from torchremat.integrations.training_only import find_training_forward  # noqa: E402
from torchremat.integrations.transformers import RematCallback  # noqa: E402

FAST = ("gpt2", "bert, fused attention", "mamba")
SUPPORTED = [
    name
    for name, a in ARCHITECTURES.items()
    if not a.layers_refused and getattr(transformers, a.model).supports_gradient_checkpointing
]
WHOLE = ("gpt2", "bert", "vit", *(["mixtral, experts in one product"] if IS_5 else []))
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attention_dropout": 0.1,
}


# the library's own word for it, which 5.23 changed
WORD = (
    "activation"
    if hasattr(transformers.PreTrainedModel, "is_activation_checkpointing")
    else "gradient"
)
KWARGS = f"{WORD}_checkpointing_kwargs"


READS_OLD_NAME = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
"""For peft, which reads the attribute of the model by its old name."""


def switch_on(model, options, **more):
    getattr(model, f"{WORD}_checkpointing_enable")(**{KWARGS: options}, **more)


def switch_off(model):
    getattr(model, f"{WORD}_checkpointing_disable")()


def is_on(model):
    return getattr(model, f"is_{WORD}_checkpointing")


def make_model(**settings):
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **settings})).train()


POLICIES = pytest.mark.parametrize(
    "policy", ["dots", pytest.param("budget:80%", marks=pytest.mark.slow)]
)


def wrapped(model):
    return [name for name, m in model.named_modules() if find_training_forward(m) is not None]


def step(model, seed=1, **extra):
    torch.manual_seed(seed)
    x = torch.randint(0, 64, (2, 16))
    model.zero_grad()
    loss = model(input_ids=x, labels=x, **extra).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], torch.get_rng_state()


def larger(batch):
    """Eight times the batch: of a tiny model's step the gradients are otherwise the peak."""
    return {name: torch.cat([t] * 8) for name, t in batch.items()}


# --- the model's own switch ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in SUPPORTED]
)
def test_layers_of_every_architecture_train_as_plain(name):
    a = ARCHITECTURES[name]
    plain = a.build()
    model = copy.deepcopy(plain)
    switch_on(model, {"policy": "dots"})
    assert len(wrapped(model)) >= 1
    assert_trains_as_plain(model, plain, a)
    assert any(row.decision == "recomputed" for row in tr.nn.report(model))


def test_there_are_many_architectures():
    assert len(SUPPORTED) >= 21


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_a_budget_is_for_the_model_as_a_whole(name):
    a = replace(ARCHITECTURES[name], batch=lambda: larger(ARCHITECTURES[name].batch()))
    plain = a.build()
    model = copy.deepcopy(plain)
    switch_on(model, {"policy": "budget:80%"})
    assert wrapped(model) == [""]
    assert_trains_as_plain(model, plain, a)
    assert tr.nn.report(model).by_decision()["recomputed"] > 0


LAYERS = [f"model.layers.{i}" for i in range(2)]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("full", LAYERS),
        ({"policy": None}, LAYERS),
        ({"policy": "ops:aten.mm", "use_reentrant": False}, LAYERS),
        ({"policy": tr.checkpoint_policies.dots_saveable}, LAYERS),
        ({"policy": "dots", "select": "every:1,!model.layers.0"}, LAYERS[1:]),
        ({"policy": "budget:90%", "select": "model.layers.1"}, LAYERS[1:2]),
        ({"policy": {"model.layers.0": "dots", "model.layers.*": "full"}}, LAYERS),
        ({"policy": "full", "prevent_cse": False, "compile": "aot_eager"}, LAYERS),
    ],
    ids=str,
)
@pytest.mark.sampled(3)
def test_keys_are_those_of_wrap(options, names):
    model, plain = make_model(), make_model(use_cache=False)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    switch_on(model, options)
    assert wrapped(model) == names
    assert is_on(model)
    assert_same(step(model), step(plain))
    switch_off(model)
    assert wrapped(model) == []
    assert not is_on(model)
    for name, module in model.named_modules():
        assert vars(module).keys() - before[name].keys() <= {
            "gradient_checkpointing",
            "_gradient_checkpointing_func",
        }
    assert_same(step(model, use_cache=False), step(plain))


def test_the_second_of_two_replaces_the_first():
    model = make_model()
    switch_on(model, {"policy": "budget:80%"})
    switch_on(model, {"policy": "dots"})
    assert wrapped(model) == LAYERS
    switch_on(model, {"use_reentrant": False})
    assert wrapped(model) == []
    assert is_on(model)
    assert_same(step(model), step(make_model(use_cache=False)))
    switch_off(model)
    assert not is_on(model)


def test_what_the_user_wrapped_is_wrapped_again_afterwards():
    model = tr.nn.wrap(make_model(), "full", select="model.layers.*")
    mine = [layer.forward for layer in model.model.layers]
    switch_on(model, {"policy": "dots"})
    switch_off(model)
    assert [layer.forward for layer in model.model.layers] == mine
    assert_same(step(model, use_cache=False), step(make_model(use_cache=False)))


@POLICIES
def test_in_eval_mode_it_generates_from_caches(policy):
    model, plain = make_model(), make_model()
    switch_on(model, {"policy": policy})
    step(model)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    x = torch.ones(1, 3, dtype=torch.long)
    assert_same(model.eval().generate(x, **options), plain.eval().generate(x, **options))
    assert model(x, use_cache=True).past_key_values is not None


@POLICIES
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_checkpointed_and_independent(policy, clone):
    model = make_model()
    switch_on(model, {"policy": policy})
    other = clone(model)
    switch_off(model)
    assert wrapped(other) == ([""] if "budget" in policy else LAYERS)
    assert_same(step(other), step(make_model(use_cache=False)))
    switch_off(other)
    assert wrapped(other) == []


def test_without_the_patch_the_library_is_as_it_was():
    integration.disable()
    try:
        model = make_model()
        switch_on(model, {"policy": "dots", "use_reentrant": False})
        assert wrapped(model) == []
        assert is_on(model)
    finally:
        integration.enable()


def test_a_model_that_overrides_its_switch_passes_a_policy_on():
    class Overriding(transformers.LlamaForCausalLM):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None, **more):
            self.is_overridden = True
            super().gradient_checkpointing_enable(gradient_checkpointing_kwargs, **more)

    model = Overriding(transformers.LlamaConfig(**SIZES))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)
        switch_on(model, "dots")
    assert model.is_overridden
    assert wrapped(model) == LAYERS


@pytest.mark.skipif(WORD == "gradient", reason="it has one name, and chooses no layers")
class TestSinceItHasTwoNames:
    def test_the_deprecated_one_takes_a_policy(self):
        model = make_model()
        with pytest.warns(FutureWarning, match="activation_checkpointing_enable"):
            model.gradient_checkpointing_enable({"policy": "dots"})
        assert wrapped(model) == LAYERS
        with pytest.warns(FutureWarning, match="activation_checkpointing_disable"):
            model.gradient_checkpointing_disable()
        assert wrapped(model) == []

    def test_every_second_layer_is_checkpointed(self):
        plain = make_model(use_cache=False, num_hidden_layers=3)
        model = make_model(num_hidden_layers=3)
        switch_on(model, {"policy": "dots"}, every_n_layers=2)
        assert wrapped(model) == ["model.layers.0", "model.layers.2"]
        assert_same(step(model), step(plain))
        switch_on(model, {"use_reentrant": False}, every_n_layers=2)
        assert wrapped(model) == []
        assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False, True]

    def test_a_trainer_reads_it_from_its_arguments(self, tmp_path):
        model = make_model()
        options = {"policy": "dots", "every_n_layers": 2}
        trained(model, tmp_path, activation_checkpointing=True, **{KWARGS: options}, max_steps=1)
        assert wrapped(model) == LAYERS[:1]

    @pytest.mark.parametrize(
        ("options", "more", "message"),
        [
            ("dots", {"offload": True}, "offload=True is an option of the library's own"),
            ("budget:80%", {"every_n_layers": 2}, "as a policy for the whole model does"),
            ({"policy": "dots", "select": "first:1"}, {"every_n_layers": 2}, "as select= does"),
        ],
    )
    def test_an_option_that_a_policy_takes_the_place_of_is_refused(self, options, more, message):
        model = make_model()
        with pytest.raises(OptionError, match=message):
            switch_on(model, options, **more)
        assert wrapped(model) == []


# --- what cannot be honoured ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"polcy": "dots"}, OptionError, "no key 'polcy', nearest: 'policy'"),
        ({"policy": "dots", "selct": "a"}, OptionError, "no key 'selct', nearest: 'select'"),
        ({"select": "model.layers.*"}, OptionError, "has no 'policy'"),
        ({"policy": "dots", "context_fn": print}, OptionError, "from_selective"),
        ({"policy": "dots", "early_stop": False}, OptionError, "'early_stop' is an option of"),
        ({"policy": "dost"}, PolicyValueError, "nearest: 'dots'"),
        ("budget:8GiBB", BudgetSpellingError, "nearest: 'GiB'"),
        ({"policy": "dots", "select": "model.layer.*"}, NoMatchError, "model.layers.0"),
        ({"policy": "dots", "compile": "inductr"}, ValueError, "nearest: 'inductor'"),
        ({"policy": "plan:no/such/file"}, OSError, "no/such/file"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_and_changes_nothing(options, error, message):
    model = make_model()
    with pytest.raises(error, match=message):
        switch_on(model, options)
    assert wrapped(model) == []
    assert not is_on(model)


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"preserve_rng_state": False}])
def test_what_has_no_effect_is_said(options):
    with pytest.warns(UserWarning, match=f"{next(iter(options))}=.* is ignored"):
        switch_on(make_model(), {"policy": "dots", **options})


@pytest.mark.slow
def test_a_budget_that_cannot_be_met_names_one_that_can():
    model = make_model()
    switch_on(model, {"policy": "budget:1KiB"})
    with pytest.raises(BudgetError, match="The least that was found") as caught:
        step(model)
    switch_on(model, {"policy": f"budget:{caught.value.least_bytes}B"})
    assert_same(step(model), step(make_model(use_cache=False)))


def test_a_model_that_cannot_be_traced_is_told_why_and_trains_without(monkeypatch):
    a = ARCHITECTURES["opt, layers dropped"]
    plain = a.build()
    model = copy.deepcopy(plain)
    switch_on(model, {"policy": "budget:100%"})
    monkeypatch.setattr(tr.config, "untraceable", "error")
    with pytest.raises(ConcretizationError, match=r"modeling_opt\.py:\d+") as caught:
        model(**a.batch())
    assert sum("layerdrop=0" in note for note in caught.value.__notes__) == 1
    monkeypatch.setattr(tr.config, "untraceable", "modules")
    assert_trains_as_plain(model, plain, a)
    assert {row.way for row in tr.nn.report(model)} == {"tape"}
    switch_on(model, {"policy": "dots"})
    assert_trains_as_plain(model, plain, a)
    switch_off(model)
    assert_trains_as_plain(model, plain, a)


PADDED = torch.ones(2, 16, dtype=torch.long)
PADDED[1, 9:] = 0
BATCHES = {
    "padded": {"attention_mask": PADDED},
    "padded on the left": {"attention_mask": PADDED.flip(1)},
    "none padded": {"attention_mask": torch.ones_like(PADDED)},
    "without a mask": {},
    "packed": {"position_ids": torch.arange(16).repeat(2, 1) % 6},
}
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Llama", SIZES),
        ("GPT2", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}),
        ("Bert", {key: value for key, value in SIZES.items() if "key_value" not in key}),
        pytest.param("T5", {**_T5, "decoder_start_token_id": 0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_whole_model_trains_as_without_whether_or_not_the_batch_is_padded(kind, settings):
    head = {"Bert": "MaskedLM", "T5": "ConditionalGeneration"}.get(kind, "CausalLM")
    head = "LMHeadModel" if kind == "GPT2" else f"For{head}"
    config = getattr(transformers, f"{kind}Config")(**settings, use_cache=False)
    plain = getattr(transformers, f"{kind}{head}")(config).train()
    model = tr.nn.wrap(copy.deepcopy(plain), "full")
    for name in ("padded", *BATCHES, "padded"):
        if name != "packed" or kind != "T5":
            assert_same(step(model, **BATCHES[name]), step(plain, **BATCHES[name]))


@pytest.mark.slow
def test_a_budget_holds_whether_or_not_the_batch_is_padded():
    plain = make_model(use_cache=False)
    model = make_model(use_cache=False)
    switch_on(model, {"policy": "budget:70%"})
    for extra in BATCHES.values():
        assert_same(step(model, **extra), step(plain, **extra))
        assert peak_of_step(model, extra) <= 0.7 * peak_of_step(plain, extra)


def peak_of_step(model, extra):
    """Bytes, of a step that is neither traced nor planned."""
    model.zero_grad()
    gc.collect()
    with LiveBytes() as memory:
        step(model, **extra)
    return memory.peak


def test_a_model_that_the_library_does_not_checkpoint_takes_a_budget_or_a_selection():
    a = ARCHITECTURES["resnet, batch norm"]
    plain = a.build()
    model = copy.deepcopy(plain)
    with pytest.raises(OptionError, match="ResNetForImageClassification does not support gradient"):
        switch_on(model, {"policy": "dots"})
    switch_on(model, {"policy": "dots", "select": "**.stages.*"})
    assert_trains_as_plain(model, plain, a)
    switch_off(model)
    assert wrapped(model) == []


# --- the Trainer ---------------------------------------------------------------------------------


class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randint(0, 64, (24, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.x[i]}


OPTIONS = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "seed": 1,
    "disable_tqdm": True,
}


def trained(model, path, callbacks=(), data=None, eval_dataset=None, **options):
    """Weights after a training, and the trainer."""
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(str(path), **{**OPTIONS, **options})
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=data or Data(),
        eval_dataset=eval_dataset,
        callbacks=list(callbacks),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, trainer


@pytest.mark.parametrize("bf16", [False, True])
@POLICIES
def test_a_trainer_with_a_policy_in_its_arguments_trains_as_without(policy, bf16, tmp_path):
    expected, _ = trained(make_model(use_cache=False), tmp_path, bf16=bf16)
    model = make_model()
    options = {f"{WORD}_checkpointing": True, "bf16": bf16}
    options[KWARGS] = json.dumps({"policy": policy})
    found, _ = trained(model, tmp_path, **options)
    assert_same(found, expected)
    (forward, *_) = [f for m in model.modules() if (f := find_training_forward(m)) is not None]
    assert forward.last_program is not None
    switch_off(model)
    assert wrapped(model) == []


@pytest.mark.parametrize("way", ["command line", "command line, bare", "yaml", "json"])
def test_a_policy_is_given_as_text(way, tmp_path):
    pytest.importorskip("accelerate")
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    options = {"output_dir": str(tmp_path), f"{WORD}_checkpointing": True, "use_cpu": True}
    options[KWARGS] = {"policy": "dots", "select": "last:1"}
    path = tmp_path / "options"
    if way.startswith("command"):
        text = json.dumps(options[KWARGS])
        words = [f"--{KWARGS}", "full" if "bare" in way else text]
        words += [f"--{WORD}_checkpointing", "true", "--output_dir", str(tmp_path)]
        (arguments,) = parser.parse_args_into_dataclasses([*words, "--use_cpu", "true"])
    elif way == "yaml":
        path.write_text(
            f"output_dir: {tmp_path}\n{WORD}_checkpointing: true\nuse_cpu: true\n"
            f"{KWARGS}:\n  policy: dots\n  select: last:1\n"
        )
        (arguments,) = parser.parse_yaml_file(str(path))
    else:
        path.write_text(json.dumps(options))
        (arguments,) = parser.parse_json_file(str(path))
    model = make_model()
    switch_on(model, getattr(arguments, KWARGS))
    assert wrapped(model) == (LAYERS if "bare" in way else LAYERS[1:])


@pytest.mark.parametrize(
    ("bf16", "options"),
    [
        (False, {"policy": "dots"}),
        pytest.param(True, {"budget": "80%"}, marks=pytest.mark.slow),
        pytest.param(False, {"budget": "80%"}, marks=pytest.mark.slow),
        pytest.param(False, {"policy": "full", "select": "first:1"}, marks=pytest.mark.slow),
        pytest.param(False, {"policy": {"model.layers.*": "dots"}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_callback_logs_what_is_kept_and_undoes_itself(bf16, options, tmp_path):
    expected, _ = trained(make_model(use_cache=False), tmp_path, bf16=bf16)
    model, callback = make_model(), RematCallback(**options)
    found, trainer = trained(model, tmp_path, [callback], bf16=bf16)
    assert_same(found, expected)
    assert wrapped(model) == []
    assert not is_on(model)
    assert callback.peak_bytes > 0
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert last["remat_peak_bytes"] == callback.peak_bytes
    assert last["remat_saved_bytes"] == callback.report.total
    assert last["remat_recomputed_bytes"] == callback.report.by_decision()["recomputed"]


@pytest.mark.slow
def test_a_callback_with_gradient_accumulation(tmp_path):
    options = {"gradient_accumulation_steps": 2}
    expected, _ = trained(make_model(use_cache=False), tmp_path, **options)
    callback = RematCallback("dots")
    found, _ = trained(make_model(), tmp_path, [callback], **options)
    assert_same(found, expected)
    assert callback.peak_bytes > 0


@pytest.mark.slow
def test_the_measured_peak_keeps_within_the_budget(tmp_path):
    whole = RematCallback("none", select="model.layers.*")
    trained(make_model(), tmp_path, [whole])
    budget = int(0.7 * whole.peak_bytes)
    callback = RematCallback(budget=budget)
    trained(make_model(), tmp_path, [callback])
    assert callback.peak_bytes <= budget


class Failing(Data):
    def __getitem__(self, i):
        if i == 23:
            raise ValueError("the data ends here")
        return super().__getitem__(i)


def test_a_training_that_fails_leaves_the_model_as_it_was(tmp_path):
    model, callback = make_model(), RematCallback("dots")
    with pytest.raises(ValueError, match="the data ends here"), callback:
        trained(model, tmp_path, [callback], Failing(), max_steps=50)
    assert wrapped(model) == []
    assert_same(step(model, use_cache=False), step(copy.deepcopy(model), use_cache=False))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "RematCallback gives neither"),
        ({"policy": "dots", "budget": "8GiB"}, "gives both 'dots' and '8GiB'"),
        ({"policy": "dost"}, "nearest: 'dots'"),
        ({"policy": {"model.layers.*": "dost"}}, "nearest: 'dots'"),
        ({"budget": "8GiBB"}, "nearest: 'GiB'"),
        ({"budget": -1}, "positive number of bytes"),
    ],
    ids=str,
)
def test_a_callback_is_refused_that_says_nothing_or_two_things(arguments, message):
    with pytest.raises(ValueError, match=message):
        RematCallback(**arguments)


def test_a_callback_and_the_arguments_do_not_both_checkpoint(tmp_path):
    with pytest.raises(OptionError, match="leave one of them out"):
        trained(make_model(), tmp_path, [RematCallback("dots")], **{f"{WORD}_checkpointing": True})


@READS_OLD_NAME
@POLICIES
def test_adapters_of_peft_train_as_without(policy, tmp_path):
    peft = pytest.importorskip("peft")

    def adapted(**settings):
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        return peft.get_peft_model(make_model(**settings), config)

    expected, _ = trained(adapted(use_cache=False), tmp_path)
    options = {f"{WORD}_checkpointing": True, KWARGS: {"policy": policy}}
    callback = RematCallback(policy)
    found, _ = trained(adapted(), tmp_path, [callback])
    assert_same(found, expected)
    assert callback.report.by_decision()["recomputed"] > 0
    model = adapted()
    found, _ = trained(model, tmp_path, **options)
    assert_same(found, expected)
    switch_off(model)
    assert wrapped(model) == []


def test_inputs_that_peft_lets_require_gradients_change_nothing():
    model, plain = make_model(), make_model(use_cache=False)
    for m in (model, plain):
        m.requires_grad_(False)
        m.model.layers[1].mlp.requires_grad_(True)
        m.enable_input_require_grads()
    switch_on(model, {"policy": "dots"})
    assert_same(step(model), step(plain))


def test_the_examples_in_the_docstrings():
    assert doctest.testmod(integration).failed == 0
