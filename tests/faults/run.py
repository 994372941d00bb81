"""Puts each fault of `faults.py` into a copy of the tree, and runs the tests that should see it.

    python tests/faults/run.py [--only ID ...] [--file NAME ...] [--jobs N]

On demand only: pytest does not collect it. The checkout itself is never touched. First the tests are run without any
fault, and must pass. Then each fault gets a line: the test that caught it, that the tests ran into their time limit
(which counts as caught), or SURVIVED. Exit status: 0 if at least 95% were caught, else 1; 2 for a list that does not
fit the code.
"""

import argparse
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults import FAULTS, Fault, misfits

ROOT = Path(__file__).parents[2]
ENOUGH = 0.95  # the share of the faults that is to be caught
NOTHING_PICKED = 5  # pytest's exit status where -k leaves no test
CAUGHT, SURVIVED, INVALID = "caught", "SURVIVED", "INVALID"


def copy_tree(folder: Path) -> Path:
    """The files that git knows or would add, as they are in the checkout."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def pytest(tree: Path, arguments: list[str], limit: float) -> tuple[int | None, str]:
    """(exit status, output) of pytest in a tree, with one thread; status None: the time was up."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
                   # Compiled modules are told apart by second and size: too little for changes of a single sign.
                   "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", *arguments]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=tree, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)  # the session that was begun here: pytest and what it started
                process.wait()
        output.seek(0)
        return status, output.read()


def selection(tests: str) -> tuple[list[str], str | None]:
    """`test_a.py test_b.py -k "this or that"` -> (files, the expression behind -k, if any)."""
    words = shlex.split(tests)
    at = words.index("-k") if "-k" in words else len(words)
    return [f"tests/{file}" for file in words[:at]], words[at + 1] if at < len(words) else None


def pick(files: list[str], expression: str | None) -> list[str]:
    """pytest's arguments."""
    return files if expression is None else [*files, "-k", expression]


def check_without_faults(tree: Path, faults: list[Fault], limit: float) -> dict[str, float] | None:
    """Seconds that the tests of each file take, all that some fault wants of it at once; None: some do not pass."""
    wanted: dict[str, list[str | None]] = {}
    for tests in dict.fromkeys(fault.tests for fault in faults):
        files, expression = selection(tests)
        for file in files:
            wanted.setdefault(file, []).append(expression)
    seconds, passed = {}, True
    for file, expressions in wanted.items():
        begun = time.monotonic()
        either = None if None in expressions else " or ".join(f"({expression})" for expression in expressions)
        status, output = pytest(tree, pick([file], either), limit)
        seconds[file] = time.monotonic() - begun
        if status not in (0, NOTHING_PICKED):
            passed = False
            why = "time is up" if status is None else first_failure(output)
            print(f"{file} does not pass without a fault: {why}", flush=True)
    print(f"without faults: {len(wanted)} files of tests, {sum(seconds.values()):.0f} s", flush=True)
    return seconds if passed else None


def first_failure(output: str) -> str:
    """The first test that pytest's summary names, else its last line."""
    found = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.*?)(?: - .*)?$", output, re.MULTILINE)
    return found[1] if found else (output.strip().splitlines() or ["no output"])[-1]


def try_fault(tree: Path, fault: Fault, limit: float) -> tuple[str, str]:
    """(outcome, which test): one fault in a tree, which is as before afterwards."""
    path = tree / "triforce" / fault.file
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace(fault.old, fault.new), encoding="utf-8")
    try:
        status, output = pytest(tree, pick(*selection(fault.tests)), limit)
    finally:
        path.write_text(whole, encoding="utf-8")
    if status is None:
        return CAUGHT, f"time is up after {limit:.0f} s"
    if status == 1:
        return CAUGHT, first_failure(output)
    if status == 0:
        return SURVIVED, fault.tests
    return INVALID, f"pytest ends with {status}: {first_failure(output)}"  # it crashes at import, or no test is meant


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="ID", help="these faults alone")
    parser.add_argument("--file", nargs="+", metavar="NAME", help="those of these modules alone: attention.py ...")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time, each in a copy of its own (default 1)")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a file's tests without a fault (default "
                        "600); with one they get 60, and three times what they take without")
    args = parser.parse_args()
    for flag, given, known in (("--only", args.only, {fault.id for fault in FAULTS}),
                               ("--file", args.file, {fault.file for fault in FAULTS})):
        unknown = sorted(set(given or ()) - known)
        if unknown:
            parser.error(f"{flag}: nothing here is called {', '.join(unknown)}")
    return args


def main() -> int:
    args = arguments()
    faults = [fault for fault in FAULTS if not args.only or fault.id in args.only]
    faults = [fault for fault in faults if not args.file or fault.file in args.file]
    begun, wrong = time.monotonic(), misfits(ROOT / "triforce", faults)
    for message in wrong:
        print(message, flush=True)
    gone = {message.partition(":")[0] for message in wrong}
    faults = [fault for fault in faults if fault.id not in gone]

    counts = dict.fromkeys((CAUGHT, SURVIVED, INVALID), 0)
    with tempfile.TemporaryDirectory() as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for i in range(max(args.jobs, 1)):
            trees.put(copy_tree(Path(folder) / str(i)))
        tree = trees.get()
        seconds = check_without_faults(tree, faults, args.limit)
        trees.put(tree)
        if seconds is None:
            return 2

        def one(fault: Fault) -> tuple[Fault, str, str]:
            tree = trees.get()
            try:
                return fault, *try_fault(tree, fault, 60 + 3 * sum(seconds[file] for file in selection(fault.tests)[0]))
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(max(args.jobs, 1)) as pool:
            for fault, outcome, test in pool.map(one, faults):
                counts[outcome] += 1
                what = f"caught by {test}" if outcome == CAUGHT else f"{outcome} ({test}): {fault.breaks}"
                print(f"{fault.id:<36} {what}", flush=True)
    score = counts[CAUGHT] / max(len(faults), 1)
    minutes = (time.monotonic() - begun) / 60
    print(f"{counts[CAUGHT]} of {len(faults)} faults caught, {100 * score:.1f}%; {counts[SURVIVED]} survived, "
          f"{counts[INVALID]} invalid, {len(wrong)} no longer apply; {minutes:.0f} minutes")
    if wrong or counts[INVALID]:
        return 2
    return 0 if score >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
