"""Puts each fault of `faults.py` in, one at a time, and runs the tests that should see it.

    python tests/faults/run.py [--only ID ...] [--module NAME ...] [--jobs N]

On demand only: pytest does not collect it. No file is changed. First the tests are run without any fault, and must
pass. Then each fault gets a line: which test's assertion failed, or that something else ended the tests, or SURVIVED.
Exit status: 0 if an assertion caught at least 95% of them, else 1; 2 for a list that does not fit the code.

Each run of pytest is a fork of a process that has imported PyTorch and transformers already, but nothing of this
library: hundreds of runs would otherwise spend most of their time on that.
"""

import argparse
import contextlib
import importlib
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]  # this checkout before any installed copy of the library
os.environ.update(PYTHONPATH=os.pathsep.join(sys.path[:2]), OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

from faults import FAULTS  # noqa: E402
from hooks import Fault, files_of, install, misfits  # noqa: E402

ENOUGH = 0.95  # the share of the faults that an assertion is to catch
HOW = ["-n", "0", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "slow or not slow"]
IMPORTED = ("torch", "numpy", "pytest", "safetensors.torch", "tokenizers", "huggingface_hub", "jinja2", "tqdm",
            "transformers.models.llama.modeling_llama", "torch.distributed._functional_collectives")
PASSED, NOTHING_PICKED = 0, 5  # pytest's exit status


class Outcome(NamedTuple):
    status: int | None  # pytest's; None: the time was up
    test: str  # the first that failed
    how: str  # "assertion", or what ended it instead
    imported: bool  # the module with the fault was
    seconds: float
    output: str

    @property
    def caught(self) -> bool:
        return self.status == 1 and self.how == "assertion"


class First:
    """A plugin that notes the first failure."""

    test = how = ""

    def pytest_exception_interact(self, node, call) -> None:
        import pytest

        if self.test:
            return
        self.test, error, last = node.nodeid.removeprefix("tests/"), call.excinfo, call.excinfo.traceback[-1]
        asserts = error.errisinstance((AssertionError, pytest.fail.Exception))
        in_library = ROOT / "triforce" in Path(last.path).parents
        self.how = "assertion" if asserts and call.when == "call" and not in_library else error.typename


def run_pytest(arguments: list[str], fault: Fault | None, report: Path, output: int) -> None:
    """In a process of its own, which ends here."""
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(ROOT)
        if fault is not None:
            install(fault)
        import pytest

        first = First()
        status = int(pytest.main([*HOW, *arguments], [first]))
        sys.stdout.flush()
        report.write_text(json.dumps([status, first.test, first.how, fault is None or fault.module in sys.modules]))
    finally:
        os._exit(0)


@contextlib.contextmanager
def pytest_running(arguments: list[str], fault: Fault | None, limit: float):
    """Within, pytest runs in another process. Gives a function: its outcome, None as long as there is none."""
    with tempfile.TemporaryDirectory() as folder:
        report, begun = Path(folder) / "report", time.monotonic()
        with (Path(folder) / "output").open("w+", errors="replace") as output:
            pid = os.fork()
            if pid == 0:
                run_pytest(arguments, fault, report, output.fileno())

            def look() -> Outcome | None:
                seconds = time.monotonic() - begun
                ended = os.waitpid(pid, os.WNOHANG)[0]
                if not ended and seconds < limit:
                    return None
                output.seek(0)
                ending = ended and report.exists()
                found = json.loads(report.read_text()) if ending else [None, "", "time is up" if not ended else
                                                                       "the process died", True]
                return Outcome(*found, seconds, output.read())

            try:
                yield look
            finally:  # the session that was begun for it: it, and what it started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def run_all(runs: list[tuple[list[str], Fault | None, float]], jobs: int) -> Iterator[Outcome]:
    """The outcomes of pytest, so many at a time, in order. runs: (its arguments, a fault, seconds at most) each."""
    with contextlib.ExitStack() as stack:
        begun: list = []  # [context, look, outcome] each
        for place in range(len(runs)):
            while len(begun) <= place or begun[place][2] is None:
                running = [one for one in begun if one[2] is None]
                if len(running) < jobs and len(begun) < len(runs):
                    own = stack.enter_context(contextlib.ExitStack())
                    begun.append([own, own.enter_context(pytest_running(*runs[len(begun)])), None])
                    continue
                time.sleep(0.05)
                for one in running:
                    one[2] = one[1]()
                    if one[2] is not None:
                        one[0].close()
            yield begun[place][2]


def selected(fault: Fault) -> list[str]:
    """pytest's arguments."""
    expression = fault.tests.partition(" -k ")[2]
    return files_of(fault) + (["-k", *shlex.split(expression)] if expression else [])


def without_faults(faults: list[Fault], args) -> dict[str, float] | None:
    """Seconds that each choice of tests takes, file by file and all choices of it at once; None: a test fails."""
    wanted: dict[str, list[str | None]] = {}
    for fault in faults:
        expression = next(iter(selected(fault)[len(files_of(fault)) + 1 :]), None)
        for file in files_of(fault):
            wanted.setdefault(file, []).append(expression)
    runs = []
    for file, some in wanted.items():
        together = [] if None in some else ["-k", " or ".join(f"({one})" for one in dict.fromkeys(some))]
        runs.append(([file, *together], None, args.limit))
    seconds, failed = {}, False
    for file, outcome in zip(wanted, run_all(runs, args.jobs), strict=True):
        seconds[file] = outcome.seconds
        passed = outcome.status in (PASSED, NOTHING_PICKED)
        print(f"without faults {file:<34} {outcome.seconds:4.0f} s" + ("" if passed else f", FAILS: {outcome.test}"),
              flush=True)
        if not passed:
            print(outcome.output[-3000:])
        failed = failed or not passed
    return None if failed else seconds


def told(fault: Fault, outcome: Outcome, loud: bool) -> str:
    if outcome.caught:
        return f"caught by {outcome.test}"
    if outcome.status == PASSED:
        what = "SURVIVED" if outcome.imported else "NOT IMPORTED"
    else:
        what = f"not by an assertion, but by {outcome.how or 'nothing: no test is picked'} ({outcome.test})"
    return f"{what}: {fault.breaks} [{fault.tests}]" + (f"\n{outcome.output[-3000:]}" if loud else "")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="ID", help="these faults alone")
    parser.add_argument("--module", nargs="+", metavar="NAME", help="those of these modules alone: cache.views ...")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time (default 1)")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a file's tests without a fault (default "
                        "900); with one they get 60, and three times what they take without")
    parser.add_argument("--check", action="store_true", help="only whether the list fits the code: nothing is run")
    parser.add_argument("--loud", action="store_true", help="pytest's output for what no assertion caught")
    args = parser.parse_args()
    for flag, given, known in (("--only", args.only, {fault.id for fault in FAULTS}),
                               ("--module", args.module, {fault.where.partition(":")[0] for fault in FAULTS})):
        unknown = sorted(set(given or ()) - known)
        if unknown:
            parser.error(f"{flag}: nothing here is called {', '.join(unknown)}")
    return args


