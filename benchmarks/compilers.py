"""Ways to compile steps, side by side: this library's pieces, and `torch.compile(mode="reduce-overhead")`.

    python benchmarks/compilers.py --checkpoint DIR/target --draft DIR/draft --text book.txt --out rows.jsonl
    python benchmarks/compilers.py --ways written "reduce-overhead" --context 600     # the embedded pair on a CPU

For each way two fresh processes, one with an empty cache and one that finds what the first has kept. Each loads the
folder, prefills, and then takes a verify, a step of the retrieval level and a draft step: what their first calls took,
until all are as fast as they will be; then the times of a step, and of the host for a call that nobody waits for.

kept pieces: halves of a layer, compiled beforehand and recorded as one graph. written: nothing is compiled, and steps
are recorded. reduce-overhead: a whole step is a function of `torch.compile`. nested: the same with each layer a region
that is compiled once (`torch.compiler.nested_compile_region`).
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from harness import device_name, read_text, report, run_or_plot  # noqa: E402
from steps import milliseconds  # noqa: E402

import triforce  # noqa: E402
from triforce import jobs  # noqa: E402
from triforce.model import Block, RMSNorm  # noqa: E402
from triforce.pieces import reachable  # noqa: E402
from triforce.plan import Plan  # noqa: E402

WAYS = ("kept pieces", "written", "reduce-overhead", "nested")
CALLS = 4  # until a step is recorded
REPEATS = 21


def run(args) -> None:
    if args.worker:
        print(json.dumps(work(args)))
        return
    for way in args.ways:
        with tempfile.TemporaryDirectory() as cache:
            for process in ("first", "later"):
                row = start(way, cache)
                machine = {"device": device_name(), "date":
                           str(date.today()), "torch": torch.__version__, "checkpoint": args.checkpoint,
                           "context": args.context}
                report(f"{way}, {process} process", {"way": way, "process": process, **row}, machine, args.out)


def start(way: str, cache: str) -> dict:
    """The row of a fresh process, or what it ended with."""
    kept = {"TRIFORCE_CACHE": f"{cache}/triforce", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", way]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **kept})
    if done.returncode:  # a compiler that fails is a finding, too
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        told = r"[\w.]*(Error|Exception|Unsupported)|Explanation:|Developer debug"
        said = [line for line in lines if re.match(told, line)]
        return {"error": " ".join(said or lines[-1:] or ["nothing was said"])[-600:]}
    return json.loads(done.stdout.splitlines()[-1])


@torch.no_grad()
def work(args) -> dict:
    options = {"draft": args.draft} if args.draft else {}
    if args.worker != "kept pieces":  # nor are pieces compiled beside
        jobs.start = lambda *args: None
    engine = triforce.load(args.checkpoint, compile=True if args.worker == "kept pieces" else "beside",
                           block_size=args.block_size, gamma_inner=4, **options)
    ids = engine.tokenizer.encode(read_text(args.text))[: args.context]
    begun = time.perf_counter()
    state = engine.prepare([ids], 256, temperature=0.6, top_p=0.9)
    row, hierarchy, begun = {"prefill_s": time.perf_counter() - begun}, state.hierarchy, time.perf_counter()
    outer, inner, source = hierarchy.outer, hierarchy.inner, hierarchy.sources["model"]
    if args.worker in ("reduce-overhead", "nested"):
        compile_whole_steps(state, args.worker == "nested")
    here = outer.length.clone()
    source.catch_up(here.tolist())

    def draft() -> None:
        source.propose(here, Plan(1, "model"), outer.draft_probs)
        source.commit(here)

    calls = {"verify": lambda: outer.rehearse(here, outer.rows),
             "retrieval": lambda: inner.rehearse(here, inner.rows, outer.draft_probs), "draft": draft}
    with outer.rehearsal(), inner.rehearsal():
        for call in calls.values():
            for _ in range(CALLS):
                call()
            synchronize(engine.device)
        row["first_calls_s"] = time.perf_counter() - begun
        for name, call in calls.items():
            row[f"{name}_ms"] = milliseconds(call, engine.device, repeats=REPEATS)
            row[f"{name}_host_ms"] = host_milliseconds(call, engine.device)
    return row if args.worker != "kept pieces" else row | {"missing": len(state.compiler.pieces.missing)}


def compile_whole_steps(state, nested: bool) -> None:
    """Puts functions of `torch.compile` in the place of the levels' steps."""
    state.compiler.pieces = None
    for name, module in list(sys.modules.items()):  # the code that is written to be compiled
        if name.startswith("triforce.") and hasattr(module, "is_traced"):
            module.is_traced = lambda: True
    for tensor, _ in reachable([state]).values():  # or each call would copy all caches
        torch._dynamo.mark_static_address(tensor)
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    if nested:
        Block.forward = torch.compiler.nested_compile_region(Block.forward)
        models = state.target, state.hierarchy.sources["model"].model
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, RMSNorm):  # what such a region takes may not share memory
                module.constants = [x.clone() for x in module.constants]
    how = {"mode": "reduce-overhead", "fullgraph": True, "dynamic": False}
    for level in state.hierarchy.levels:
        level.step = torch.compile(level._step, **how)
    source = state.hierarchy.sources["model"]
    source.steps = {rows: torch.compile(source._step, **how) for rows in source.steps}


def host_milliseconds(call, device: torch.device) -> float:
    """Until a call returns: the device may still be at it."""
    times = []
    for _ in range(REPEATS):
        synchronize(device)
        begun = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begun))
    synchronize(device)
    return statistics.median(times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", default="tiny")
    p.add_argument("--draft")
    p.add_argument("--text", help="a file; default: CPython's language reference")
    p.add_argument("--context", type=int, default=16384)
    p.add_argument("--block-size", type=int, default=16)
    p.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    p.add_argument("--out", help="append rows to this file of JSON lines")
    p.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    p.set_defaults(plot=None)
    run_or_plot(run, None, p.parse_args())
