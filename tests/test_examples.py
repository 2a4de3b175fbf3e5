"""Every file in examples/ runs, and says what it is there to say."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
SMALL_GPT = [
    *("--steps", "3", "--layers", "2", "--width", "64", "--heads", "2"),
    *("--context", "128", "--batch", "4", "--threads", "1"),
]
# a line for each file and way to run it; the first argument is the file
COMMANDS = [
    ["train_gpt.py", *SMALL_GPT, "--policy", "dots|modules:*.mlp"],
    ["train_gpt.py", *SMALL_GPT, "--dropout", "0.2", "--attention", "eager", "--seed", "1"],
]
RULES = ["custom_rules.py", "--steps", "20"]
DONATED = ["jit_donation.py", "--steps", "3"]
COMPILED = ["compile_policy.py", "--layers", "2"]
PLANNED = ["plan_budget.py", "--layers", "2", "--width", "32", "--budget", "55%"]
NAMED_AXES = ["named_axes.py", "--batch", "8", "--width", "16"]
RAGGED = ["ragged_gradients.py"]
NAMED_ARRAYS = ["named_arrays.py"]
# the row of a variant: label, held MB, peak MB, time over plain, first and last loss, verdict
ROW = re.compile(
    r"^  (\S.*?) +([\d.]+) +([\d.]+) +x ([\d.]+) +([\d.]+) -> ([\d.]+) +(yes|NO) *$", re.MULTILINE
)


@pytest.fixture(scope="module")
def train_gpt():
    """The names of the example, which does not start by itself."""
    return runpy.run_path(str(ROOT / "examples" / "train_gpt.py"))


def run_example(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"examples/{command[0]}", *command[1:]],
        cwd=ROOT,
        # the package of this checkout, installed or not
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_every_example_is_run():
    single = (RULES, DONATED, COMPILED, PLANNED, NAMED_AXES, RAGGED, NAMED_ARRAYS)
    assert {command[0] for command in (*COMMANDS, *single)} == set(EXAMPLES)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_example(command):
    done = run_example(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    rows = ROW.findall(done.stdout)
    num_rows = 6 + command.count("--policy")
    assert len(rows) == num_rows, done.stdout
    assert [row[-1] for row in rows] == ["yes"] * num_rows
    assert "All variants are bit-equal to plain." in done.stdout
    held = {row[0]: float(row[1]) for row in rows}
    assert held["nothing_saveable"] < held["dots_with_no_batch_dims_saveable"] < held["plain"]
    assert held["nothing_saveable"] < held["save_modules('*.attn')"] < held["plain"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "30", "--heads", "4"], "--width 30 is not divisible by --heads 4"),
        (["--steps", "2"], "argument --steps: must be at least 3, not 2"),
        (["--layers", "two"], "argument --layers: must be an integer, not 'two'"),
        (["--dropout", "1"], "argument --dropout: must be in [0, 1), not 1"),
        (["--variants", "full,none"], "no variant 'none'; there are plain, torch, full, dots"),
        (["--policy", "dost"], "argument --policy: "),
        (["--context", "5000000"], "--context 5000000 needs a longer text than the"),
        (["--text", "no/such/file"], "--text no/such/file: No such file or directory"),
    ],
)
def test_bad_arguments(train_gpt, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        train_gpt["parse_arguments"](arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("fault", [None, "loss", "gradient", "no gradient"])
def test_a_difference_is_found(train_gpt, fault):
    """The comparison that says bit-equal must be able to say otherwise."""
    run_class = train_gpt["Run"]
    runs = []
    for _ in range(2):
        model = torch.nn.Linear(2, 2)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        runs.append(run_class("", model, torch.optim.SGD(model.parameters()), losses=[1.0]))
    plain, other = runs
    if fault == "loss":
        other.losses[-1] = 1.0 + 2**-52
    elif fault == "gradient":
        other.model.weight.grad[1, 1] += 2**-23
    elif fault == "no gradient":
        other.model.weight.grad = None
    other.compare(plain)
    expected = {
        None: None,
        "loss": "the loss in step 1: 1.0000000000000002, not 1.0",
        "gradient": "the gradient of weight in step 1",
        "no gradient": "the gradient of weight in step 1",
    }
    assert other.difference == expected[fault]


def test_a_training_keeps_to_its_plan():
    done = run_example(PLANNED)
    assert done.returncode == 0, done.stdout + done.stderr
    (budget,) = re.findall(r"budget ([\d.]+) MiB", done.stdout)
    peaks = re.findall(r"^step \d: loss [\d.]+, peak ([\d.]+) MiB$", done.stdout, re.MULTILINE)
    assert len(peaks) == 3
    assert all(float(peak) <= float(budget) for peak in peaks)


def test_donated_parameters_are_updated_where_they_are():
    done = run_example(DONATED)
    assert done.returncode == 0, done.stderr
    assert "same memory: True" in done.stdout
    assert "donated to jit(step) at jit_donation.py" in done.stdout


def test_a_compiled_model_keeps_what_it_keeps_in_eager_mode():
    done = run_example(COMPILED)
    assert done.returncode == 0, done.stderr
    kept = re.findall(r"keeps (\d+) B compiled, (\d+) B in eager mode", done.stdout)
    assert len(kept) == 3
    assert all(compiled == eager for compiled, eager in kept)
    assert done.stdout.count("gradients differ by 0.0e+00") == 3


def test_functions_bring_their_own_derivatives():
    done = run_example(RULES)
    assert done.returncode == 0, done.stderr
    assert "softplus'  = [0.0, 0.5, 1.0]" in done.stdout
    assert "function_p[body=CustomVjpCall(rounded, *)]" in done.stdout


def test_examples_of_a_batch_know_of_one_another():
    done = run_example(NAMED_AXES)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"off by ([\d.e+-]+); gradients differ by at most ([\d.e+-]+)", done.stdout)
    assert len(found) == 3, done.stdout
    assert all(float(error) < 1e-12 for pair in found for error in pair), done.stdout
    assert done.stdout.count("f64[16] output of psum from named_axes.py") == 2


def test_gradients_of_sequences_of_different_lengths():
    done = run_example(RAGGED)
    assert done.returncode == 0, done.stdout + done.stderr
    (error,) = re.findall(r"greatest difference from a loop: ([\d.e+-]+)", done.stdout)
    assert float(error) < 1e-5


def test_arrays_are_mapped_along_a_name():
    done = run_example(NAMED_ARRAYS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "('batch', 'row') [[3.0, 21.0], [12.0, 30.0]]",
        "gradient: [[6.0, 12.0], [8.0, 14.0], [10.0, 16.0]]",
    ]
