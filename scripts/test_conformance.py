#!/usr/bin/env python
"""Run test suites of PyTorch and JAX on torchremat; name what fails.

    scripts/test_conformance.py --source DIR               all suites, from checkouts in DIR
    scripts/test_conformance.py --source DIR torch-utils   one of them
    scripts/test_conformance.py --source DIR jax-remat -k scan   some tests of it
    scripts/test_conformance.py --write                    the page of the last runs

Without --source the sources are cloned into .conformance/ (git, network). Their imports are adapted
to torchremat, nothing else. What fails of PyTorch's suites runs once more as it is: a test that
fails so too, with this PyTorch on this machine, says nothing.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from conformance_suites import NAMES, SOURCES, SUITES, Suite

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".conformance"
PAGE = ROOT / "docs" / "measured" / "conformance.md"
# a test of the suites takes at most some 30 s; one that hangs ends its process
SECONDS = 300
RESULTS = ["passed", "failed", "not applicable"]
TITLE = "# Suites of other projects\n"
RESULT = """Of {applicable} tests that apply, {passed} pass on torchremat. They are those of
PyTorch's checkpoints and of functorch, and of JAX's remat, custom rules, linearize and batching.
Their imports are adapted, nothing else.
"""
HOW_MEASURED = """
## How it was measured

    python scripts/test_conformance.py --source DIR
    python scripts/test_conformance.py --write

The page was written on {day}, with PyTorch {torch}; each count is of the last run of its suite
before that. JAX's tests run over a small shim, `scripts/conformance_jax.py`, whose arrays are
tensors.

*Not applicable* is a test that skips itself on this machine, that fails with PyTorch as well, or
that asks for something without a counterpart. The reasons follow, with counts. A failure is a
difference that torchremat may mend.

PyTorch could not be cloned where the counts are from. So its tests were taken from forks
that keep them for other devices, with the devices changed back: test_autograd, test_utils and
test_activation_checkpointing (an older version) from Ascend/pytorch, the tests of functorch from
intel/torch-xpu-ops, of August 2026. Short modules stood in for the helpers that those of functorch
import. JAX's were of jax-ml/jax, the same month. `--source` takes
checkouts; without it the script clones {sources}.

The generated tests of each operator in test_vmap are left out: `tests/batching` has them.
"""


@dataclass(frozen=True)
class Outcome:
    """What became of a test, and why."""

    result: str
    why: str = ""


def main() -> int:
    """Run the suites that are asked for; the exit status is 1 if a test fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--source", type=Path, action="append", default=[], help="a checkout")
    parser.add_argument("-k", dest="select", help="tests of the suite, as pytest -k selects them")
    parser.add_argument("--write", action="store_true", help=f"only write {PAGE.name}")
    options = parser.parse_args()
    if unknown := set(options.suites) - set(SUITES):
        parser.error(f"no suite {', '.join(unknown)}; the suites are {', '.join(SUITES)}")
    if options.write:
        PAGE.write_text(describe_page({name: read_results(name) for name in SUITES}))
        return 0
    failed = False
    for name in options.suites or SUITES:
        run_suite(name, find_source(SUITES[name], options.source), options.select)
        results = read_results(name)
        print(describe_outcomes(name, results), flush=True)
        failed |= any(outcome.result == "failed" for outcome in results.values())
    return int(failed)


def find_source(suite: Suite, sources: list[Path]) -> Path:
    """The checkout that has the suite, among those given; without any it is cloned."""
    for source in sources:
        for folder in (source.resolve(), source.resolve() / suite.project):
            if (folder / suite.path).exists():
                return folder
    if sources:
        raise SystemExit(f"no {suite.path} in {', '.join(map(str, sources))}")
    url, tag, part = SOURCES[suite.project]
    folder = WORK / "sources" / suite.project
    if not folder.exists():
        clone = ["git", "clone", "-q", "--depth=1", "--filter=blob:none", "--sparse"]
        subprocess.run([*clone, f"--branch={tag}", url, folder], check=True)
        subprocess.run(["git", "-C", folder, "sparse-checkout", "set", part], check=True)
    return folder


def run_suite(name: str, source: Path, select: str | None) -> None:
    """Run a suite, and what fails of PyTorch's once more as it is; outcomes go to .conformance/."""
    suite = SUITES[name]
    file = source / suite.path
    tests = [f"{file}::{part}" if part else str(file) for part in suite.classes]
    _run_pytest(name, file, "ours", [*tests, "-k", select or suite.select])
    failed = [t for t, o in read_outcomes(name, "ours").items() if o.result == "failed"]
    failed = [test for test in failed if suite.reason_against(test) is None]
    _file_of(name, "theirs").unlink(missing_ok=True)
    if failed and suite.project == "pytorch":
        _run_pytest(name, file, "theirs", [f"{file}::{test}" for test in failed])


def _file_of(name: str, form: str) -> Path:
    return WORK / f"{name}.{form}.xml"