def main() -> int:
    args, begun = arguments(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes are cleared away, too
    wrong = misfits(FAULTS)
    print("".join(f"{message}\n" for message in wrong), end="", flush=True)
    if args.check:
        print(f"{len(FAULTS)} faults, {len(wrong)} do not fit the code")
        return 2 if wrong else 0
    gone = {message.partition(":")[0] for message in wrong}
    faults = [fault for fault in FAULTS if fault.id not in gone and (not args.only or fault.id in args.only)
              and (not args.module or fault.where.partition(":")[0] in args.module)]
    for module in IMPORTED:
        importlib.import_module(module)
    seconds = without_faults(faults, args)
    if seconds is None:
        return 2
    runs = [(selected(fault), fault, 60 + 3 * sum(map(seconds.get, files_of(fault)))) for fault in faults]
    caught = 0
    for fault, outcome in zip(faults, run_all(runs, args.jobs), strict=True):
        caught += outcome.caught
        print(f"{fault.id:<26} {told(fault, outcome, args.loud)}", flush=True)
    share = caught / max(len(faults), 1)
    print(f"{caught} of {len(faults)} faults caught by an assertion, {100 * share:.1f}%; {len(wrong)} do not fit the "
          f"code; {(time.monotonic() - begun) / 60:.0f} minutes")
    if wrong:
        return 2
    return 0 if share >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
