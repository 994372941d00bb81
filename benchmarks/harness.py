"""What the benchmarks share: the text that they continue, times of steps, tables, lines of JSON, plots."""

import contextlib
import importlib.util
import io
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

from triforce.cli.request import default_document
from triforce.decode.batch import DecodeBatch
from triforce.decode.plan import AUTOREGRESSION, ONE_ROW, DraftPlan
from triforce.errors import UserError
from triforce.parallel import leave
from triforce.runtime.streams import use_one_stream

REPEATS, ROUNDS = 5, 9
SLOW = 300


def run_or_plot(run, plot, args, one_stream: bool = True) -> None:
    """Draws the file of --plot, or calls run(args): under torchrun on each rank, of which only the first speaks.

    Args:
        one_stream: of a GPU, for all that is computed here, as in the commands.
    """
    if args.plot:
        try:
            plot(args.plot)
        except OSError as error:
            raise SystemExit(f"--plot {args.plot}: {error.strerror}") from None
        except (ValueError, LookupError, TypeError) as error:
            raise SystemExit(f"--plot {args.plot}: not the rows of this benchmark ({type(error).__name__}: {error})"
                             ) from None
        return
    check(args)
    alone = int(os.environ.get("WORLD_SIZE", 1)) == 1  # or else `from_environment` does it
    if one_stream and alone and torch.cuda.is_available() and getattr(args, "device", None) != "cpu":
        use_one_stream(torch.device("cuda"))  # for weights that are made here, too
    silent = int(os.environ.get("RANK", 0)) > 0
    try:
        with contextlib.redirect_stdout(io.StringIO()) if silent else contextlib.nullcontext():
            run(args)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    leave()


