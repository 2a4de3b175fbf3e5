import os
import re
import subprocess
import sys
import warnings

import click
import pytest

from tests.cli.commands import in_folder, output_of, run  # noqa: F401
from torchremat.cli.app import main
from torchremat.cli.commands import run_residuals
from torchremat.cli.terminal.exit_codes import describe_error
from torchremat.errors import UnmatchedWarning

pytestmark = pytest.mark.usefixtures("in_folder")
MODEL = "model.py:make"
THREE_POLICIES = ["--policy", "full", "--policy", "dots", "--policy", "none"]
COMMANDS = ["plan", "fit", "residuals", "graph", "compare", "bench", "diff", "check", "env"]


def test_help_lists_the_commands_in_order():
    text = output_of("--help")
    assert re.findall(r"^  (\w+)  ", text, re.MULTILINE) == COMMANDS
    assert list(main.commands) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_are_commands(command):
    text = output_of(command, "--help")
    examples = re.findall(rf"^    torchremat {command}(.*)$", text, re.MULTILINE)
    assert examples
    known = {name for option in main.commands[command].params for name in option.opts}
    assert {word for word in " ".join(examples).split() if word.startswith("--")} <= known


def test_version():
    assert output_of("--version") == "torchremat 0.1.0\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["grpah", MODEL], "Did you mean 'graph'"),
        (["plan", MODEL], "Missing option '--budget'"),
        (["plan", MODEL, "--budget", "5"], "'5B' if bytes are meant"),
        (["plan", MODEL, "--budget", "2GiBB"], "'GiBB' is not a unit, nearest: "),
        (["plan", MODEL, "--budget", "50%", "--save", "no/plan.json"], "there is no folder no"),
        (["plan", MODEL, "--budget", "50%", "--on", "h1000"], "nearest: 'h100'"),
        (["plan", MODEL, "--budget", "50%", "--optimizer", "adamm"], "nearest: 'Adam'"),
        (
            ["plan", MODEL, "--budget", "50%", "--optimizer", "model:Net"],
            "is not an optimizer's class",
        ),
        (["plan", MODEL, "--budget", "50%", "--device", "gpuu"], "gpuu"),
        (["plan", "model.py:mak", "--budget", "50%"], "nearest: 'make'"),
        (["residuals", MODEL, "--policy", "dosts"], "nearest: 'dots'"),
        (["residuals", MODEL, "--policy", "plan:no.json"], "no.json: No such file"),
        (["residuals", MODEL, "--policy", "full", "--budget", "1GiB"], "give one of them"),
        (["residuals", MODEL, "--select", "layers.*"], "give --policy or --budget"),
        (["residuals", MODEL, "--policy", "full", "--select", "layer.*"], "nearest: 'layers."),
        (["residuals", MODEL, "--lines", "--by-module"], "give one"),
        (
            ["residuals", "model.py:make_with_branch", "--policy", "full", "--select", "a"],
            "is a function",
        ),
        (["compare", MODEL], "give --policy or --budget"),
        (["compare", MODEL, *THREE_POLICIES, "--html", "page.html"], "there are 3 policies"),
        (["bench", MODEL, "--policy", "full", "--rounds", "0"], "--rounds"),
    ],
)
def test_what_is_asked_for_wrongly_ends_with_2(args, said):
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert "Usage: torchremat" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("make_with_branch", r"value of a traced tensor is needed at model.py:\d+ \(branching\)"),
        ("make_with_error", r"KeyError: 'hidden_size'\n  at model.py:\d+ \(failing\)\n--debug"),
    ],
)
def test_what_fails_ends_with_1_and_the_users_line(name, said):
    result = run("residuals", f"model.py:{name}")
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.search(said, result.stderr)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("place", [0, 1, 2])
def test_debug_shows_the_traceback_wherever_it_stands(place):
    args = ["residuals", "model.py:make_with_error"]
    result = run(*args[:place], "--debug", *args[place:])
    assert result.exit_code == 1
    assert "Traceback" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (click.Abort(), 130, "interrupted\n"),
        (BrokenPipeError(), 141, ""),
        (PermissionError(13, "Permission denied", "plan.json"), 1, "Error: plan.json: Permission"),
    ],
)
def test_exit_codes(error, code, said, monkeypatch):
    def fail(_):
        raise error

    monkeypatch.setattr(run_residuals, "run_residuals", fail)
    result = run("residuals", MODEL)
    assert result.exit_code == code
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_our_warnings_are_a_line(monkeypatch):
    def warn(_):
        warnings.simplefilter("default")  # until the command ends
        warnings.warn("ours", UnmatchedWarning, stacklevel=1)
        warnings.warn("theirs", UserWarning, stacklevel=1)

    monkeypatch.setattr(run_residuals, "run_residuals", warn)
    with pytest.warns(UserWarning, match="theirs") as others:
        result = run("residuals", MODEL)
    assert (result.exit_code, result.stderr, len(others)) == (0, "Warning: ours\n", 1)


# --- in a process of its own ----------------------------------------------------------------------


def command(*args: str, env: dict[str, str] | None = None, **options):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "torchremat", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(env or {})},
        **options,
    )


def test_module_of_python_runs_it_and_warnings_are_a_line():
    process = command("residuals", MODEL, "--policy", "names:attn")
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0
    assert out.startswith("saved for the backward pass: 0 B")
    assert err.startswith("Warning: save_only_these_names('attn')")
    assert err.count("\n") == 1
    assert "\x1b" not in out


def test_a_closed_pipe_is_quiet():
    with command("graph", MODEL) as process:
        process.stdout.close()  # as `| head` does, before anything is written
        err = process.stderr.read()
        assert (process.wait(timeout=1200), err) == (141, "")


def test_messages_of_others_are_printed_harmlessly():
    assert (
        describe_error(ValueError("\x1b[2J\u202eno\nmore")) == r"ValueError: \x1b[2J\u202eno"
        "\nmore"
    )
