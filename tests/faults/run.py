"""Puts each fault of `faults.py` into a copy of the tree, and runs the tests that should see it.

    python tests/faults/run.py [--only ID ...] [--file NAME ...] [--jobs N]

On demand only: pytest does not collect it. The checkout itself is never touched. First the tests are run without any
fault, and must pass. Then each fault gets a line: the test that caught it, that the tests ran into their time limit
(which counts as caught), or SURVIVED. Exit status: 0 if at least 95% were caught, else 1; 2 for a list that does not
fit the code.

Each run of pytest is a fork of a process that has imported PyTorch and transformers already, but nothing of this
library: hundreds of runs would otherwise spend most of their time on that.
"""

import argparse
import importlib
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from faults import FAULTS, Fault, misfits

ROOT = Path(__file__).parents[2]
ENOUGH = 0.95  # the share of the faults that is to be caught
ALL = "slow or not slow"
NOTHING_PICKED = 5  # pytest's exit status where -k leaves no test
CAUGHT, SURVIVED, INVALID = "caught", "SURVIVED", "INVALID"
IMPORTED = ("torch", "numpy", "pytest", "safetensors.torch", "tokenizers", "huggingface_hub", "jinja2", "tqdm",
            "transformers.models.llama.modeling_llama", "torch.distributed._functional_collectives")
tree = Path()  # this process's copy of the checkout


def warm(folder: str) -> None:
    """Makes a process ready for runs: the files that git knows or would add, as they are, and what tests import."""
    global tree
    tree = Path(folder) / str(os.getpid())
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
    os.environ.update(PYTHONPATH=str(tree), OMP_NUM_THREADS="1", MKL_NUM_THREADS="1",
                      # Compiled modules are told apart by second and size: too little for a change of one sign.
                      PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    sys.path[0] = str(tree)  # before any installed copy of this library
    for name in IMPORTED:
        try:
            importlib.import_module(name)
        except ImportError:  # then the tests will say so
            pass


def pytest(arguments: list[str], limit: float) -> tuple[int | None, str]:
    """(exit status, output) of pytest in this process's tree, with one thread; status None: the time was up."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        pid = os.fork()
        if pid == 0:
            run_pytest(arguments, output.fileno())
        begun, status = time.monotonic(), None
        while status is None and time.monotonic() - begun < limit:
            time.sleep(0.05)
            ended, code = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if ended else None
        try:
            os.killpg(pid, signal.SIGKILL)  # the session that was begun for it: it, and what it started
        except ProcessLookupError:
            pass
        if status is None:
            os.waitpid(pid, 0)
        output.seek(0)
        return status, output.read()


def run_pytest(arguments: list[str], output: int) -> None:
    """In a process of its own, which ends here."""
    status = 70
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        import pytest

        how = ["-n", "0", "-x", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", "-m", ALL]
        status = int(pytest.main([*how, *arguments]))
        sys.stdout.flush()
    finally:
        os._exit(status)


def selection(tests: str) -> tuple[list[str], str | None]:
    """`test_a.py test_b.py -k "this or that"` -> (files, the expression behind -k, if any)."""
    words = shlex.split(tests)
    at = words.index("-k") if "-k" in words else len(words)
    return [f"tests/{file}" for file in words[:at]], words[at + 1] if at < len(words) else None


def pick(files: list[str], expression: str | None) -> list[str]:
    """pytest's arguments."""
    return files if expression is None else [*files, "-k", expression]


def wanted(faults: list[Fault]) -> dict[str, str | None]:
    """For each file of tests, all that some fault wants of it, as one expression; None: the whole."""
    found: dict[str, list[str | None]] = {}
    for tests in dict.fromkeys(fault.tests for fault in faults):
        files, expression = selection(tests)
        for file in files:
            found.setdefault(file, []).append(expression)
    return {file: None if None in some else " or ".join(f"({one})" for one in some) for file, some in found.items()}


def without_faults(file: str, expression: str | None, limit: float) -> tuple[float, str | None]:
    """(seconds, what failed if anything did) of a file's tests as they are."""
    begun = time.monotonic()
    status, output = pytest(pick([file], expression), limit)
    failure = None if status in (0, NOTHING_PICKED) else "time is up" if status is None else first_failure(output)
    return time.monotonic() - begun, failure


def first_failure(output: str) -> str:
    """The first test that pytest's summary names, else its last line."""
    found = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.*?)(?: - .*)?$", output, re.MULTILINE)
    return found[1] if found else (output.strip().splitlines() or ["no output"])[-1]


def with_fault(fault: Fault, limit: float) -> tuple[str, str]:
    """(outcome, which test). The tree is as before afterwards."""
    path = tree / "triforce" / fault.file
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace(fault.old, fault.new), encoding="utf-8")
    try:
        status, output = pytest(pick(*selection(fault.tests)), limit)
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
    parser.add_argument("--limit", type=float, default=900, help="seconds for a file's tests without a fault (default "
                        "900); with one they get 60, and three times what they take without")
    args = parser.parse_args()
    for flag, given, known in (("--only", args.only, {fault.id for fault in FAULTS}),
                               ("--file", args.file, {fault.file for fault in FAULTS})):
        unknown = sorted(set(given or ()) - known)
        if unknown:
            parser.error(f"{flag}: nothing here is called {', '.join(unknown)}")
    return args


def main() -> int:
    args, begun = arguments(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that copies and processes are cleared away, too
    faults = [fault for fault in FAULTS if not args.only or fault.id in args.only]
    faults = [fault for fault in faults if not args.file or fault.file in args.file]
    wrong = misfits(ROOT / "triforce", faults)
    for message in wrong:
        print(message, flush=True)
    gone = {message.partition(":")[0] for message in wrong}
    faults = [fault for fault in faults if fault.id not in gone]

    counts = dict.fromkeys((CAUGHT, SURVIVED, INVALID), 0)
    sys.warnoptions.append("ignore:resource_tracker")  # locks of runs that were broken off: nobody misses them
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(
            max(args.jobs, 1), multiprocessing.get_context("spawn"), warm, (folder,)) as pool:
        files = wanted(faults)
        results = pool.map(without_faults, files, files.values(), [args.limit] * len(files))
        seconds, failed = {}, False
        for file, (took, failure) in zip(files, results, strict=True):
            seconds[file] = took
            print(f"without faults {file:<32} {took:4.0f} s" + (f", FAILS: {failure}" if failure else ""), flush=True)
            failed = failed or failure is not None
        if failed:
            return 2
        limits = [60 + 3 * sum(seconds[file] for file in selection(fault.tests)[0]) for fault in faults]
        for fault, (outcome, test) in zip(faults, pool.map(with_fault, faults, limits), strict=True):
            counts[outcome] += 1
            what = f"caught by {test}" if outcome == CAUGHT else f"{outcome} ({test}): {fault.breaks}"
            print(f"{fault.id:<32} {what}", flush=True)
    score = counts[CAUGHT] / max(len(faults), 1)
    minutes = (time.monotonic() - begun) / 60
    print(f"{counts[CAUGHT]} of {len(faults)} faults caught, {100 * score:.1f}%; {counts[SURVIVED]} survived, "
          f"{counts[INVALID]} invalid, {len(wrong)} no longer apply; {minutes:.0f} minutes")
    if wrong or counts[INVALID]:
        return 2
    return 0 if score >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
