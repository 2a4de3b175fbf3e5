"""Print what breaks the rules of tests/house, by rule and by folder.

python scripts/check_house.py                                      all rules, all folders
python scripts/check_house.py --room torchremat/planning prose names
python scripts/check_house.py --count                              only how many
"""

import argparse
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
RULES = sorted(p.stem.removeprefix("test_") for p in (ROOT / "tests" / "house").glob("test_*.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rules", nargs="*", metavar="RULE", help=", ".join(RULES))
    parser.add_argument("--room", default="", help="a folder or file, from the root on")
    parser.add_argument("--count", action="store_true", help="only how many, by folder")
    options = parser.parse_args()
    if unknown := set(options.rules) - set(RULES):
        parser.error(f"no rule {', '.join(unknown)}; the rules are {', '.join(RULES)}")
    total = 0
    for rule in options.rules or RULES:
        found = [
            violation
            for violation in sorted(set(import_module(f"tests.house.test_{rule}").violations()))
            if f"{violation.path}/".startswith(options.room.rstrip("/") + "/") or not options.room
        ]
        total += len(found)
        print(f"{rule}: {len(found)}")
        if options.count:
            rooms = Counter(str(Path(violation.path).parent) for violation in found)
            print(*(f"    {count:5} {room}" for room, count in sorted(rooms.items())), sep="\n")
        else:
            print(*(f"    {violation}" for violation in found), sep="\n")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
