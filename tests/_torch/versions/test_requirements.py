"""What is said of versions agrees: requirements, the page, and the versions that were tested."""

import configparser
import re
from pathlib import Path

from torchremat import _torch

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reference" / "versions.md").read_text(encoding="utf-8")


def test_the_oldest_version_is_required_and_none_is_shut_out():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = settings["options"]["install_requires"].splitlines()
    (torch,) = [line for line in lines if re.match(r"torch\b", line)]
    assert torch == f"torch>={_torch.OLDEST}"


def test_the_page_has_the_versions():
    assert f"PyTorch {_torch.OLDEST} to {_torch.NEWEST} are supported" in PAGE
    assert f"scripts/test_versions.sh {_torch.OLDEST} {_torch.NEWEST}" in PAGE
    assert f"`torch>={_torch.OLDEST}`" in PAGE
    rows = re.findall(r"^\| (2\.\d+)\S* \|", PAGE, re.MULTILINE)
    numbers = [tuple(map(int, row.split("."))) for row in rows]
    ends = [tuple(map(int, end.split("."))) for end in (_torch.OLDEST, _torch.NEWEST)]
    assert all(ends[0] <= number <= ends[1] for number in numbers)
