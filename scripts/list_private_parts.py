"""Write the page of the private parts of PyTorch that the library uses, from their tables.

    python scripts/list_private_parts.py           write docs/explanation/private-parts.md
    python scripts/list_private_parts.py --check   exit with 1 if that page differs

The rows are in `torchremat/_torch/parts/` and `torchremat/_torch/patches.py`.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "explanation" / "private-parts.md"

from torchremat._torch.parts import ALTERNATIVES, AREAS, all_parts  # noqa: E402
from torchremat._torch.patches import EVERY_PATCH  # noqa: E402

_INTRODUCTION = """\
# Private parts of PyTorch

`scripts/list_private_parts.py` writes this page from the tables in `torchremat/_torch/`. A test
compares those with the source: no use is without a row, and no row is without a use.
[What PyTorch would have to offer](pytorch.md) says which public functions would make rows go.

{num_names} names in {num_rows} rows, {num_private} of them private; the others are below
`torch.fx.experimental`. {num_patches} attributes or registrations of PyTorch are replaced. A row
without versions holds for all that are supported.
"""


def write_page() -> str:
    names = [name for part in all_parts() for name in part.names]
    blocks = [
        _INTRODUCTION.format(
            num_names=len(names),
            num_rows=len(list(all_parts())),
            num_private=sum("._" in name for name in names),
            num_patches=len(EVERY_PATCH),
        )
    ]
    header = ("names", "for", "the public way", "without them", "versions")
    for title, parts in AREAS.items():
        rows = [
            (
                _code(part.names),
                part.use,
                part.public,
                part.without,
                _versions(part.since, part.until),
            )
            for part in parts
        ]
        blocks.append(f"## {title}\n\n{_table(header, rows)}\n")
    patched = [
        (_code([name]), p.why, *ALTERNATIVES[name], p.threads, _versions(p.since, p.until))
        for p in EVERY_PATCH
        for name in [f"{p.owner}.{p.name}"]
    ]
    header = ("replaced", "for", "the public way", "without it", "who sees it", "versions")
    table = _table(header, patched)
    blocks.append(f"## Replaced while they are needed\n\n{table}\n")
    return "\n".join(blocks)


def _versions(since: str, until: str) -> str:
    first = "" if since == "2.11" else f"since {since}"
    return ", ".join(filter(None, (first, until and f"until {until}")))


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{re.sub('^(marks|objects)[.]', '.', name)}`" for name in names)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    page = write_page()
    if not parser.parse_args().check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page:
        return 0
    print(f"{PAGE.relative_to(ROOT)} differs: run python scripts/list_private_parts.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
