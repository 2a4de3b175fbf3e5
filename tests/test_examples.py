"""Every file in examples/ runs, and says what it is there to say."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import skip_before_2_13

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
SMALL_GPT = [
    *("--steps", "3", "--layers", "2", "--width", "64", "--heads", "2"),
    *("--context", "128", "--batch", "4", "--threads", "1"),
]
# a line for each file and way to run it; the first argument is the file
COMMANDS = [
    ["15_train_gpt.py", *SMALL_GPT, "--policy", "dots|modules:*.mlp"],
    ["15_train_gpt.py", *SMALL_GPT, "--dropout", "0.2", "--attention", "eager", "--seed", "1"],
]
RULES = ["11_custom_rules.py", "--steps", "20"]
DONATED = ["14_donation.py", "--steps", "3"]
COMPILED = ["06_compile.py", "--layers", "2"]
PLANNED = ["04_budgets.py", "--layers", "2", "--width", "32", "--budget", "55%"]
OFFLOADED = ["05_offload.py", "--layers", "2", "--steps", "2"]
NAMED_AXES = ["12_named_axes.py", "--batch", "8", "--width", "16"]
PARALLEL = ["16_pmap.py", "--steps", "5", "--width", "8", "--batch", "16"]
RAGGED = ["09_ragged_batches.py"]
NAMED_ARRAYS = ["13_named_arrays.py"]
AUTODIDAX = ["autodidax.py"]
FINETUNED = ["17_finetune_llama.py", "--steps", "3", "--length", "32", "--budget", "2MiB"]
# what a line of the output of a short one is to be
LINES = {
    "01_wrap_a_model.py": [r"plain: \d+ B held", *[r".*bit-equal: True, .* as before: True"] * 3],
    "02_name_values.py": [
        r"full: saved \[\], 0 B",
        r"names:up: saved \['up', 'up'\], 4096 B",
        r"names:up,gate: saved \['gate', 'up', 'gate', 'up'\], 8192 B",
        r"save_any_names_but_these:up: saved \['gate', 'gate'\], 4096 B",
    ],
    "03_write_a_policy.py": [
        r"dots: 0.addmm, 2.addmm, 18432 B",
        r"long_products: 2.addmm, 2048 B",
        r"save_modules\('1'\) \| as_policy\(long_products\): 1.gelu, 2.addmm, 18432 B",
        r"dots&~modules:0: 2.addmm, 2048 B",
    ],
    "07_distributed.py": [r"2 processes; gradients differ by at most \d.\de-(0[7-9]|1\d)"],
    "08_functions.py": [r"Hessian: as without a checkpoint"],
    "18_fsdp_budget.py": [
        r"  layers\.0 .* saved:\d+B",
        r"without the budget: loss .* \d+ KiB held, peak \d+ KiB",
        r"losses are bit-equal: True",
    ],
    "19_tiles.py": [
        r"budget:30% is refused: \d+% of it at least",
        r"  never whole: .*_log_softmax.*",
        r"budget:30%\+tile: losses \d\.\d+ -> \d\.\d+, peak [12]?\d%",
        r"losses differ by [0-9]e-0[5-9] at most|losses differ by 0e\+00 at most",
    ],
    "20_updates_in_the_backward_pass.py": [
        r"plain: \d{4} KiB; 32 parameters updated in",
        r"the backward pass: \d{3,4} KiB, same parameters: True",
        r"the same budget as a policy: \d{3,4} KiB",
    ],
    "21_loops_of_many_steps.py": [
        r"in Python: damping 0.[23]\d after 6 rounds, \d+ steps in the last, peak \d+.\d\d MiB",
        r"while_loop: damping 0.[23]\d after 6 rounds, \d+ steps in the last, peak 0.\d\d MiB",
        r"equal but for rounding: True",
    ],
    "10_debug_with_the_report.py": [r"548 KiB saved -> 48.0 KiB .*, 3 values decided otherwise"],
}
# the row of a variant: label, held MB, peak MB, time over plain, first and last loss, verdict
ROW = re.compile(
    r"^  (\S.*?) +([\d.]+) +([\d.]+) +x ([\d.]+) +([\d.]+) -> ([\d.]+) +(yes|NO) *$", re.MULTILINE
)


@pytest.fixture(scope="module")
def train_gpt():
    """The names of the example, which does not start by itself."""
    return runpy.run_path(str(ROOT / "examples" / "15_train_gpt.py"))


def run_example(command: list[str], processes: int = 1) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    start = torchrun if processes > 1 else []
    return subprocess.run(
        [sys.executable, *start, f"examples/{command[0]}", *command[1:]],
        cwd=ROOT,
        # the package of this checkout, installed or not
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=3000,  # of a run that hangs: a busy machine takes ten times as long
        check=False,
    )


def test_every_example_is_run():
    single = (
        RULES, DONATED, COMPILED, PLANNED, OFFLOADED, NAMED_AXES, PARALLEL, RAGGED,
        NAMED_ARRAYS, AUTODIDAX, FINETUNED,
    )  # fmt: skip
    assert {command[0] for command in (*COMMANDS, *single)} | set(LINES) == set(EXAMPLES)


@pytest.mark.parametrize("name", LINES)
def test_a_short_example(name):
    done = run_example([name])
    assert done.returncode == 0, done.stdout + done.stderr
    for line in LINES[name]:
        assert re.search(rf"^{line}$", done.stdout, re.MULTILINE), done.stdout


def test_a_sharded_training_keeps_to_its_budget():
    done = run_example(["18_fsdp_budget.py", "--budget", "45%"], 2)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^with\w* the budget: .*, (\d+) KiB held, peak (\d+)", done.stdout, re.M)
    (held, peak), (held_with, peak_with) = [tuple(map(int, row)) for row in rows]
    assert held_with < 0.5 * held
    assert peak_with < 0.7 * peak
    assert "losses are bit-equal: True" in done.stdout


def test_examples_are_numbered():
    numbers = [name.partition("_")[0] for name in EXAMPLES if name != "autodidax.py"]
    assert all(re.fullmatch(r"\d\d", number) for number in numbers)
    assert len(set(numbers)) == len(numbers)


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


def test_what_is_offloaded_is_held_by_the_host():
    done = run_example(OFFLOADED)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\w[\w ]*?) +(\d+) +(\d+)   (.*)$", done.stdout, re.MULTILINE)
    device, host = ({row[0]: int(row[i]) for row in rows} for i in (1, 2))
    assert device["dots offloaded"] < device["dots saved"] < device["saved"]
    assert host["saved"] == host["dots saved"] == 0
    assert host["dots offloaded"] == device["dots saved"] - device["dots offloaded"]
    assert len({row[3] for row in rows}) == 1


def test_donated_parameters_are_updated_where_they_are():
    done = run_example(DONATED)
    assert done.returncode == 0, done.stderr
    assert "same memory: True" in done.stdout
    assert "donated to jit(step) at 14_donation.py" in done.stdout


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
    assert done.stdout.count("f64[16] output of psum from 12_named_axes.py") == 2


def test_gradients_of_sequences_of_different_lengths():
    skip_before_2_13("torch.matmul of batches reads sizes as numbers, which a RaggedError says")
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


@pytest.mark.parametrize("processes", [1, 2])
def test_processes_train_as_one(processes):
    done = run_example(PARALLEL, processes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{processes} processes: loss " in done.stdout
    (error,) = re.findall(r"weights differ by at most ([\d.e+-]+)", done.stdout)
    assert float(error) < 1e-12


def test_the_library_rebuilt_in_a_file_says_what_the_library_says():
    done = run_example(AUTODIDAX)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\w+.*?) +(\d+) +(\d+) +(\d+) +yes +(.+)$", done.stdout, re.MULTILINE)
    assert [row[-1] for row in rows] == ["says the same"] * 4 + ["-"], done.stdout
    (budget, _, peak, *_) = rows[-1]
    assert int(peak) <= int(budget.removeprefix("budget "))


def test_the_library_rebuilt_in_a_file_draws_random_numbers_once():
    rebuilt = runpy.run_path(str(ROOT / "examples" / "autodidax.py"))

    def f(x):
        return (torch.sin(x) * torch.bernoulli(torch.full_like(x, 0.5))).exp().sum()

    x = torch.randn(64, requires_grad=True)
    found = []
    for fun in (f, rebuilt["checkpoint"](f, rebuilt["nothing"])):
        torch.manual_seed(0)
        found.append(torch.autograd.grad(fun(x), x)[0])
    assert torch.equal(*found)
    with pytest.raises(ValueError, match="the lowest peak found is"):
        rebuilt["checkpoint"](f, rebuilt["Budget"](1))(x)
    with pytest.raises(ValueError, match="add_.Tensor writes in place"):
        rebuilt["checkpoint"](lambda x: x.sin().add_(1).exp())(x)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], id="budget"),
        pytest.param(["--policy", "dots"], marks=pytest.mark.slow, id="dots"),
        pytest.param(["--steps", "50"], marks=pytest.mark.slow, id="50 steps"),
        pytest.param(["--steps", "50", "--bf16"], marks=pytest.mark.slow, id="50 steps, bf16"),
    ],
)
def test_a_llama_is_fine_tuned_within_its_budget(more):
    for package in ("peft", "accelerate"):
        pytest.importorskip(package)
    done = run_example([*FINETUNED, *more])
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"^ +\d+ +([\d.]+) +([\d.]+)$", done.stdout, re.MULTILINE)
    assert len(losses) == (50 if "50" in more else 3)
    assert all(plain == remat for plain, remat in losses)
    assert "losses and adapters are equal to the bit" in done.stdout
    plain, remat = re.search(r"peak of a step: (\d+) B without, (\d+) B with", done.stdout).groups()
    assert int(remat) < int(plain)
    if "--policy" not in more:
        assert int(remat) <= 2 << 20


def test_the_tour_runs_and_shows_itself(tmp_path, monkeypatch, capsys):
    """As a notebook runs it: cell by cell, with the value of a last expression on display."""
    text = (ROOT / "examples" / "tour.ipynb").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    namespace, shown = {"__name__": "__main__"}, []
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "code":
            body = ast.parse("".join(cell["source"])).body
            last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), "tour", "exec"), namespace)
            if last is not None:
                shown.append(eval(compile(last, "tour", "eval"), namespace))
    found = {type(value).__name__: value for value in shown}
    assert {"Estimate", "Plan", "Report", "Comparison"} <= found.keys()
    pages = [v._repr_html_() for v in shown if hasattr(v, "_repr_html_")]
    assert len(pages) == 4
    assert all(page.lstrip().startswith("<") for page in pages)
    assert found["bool"] is True  # gradients are bit-equal
    plain, planned = (float(x) for x in re.findall(r"peak ([\d.]+) MiB", capsys.readouterr().out))
    assert planned <= 0.53 * plain
    assert "plain PyTorch" in Path("step.svg").read_text(encoding="utf-8")
