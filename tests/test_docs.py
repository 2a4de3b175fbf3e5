"""The pages: their code runs, their links lead somewhere, their reference has every public name.

The README and each page of docs/ are run from the top, in one namespace and an empty folder:

    ```python            runs; with prompts (>>>) it is a doctest
    ```text              is what the blocks since the last one print
    ```python no-run     is compiled only; an HTML comment above says why: <!-- not run: ... -->
    ```console           its lines `$ torchremat ...` have options that there are
"""

import doctest
import inspect
import re
import shlex
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import ModuleType

import click
import pytest
import torch

import torchremat as tr
from torchremat.cli.app import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts),
]
BLOCK = re.compile(r"^```(python|text|python no-run|console)\n(.*?)^```$", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: \S.*-->\n+$")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
FENCED = re.compile(r"^```.*?^```$|`[^`\n]+`", re.M | re.S)
ENTRY = re.compile(r"^\.\. (?:auto|py:)(?:function|class|data|exception)::\s+([\w.]+)", re.M)
NAMESPACES = [
    *("checkpoint_policies", "nn", "planning", "batching", "viz", "errors", "config"),
    *("api_util", "parallel", "testing"),
]


VERSION = re.compile(r"(?<=PyTorch )2\.\d+\S+")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


# --- code ----------------------------------------------------------------------------------------


def run_blocks(text: str, filename: str, capture: pytest.CaptureFixture[str]) -> int:
    """Run or check each block of `text`; returns the number of those that ran."""
    namespace: dict[str, object] = {"__name__": "page"}
    num_run = 0
    for match in BLOCK.finditer(text):
        language, body = match.groups()
        first_line = text.count("\n", 0, match.start(2))
        if language == "text":
            printed, expected = (VERSION.sub("", t) for t in (capture.readouterr().out, body))
            assert printed == expected
        elif language == "console":
            for line in command_lines(body):
                check_command(line)
        elif language == "python no-run":
            assert NOT_RUN.search(text[: match.start()]), f"line {first_line}: why is it not run?"
            compile(body, filename, "exec")
        elif body.startswith(">>>"):
            run_doctest(body, filename, first_line, namespace)
            num_run += 1
        else:
            # blank lines before it give the block its line numbers in the file
            exec(compile("\n" * first_line + body, filename, "exec"), namespace)
            num_run += 1
    return num_run


def run_doctest(body: str, filename: str, first_line: int, namespace: dict[str, object]) -> None:
    parsed = doctest.DocTestParser().get_doctest(body, namespace, filename, filename, first_line)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failed = runner.run(parsed, out=said.append, clear_globs=False).failed
    namespace.update(parsed.globs)
    assert not failed, "".join(said)


def command_lines(body: str) -> list[list[str]]:
    """The arguments of each `$ torchremat ...` in a console block, up to a pipe or redirection."""
    lines = body.replace("\\\n", " ").splitlines()
    words = [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]
    found = []
    for line in words:
        ends = [i for i, word in enumerate(line) if word in ("|", ">", "&&", "2>")]
        command = line[: min(ends, default=len(line))]
        if command[:3] == ["python", "-m", "torchremat"]:
            command = command[2:]
        if command[:1] == ["torchremat"]:
            found.append(command[1:])
    return found


def check_command(arguments: list[str]) -> None:
    """Raise `click.UsageError` for a command or an option that there is not; run nothing."""
    name, *rest = arguments
    if name.startswith("-"):
        return
    if name not in main.commands:
        raise click.UsageError(f"there is no command {name!r}")
    if not {"-h", "--help"} & set(rest):
        main.commands[name].make_context(name, rest)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_code_of_a_page_runs(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    torch.compiler.reset()  # sizes that other tests compiled would be symbols here
    text = page.read_text(encoding="utf-8")
    num_run = run_blocks(text, str(page), capsys)
    assert num_run == len(re.findall(r"^```python$", text, re.M))
    torch.compiler.reset()


def test_blocks_share_names(capsys):
    text = "```python\nx = 1\n```\n\n```python\nprint(x + 1)\n```\n\n```text\n2\n```\n"
    assert run_blocks(text, "some.md", capsys) == 2


def test_blocks_with_prompts_share_names_too(capsys):
    text = (
        "```python\n>>> x = 1\n\n```\n\n```python\ny = x\n```\n\n```python\n>>> y + 1\n2\n\n```\n"
    )
    assert run_blocks(text, "some.md", capsys) == 3


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1)\n```\n\n```text\n2\n```\n",
        "```python\n>>> 1\n2\n\n```\n",
        "```python no-run\nx = 1\n```\n",
        "<!-- not run:  -->\n```python no-run\nx = 1\n```\n",
    ],
    ids=["text", "doctest", "no reason", "empty reason"],
)
def test_wrong_blocks_are_found(text, capsys):
    with pytest.raises(AssertionError):
        run_blocks(text, "some.md", capsys)


def test_a_block_that_is_not_run_is_compiled(capsys):
    text = "<!-- not run: needs two GPUs -->\n```python no-run\nx = = 1\n```\n"
    with pytest.raises(SyntaxError):
        run_blocks(text, "some.md", capsys)


def test_blocks_have_the_lines_of_the_file(capsys):
    with pytest.raises(ZeroDivisionError) as caught:
        run_blocks("# title\n\n```python\nx = 0\n1 / x\n```\n", "some.md", capsys)
    last = caught.traceback[-1]
    assert (Path(last.path).name, last.lineno + 1) == ("some.md", 5)


@pytest.mark.parametrize(
    "line",
    ["plan m.py:f", "plan m.py:f --budgets 1GiB", "graph m.py:f --budget", "residual m.py:f"],
)
def test_wrong_commands_are_found(line, capsys):
    with pytest.raises(click.UsageError):
        run_blocks(f"```console\n$ torchremat {line} | head\n```\n", "some.md", capsys)


def test_right_commands_are_let_pass(capsys):
    lines = (
        "$ torchremat plan m.py:f \\\n    --budget 1GiB > out\n$ ls\n$ python -m torchremat env\n"
    )
    assert run_blocks(f"```console\n{lines}```\n", "some.md", capsys) == 0
    assert command_lines(lines) == [["plan", "m.py:f", "--budget", "1GiB"], ["env"]]


# --- links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=page_id)
def test_the_links_of_a_page_lead_somewhere(page):
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    targets = LINK.findall(prose)
    assert [target for target in targets if not (page.parent / target).exists()] == []


# --- reference -----------------------------------------------------------------------------------


def entries() -> list[str]:
    """The full names that the reference documents."""
    pages = (DOCS / "reference").glob("*.md")
    return [name for page in pages for name in ENTRY.findall(page.read_text(encoding="utf-8"))]


def public_names(module: ModuleType) -> list[str]:
    """What a namespace offers: `__all__`, else its own classes, functions and annotated settings.

    The helper of messages in `errors` is none.
    """
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
    names = [name for name in (*own, *module.__annotations__) if not name.startswith("_")]
    return [name for name in names if name != "nearest_names"]


def missing_names(documented: set[str]) -> list[str]:
    """Public names without an entry: under itself, or of the same object and name at the top."""
    missing = [
        f"torchremat.{name}"
        for name in tr.__all__
        if f"torchremat.{name}" not in documented
        and not isinstance(getattr(tr, name), ModuleType)
        and f"torchremat.errors.{name}" not in documented
    ]
    for namespace in NAMESPACES:
        module = import_module(f"torchremat.{namespace}")
        for name in public_names(module):
            value = getattr(module, name)
            at_top = f"torchremat.{name}" in documented and value is getattr(tr, name, None)
            is_module = isinstance(value, ModuleType)
            if f"{module.__name__}.{name}" not in documented and not at_top and not is_module:
                missing.append(f"{module.__name__}.{name}")
    return missing


def test_the_reference_has_every_public_name():
    assert missing_names(set(entries())) == []


def test_the_reference_has_no_name_twice():
    assert [name for name, count in Counter(entries()).items() if count > 1] == []


def test_what_the_reference_has_exists():
    for name in entries():
        path, _, last = name.rpartition(".")
        assert hasattr(import_module(path), last), name


@pytest.mark.parametrize(
    "name",
    ["torchremat.plan", "torchremat.planning.Plan", "torchremat.errors.EffectError",
     "torchremat.config.verify_recomputation", "torchremat.testing.check_grads"],
)  # fmt: skip
def test_a_missing_name_is_found(name):
    assert name in missing_names(set(entries()) - {name})


@pytest.mark.parametrize(
    "error", [e for n in public_names(tr.errors) if (e := getattr(tr.errors, n))]
)
def test_each_error_says_when_it_is_raised_and_what_cures_it(error):
    if error is not tr.errors.TorchrematError:
        assert re.search(r"\n\n(Raised|Given) .*\n\nCure: ", inspect.getdoc(error), re.S)
