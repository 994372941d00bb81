"""How long a recorded step takes in a process that has used one stream of the GPU, and once it has used another.

    python benchmarks/streams.py --out results.jsonl

A step of 600 kernels, 30 of them products, is recorded and replayed, by each way in a process of its own:

    one      recorded and replayed on the only stream that the process uses
    two      recorded on a second stream, and replayed on the default one, after so many other recordings there
    another  recorded and replayed on a second stream, after tensors were made on the default one

Medians of 20 replays, by events.
"""

import argparse
import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from harness import append, device_name, run_or_plot  # noqa: E402
from steps import milliseconds  # noqa: E402

from triforce.errors import UserError  # noqa: E402

KERNELS, SIZE, OTHERS = 600, 4096, 6
WAYS = ("one", "two", "another")


def step(x, weights, out) -> None:
    for i in range(KERNELS - 1):
        x = x @ weights[i // 20 % len(weights)] if i % 20 == 10 else x + 0.01
    out.copy_(x)


def record(stream: torch.cuda.Stream, *args) -> torch.cuda.CUDAGraph:
    step(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        step(*args)
        graph.capture_end()
    return graph


def replay(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds."""
    return milliseconds(graph.replay, torch.device("cuda"), repeats=20, warm_up=5)


def measure(way: str) -> list[float]:
    """Of a step, after 0, 1, ... other recordings."""
    recorder = torch.cuda.Stream()
    if way == "one":
        torch.cuda.set_stream(recorder)
    weights = [torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(30)]
    x = torch.randn(1, SIZE, device="cuda", dtype=torch.bfloat16)
    if way == "another":
        torch.cuda.set_stream(recorder)
    args = x, weights, torch.empty_like(x)
    graphs = [record(recorder, *args)]
    found = [replay(graphs[0])]
    for _ in range(OTHERS):
        graphs.append(record(recorder, *args))
        found.append(replay(graphs[0]))
    return found


def run(args) -> None:
    if not torch.cuda.is_available():
        raise UserError("this measures a GPU, and PyTorch finds none; run it on a machine that has one")
    if args.way:
        print(json.dumps(measure(args.way)))
        return
    for way in WAYS:
        done = subprocess.run([sys.executable, __file__, "--way", way], capture_output=True, text=True, check=True)
        row = {"device": device_name(), "date": str(date.today()), "torch": torch.__version__, "way": way,
               "kernels": KERNELS, "milliseconds": json.loads(done.stdout.splitlines()[-1])}
        times = " ".join(f"{ms:.3f}" for ms in row["milliseconds"])
        print(f"{way:<8} ms after 0 to {OTHERS} other recordings: {times}", flush=True)
        if args.out:
            append(args.out, row)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--way", choices=WAYS, help="measure this one, in this process")
    p.add_argument("--out", help="append rows to this file of JSON lines")
    p.set_defaults(plot=None)
    run_or_plot(run, None, p.parse_args(), one_stream=False)


if __name__ == "__main__":
    main()
