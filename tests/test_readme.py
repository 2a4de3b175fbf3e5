"""The README's Python runs, in order, in one namespace; its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")


def run_blocks(text: str, filename: str, capture: pytest.CaptureFixture[str]) -> int:
    """Run the python blocks of `text`; a text block is what the blocks since the last one print.

    Returns the number of python blocks.
    """
    namespace: dict[str, object] = {"__name__": "readme"}
    num_run = 0
    for match in BLOCK.finditer(text):
        language, body = match.groups()
        if language == "text":
            assert capture.readouterr().out == body
            continue
        # blank lines before it give the block its line numbers in the file
        first_line = text.count("\n", 0, match.start(2))
        exec(compile("\n" * first_line + body, filename, "exec"), namespace)
        num_run += 1
    return num_run


def test_readme_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it writes pages
    assert run_blocks(README.read_text(encoding="utf-8"), str(README), capsys) > 0


def test_readme_links():
    targets = LINK.findall(README.read_text(encoding="utf-8"))
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_run_blocks_shares_names(capsys):
    text = "```python\nx = 1\n```\n\n```python\nprint(x + 1)\n```\n\n```text\n2\n```\n"
    assert run_blocks(text, "some.md", capsys) == 2


def test_run_blocks_sees_wrong_output(capsys):
    with pytest.raises(AssertionError):
        run_blocks("```python\nprint(1)\n```\n\n```text\n2\n```\n", "some.md", capsys)


def test_run_blocks_gives_lines_of_the_file(capsys):
    with pytest.raises(ZeroDivisionError) as caught:
        run_blocks("# title\n\n```python\nx = 0\n1 / x\n```\n", "some.md", capsys)
    last = caught.traceback[-1]
    assert (Path(last.path).name, last.lineno + 1) == ("some.md", 5)
