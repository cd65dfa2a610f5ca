"""Change recipes, overrides, data, run folders and checkpoints at random, and check what whet makes of them.

    python tests/fuzz --count 2000 --seed 1      2,000 cases
    python tests/fuzz --seed 1 --case 17         the 17th case of that seed again

No case may end in a traceback, and none may be accepted that a reader would call wrong: an unknown key, a number that
is not finite or out of bounds, a value of another type, a damaged checkpoint, a record that vanishes. Exit code 1:
something was wrong, and what repeats it is printed.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from cases import play
from ground import make_ground


def main() -> int:
    """Parse, play, and report what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200, help="cases in all")
    parser.add_argument("--case", type=int, help="only this case of the seed")
    parser.add_argument("--model", type=Path, help="a tiny model that is there already")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        ground = make_ground(folder / "ground", args.model)
        began, counts, faulty = time.monotonic(), Counter[tuple[str, str]](), 0
        for number in range(args.count) if args.case is None else [args.case]:
            case = play(args.seed, number, ground, folder / "case")
            counts[case.kind, case.outcome] += 1
            if case.faults:
                faulty += 1
                print(f"WRONG  {case.kind}: {case.words}", *case.faults, sep="\n  ", flush=True)
                print(f"  again: python tests/fuzz --seed {args.seed} --case {number}", flush=True)
            elif args.case is not None:
                print(f"{case.outcome}  {case.kind}: {case.words}")
        for kind in sorted({kind for kind, _ in counts}):
            print(f"{kind:12s} {counts[kind, 'refused']:5d} refused {counts[kind, 'accepted']:5d} accepted")
        print(f"{sum(counts.values())} cases, {faulty} faulty, {time.monotonic() - began:.0f} s")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return bool(faulty)


if __name__ == "__main__":
    sys.exit(main())