def check(args) -> None:
    """What would otherwise end in a traceback, perhaps after minutes."""
    for name in ("contexts", "context", "batches", "seeds", "rounds", "peer_tokens", "max_new_tokens", "warm_up"):
        values = getattr(args, name, 1)
        for value in values if isinstance(values, list) else [values]:
            if value < 1:
                raise SystemExit(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if not 0 <= getattr(args, "quote", 0) < min(getattr(args, "contexts", [1])):
        raise SystemExit(f"--quote {args.quote}: must be less than the context ({min(args.contexts)})")
    if getattr(args, "memory_cap", None) and not torch.cuda.is_available():
        raise SystemExit(f"--memory-cap {args.memory_cap} limits a GPU, and there is none; drop it")
    if getattr(args, "peers", False) and importlib.util.find_spec("transformers") is None:
        raise SystemExit("--peers needs transformers, which is not installed; pip install transformers")


def starter(gpus: int) -> list[str]:
    """The beginning of a command: Python, on several GPUs by torchrun."""
    return [sys.executable] + ["-m", "torch.distributed.run", "--nproc-per-node", str(gpus)] * (gpus > 1)


def device_name(device: str | None = None) -> str:
    """Of the GPU, unless there is none or `device` is "cpu"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() and device != "cpu" else "CPU"


def cap_memory(gib: float | None) -> None:
    """Lets this process allocate no more of the GPU. None: all of it."""
    if gib:
        torch.cuda.set_per_process_memory_fraction(gib * 2**30 / torch.cuda.mem_get_info()[1])


def read_text(path: str | None) -> str:
    """A file, or CPython's language reference."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace") if path else default_document()
    except OSError as error:
        raise UserError(f"--text {path}: {error.strerror}; give a text file") from None


def read_prompts(tokenizer, args) -> list[list[int]]:
    """The beginning of args.text, as long as each of args.contexts says. With args.quote, its last so many tokens are
    those of its middle once more: what comes next can be quoted."""
    ids = tokenizer.encode(read_text(args.text))
    if max(args.contexts) > len(ids):
        raise SystemExit(f"the text has {len(ids):,} tokens, fewer than --contexts {max(args.contexts):,}; give a "
                         "longer one")
    return [ids[: context - args.quote] + ids[context // 2 :][: args.quote] for context in args.contexts]


def report(title: str, row: dict, machine: dict, out: str | None) -> None:
    """Prints a row as a table, and appends it, with what ran it, to a file of JSON lines."""
    print(f"--- {title}", flush=True)
    for key, value in row.items():
        print(f"{key:<26}{f'{value:>12.3f}' if isinstance(value, float) else value}", flush=True)
    if out:
        append(out, {**machine, **row})


def append(out: str, row: dict) -> None:
    """A line of JSON at a file's end; under torchrun that of the first rank."""
    if int(os.environ.get("RANK", 0)):
        return
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    with open(out, "a") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def print_kernels(title: str, call, device, top: int = 14) -> None:
    """What a step spends its time on: its kernels by name, and what lies between them."""
    with torch.inference_mode():
        span, runs = milliseconds(call, device, repeats=7, warm_up=3), 3
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(runs):
                call()
            torch.cuda.synchronize(device)
    kernels = sorted((e for e in profile.key_averages() if e.self_device_time_total > 0),
                     key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in kernels) / runs / 1e3
    print(f"--- {title}: {span:.3f} ms, kernels {busy:.3f} ms, {sum(e.count for e in kernels) // runs} of them")
    for e in kernels[:top]:
        print(f"{e.self_device_time_total / runs / 1e3:9.3f} ms {e.count // runs:5} x "
              f"{e.self_device_time_total / e.count:8.1f} us  {e.key[:90]}", flush=True)


def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plots need matplotlib, which is not installed; pip install -e '.[bench]'") from None

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save(figure, path: str, rows: list[dict]) -> None:
    """Beside the file of its rows, under a title that says what ran them."""
    what = "trained tiny pair widened to the shape" if rows[0]["widened"] else rows[0]["checkpoint"]
    dates = ", ".join(sorted({row["date"] for row in rows}))
    commits = sorted({row["commit"] for row in rows if "commit" in row})  # new rows have none yet
    if commits:
        what += "; at " + ", ".join(commits)
    parts = f"{rows[0]['device']}, torch {rows[0]['torch']}, {dates}", what
    title = ("; " if figure.get_figwidth() > 9 else "\n").join(parts)
    figure.suptitle(title, fontsize=9, y=1 - 0.1 / figure.get_figheight(), va="top")  # a tenth of an inch below the top
    figure.tight_layout()
    figure.savefig(Path(path).with_suffix(".png"), dpi=120)


def milliseconds(call, device: torch.device, repeats: int = REPEATS, warm_up: int = 1, group=None) -> float:
    """Time of a call: the median by CUDA events on a GPU, the least on a CPU, where other work only ever adds.

    A call of over SLOW milliseconds is timed once. group: the ranks that make the call together, if any.
    """
    for _ in range(warm_up):
        begun = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        last = (time.perf_counter() - begun) * 1e3
    times = []
    if (last if group is None else group.agree(last)) > SLOW:  # or a rank would call once more, alone
        repeats = 1
    for _ in range(repeats):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            begun = time.perf_counter()
            call()
            times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times) if device.type == "cuda" else min(times)


def times(state: DecodeBatch, plan: DraftPlan, rounds: int = ROUNDS) -> tuple[float, float]:
    """Milliseconds of drafting and of checking, medians over rounds that follow a plan, from where the state stands.
    Rounds in which a step was recorded do not count."""
    found = []
    for _ in range(3 * rounds):
        state.round(plan)
        if state.last_round.timing is not None:
            found.append((state.last_round.timing.drafting, state.last_round.timing.checking))
        if len(found) == rounds:
            break
    drafting, checking = zip(*found, strict=True)
    return statistics.median(drafting), statistics.median(checking)


def step_times(state: DecodeBatch) -> dict[str, float]:
    """Milliseconds of each step: a verify of all rows and of one, a retrieval step, the first and a further token of
    what drafts at the bottom."""
    hierarchy = state.hierarchy
    rows = {"verify_ms": times(state, AUTOREGRESSION)[1], "one_row_ms": times(state, ONE_ROW)[1]}
    if hierarchy.inner is not None:
        rows["retrieval_ms"] = times(state, DraftPlan(1, None, True, 0, 1))[0]
    if "model" in hierarchy.sources:
        rows["draft_first_ms"] = first = times(state, DraftPlan(1, "model"))[0]
        if hierarchy.outer.rows > 2:
            rows["draft_next_ms"] = max(times(state, DraftPlan(2, "model"))[0] - first, 0.0)
    return rows