def _run_pytest(name: str, file: Path, form: str, tests: list[str]) -> None:
    """Run tests as they are adapted ("ours") or as they are; a process that dies is replaced."""
    WORK.mkdir(exist_ok=True)
    project = SUITES[name].project
    paths = [Path(__file__).parent, ROOT, file.parent, os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "CONFORMANCE_FILE": str(file),
        "CONFORMANCE_PROJECT": project,
        "CONFORMANCE_NAMES": json.dumps(NAMES[project] if form == "ours" else {}),
    }
    options = ["-q", "--no-header", "-c", os.devnull, f"--rootdir={file.parent}", "--tb=short"]
    options += ["-o", f"faulthandler_timeout={SECONDS}", "-o", "faulthandler_exit_on_timeout=true"]
    options += ["-n1", "-p", "conformance_plugin", "-p", "no:cacheprovider"]
    options += [f"--junitxml={_file_of(name, form)}"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    log = _file_of(name, form).with_suffix(".log")
    with log.open("w") as out:
        subprocess.run(command, env=env, cwd=file.parent, stdout=out, stderr=out, check=False)
    if not read_outcomes(name, form):
        raise SystemExit(f"no test of {name} ran:\n{log.read_text()}")


def read_outcomes(name: str, form: str) -> dict[str, Outcome]:
    """Read the outcomes of the last run of each test."""
    file = _file_of(name, form)
    found = {}
    for case in ET.parse(file).iter("testcase") if file.exists() else ():
        test = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        if not case.get("classname"):  # a file that could not be read
            continue
        parts = [part for part in case if part.tag in {"failure", "error", "skipped"}]
        result = {"skipped": "skipped"}.get(parts[0].tag, "failed") if parts else "passed"
        # each part of a test that has subtests has an entry
        if test not in found or found[test].result != "failed":
            found[test] = Outcome(result, parts[0].get("message", "") if parts else "")
    return found


def read_results(name: str) -> Mapping[str, Outcome]:
    """Read what became of the tests of a suite: those that fail unadapted are not applicable."""
    theirs = read_outcomes(name, "theirs")
    results = {}
    for test, outcome in read_outcomes(name, "ours").items():
        result, why = outcome.result, outcome.why
        if result == "skipped":
            result, why = "not applicable", _name_skip(why)
        elif result == "failed" and (reason := SUITES[name].reason_against(test)):
            result, why = "not applicable", reason
        elif result == "failed" and test in theirs and theirs[test].result != "passed":
            result, why = "not applicable", "fails as it is, with this PyTorch on this machine"
        results[test] = Outcome(result, why)
    return results


def _name_skip(why: str) -> str:
    marked = "not applicable: "
    return why[why.index(marked) + len(marked) :] if marked in why else f"skips itself: {why}"


def describe_outcomes(name: str, outcomes: Mapping[str, Outcome]) -> str:
    """Describe the outcomes of a suite: a count of each, and its failures."""
    lines = [f"{name}: " + ", ".join(f"{n} {result}" for result, n in _count(outcomes))]
    lines += [f"    {t}: {_shorten(o.why)}" for t, o in outcomes.items() if o.result == "failed"]
    return "\n".join(lines)


def describe_page(results: Mapping[str, Mapping[str, Outcome]]) -> str:
    """Describe the suites that have run, as a page of the documentation."""
    results = {name: outcomes for name, outcomes in results.items() if outcomes}
    sources = " and ".join(f"{url} at {tag}" for url, tag, _ in SOURCES.values())
    counts = Counter(o.result for outcomes in results.values() for o in outcomes.values())
    passed, applicable = counts["passed"], counts["passed"] + counts["failed"]
    lines = [TITLE, RESULT.format(passed=passed, applicable=applicable)]
    lines += ["| suite | passed | failed | not applicable |", "|---|---:|---:|---:|"]
    for name, outcomes in results.items():
        lines.append(f"| {name} | " + " | ".join(str(n) for _, n in _count(outcomes)) + " |")
    day = datetime.datetime.now(datetime.UTC).date()
    lines.append(HOW_MEASURED.format(day=day, torch=version("torch"), sources=sources).rstrip())
    for name, outcomes in results.items():
        lines += ["", f"## {name}", "", f"`{SUITES[name].path}`", ""]
        lines += [
            f"- failed: `{_shorten(test)}`: {_quote(o.why)}"
            for test, o in outcomes.items()
            if o.result == "failed"
        ]
        rest = Counter(_quote(o.why) for o in outcomes.values() if o.result == "not applicable")
        lines += [f"- not applicable, {count}: {why}" for why, count in rest.most_common()]
    return "\n".join(lines) + "\n"


def _count(outcomes: Mapping[str, Outcome]) -> list[tuple[str, int]]:
    counts = Counter(outcome.result for outcome in outcomes.values())
    return [(result, counts[result]) for result in RESULTS]


def _quote(text: str) -> str:
    return "`" + _shorten(text).replace("`", "'") + "`"


def _shorten(text: str) -> str:
    """The first line, without places of this machine."""
    line = text.strip().partition("\n")[0]
    return re.sub(r" at 0x\w+|/\S+/|0x\w+", "", line)[:120].rstrip()


if __name__ == "__main__":
    sys.exit(main())
