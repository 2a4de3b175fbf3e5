#!/usr/bin/env python
"""Write the page of real clients from the rows that `tests/clients` left in a file.

python scripts/clients_report.py ROWS
"""

import argparse
import importlib.metadata
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "measured" / "clients.md"
LIBRARIES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "lightning",
    "litgpt",
    "torchtitan",
    "opacus",
)
COLUMNS = ("own", "full", "dots", "budget")
HOW_MEASURED = """
*Own* is the checkpointing that the client brings, or `torch.utils.checkpoint` with
`use_reentrant=False` around each layer. It is left out under `torch.func`. *Full* and *dots* are
policies for each layer. *Budget* is for the model as a whole: 60 % of its peak, and 90 % under
`torch.func`, where it is planned for one member or example. With varying lengths 60 % is of the
longest batch, and the measured one is the shortest. Under FSDP2 each layer has a budget of its own.

TRL's losses hold a buffer that is most of the peak, whatever the model saves: its budget is 97 %.
They loop over as many chunks as a batch has tokens. So a model as a whole has a trace for each
number of tokens. After four traces its calls run on tapes, which cost more in steps of 20 ms.

Opacus keeps what each layer reads, for the gradients of each example. What a wrapped model
recomputes comes on top, so that wrapping saves nothing there.

## How it was measured

    scripts/test_clients.sh

Each training runs plain and in the other ways, from the same seed. Losses, parameters and what else
the test returns are compared bit for bit. Peaks are those of `torchremat.measure.LiveBytes` in the
forward and backward passes of the last step, with one batch. Seconds are the median of the steps
after the first ones, which trace and plan. Models have 3 to 6 layers of width 32 or 64, on one
thread of a CPU, shared with much other work: times differ by half and more from run to run.

What is not among them:

- The trainers of litgpt and torchtitan. Their models train in a loop of PyTorch, torchtitan's with
  the attention that it has for images: FlexAttention has no backward pass on a CPU.
"""


def read_rows(path: Path) -> dict[str, dict[str, Mapping[str, Any]]]:
    """The rows by client, then by way; of a client that ran twice the last ones."""
    found: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        found[row["client"]][row["way"].partition(":")[0]] = row
    return found


def describe(clients: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    rows = [(name, way, row) for name, ways in clients.items() for way, row in ways.items()]
    ours = [(name, row) for name, way, row in rows if way not in ("plain", "own")]
    unequal = sorted({name for name, row in ours if not row["is_equal"]})
    text = f"{len(clients)} trainings of real clients under {len(ours)} policies: "
    text += "all are equal to plain ones, to the bit." if not unequal else "not equal to plain: "
    return text + ", ".join(unequal) + "\n"


def write_table(clients: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    names = [f"{what}, {way}" for what in ("peak", "time") for way in COLUMNS]
    lines = [f"| client | equal | {' | '.join(names)} |", "|---|---|" + "---:|" * len(names)]
    for name, ways in clients.items():
        is_equal = all(row["is_equal"] for row in ways.values())
        cells = [
            f"{ways[way][what]:.2f}" if way in ways else ""
            for what in ("peak", "time")
            for way in COLUMNS
        ]
        lines.append(f"| {name} | {'yes' if is_equal else 'no'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", type=Path)
    clients = read_rows(parser.parse_args().rows)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    PAGE.write_text(
        f"# Real clients\n\n{describe(clients)}\nPeaks and times are parts of the plain step's.\n\n"
        f"{write_table(clients)}\n{HOW_MEASURED}\nReleases: {versions}.\n"
    )


if __name__ == "__main__":
    main()
