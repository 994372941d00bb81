"""A CPU whose cores other programs use: as many threads as they leave cores, and as many threads as ever.

    python benchmarks/busy_cores.py --text book.txt --busy 0 1 --repeats 3 --out results.jsonl

`--busy` is how many cores are kept busy by a program that does nothing else. For each, both ways take turns: a prefill,
and a text after it. Medians of the repeats; ms a token. The embedded pair by default.
"""

import argparse
import platform
import subprocess
import sys
from datetime import date
from statistics import median

import torch
from harness import read_prompts, report, run_or_plot

import triforce
from triforce.threads import Threads

WAYS = {"threads for free cores": None, "all threads": lambda: 0.0}  # what others are said to take


def run(args) -> None:
    args.contexts, args.quote = [args.context], 0
    engine = triforce.load(args.checkpoint, device="cpu", gamma=args.gamma)
    [ids] = read_prompts(engine.tokenizer, args)
    machine = {"date": str(date.today()), "torch": torch.__version__, "device": platform.machine(), "checkpoint":
               args.checkpoint, "context": args.context, "gamma": args.gamma, "threads": torch.get_num_threads()}
    for busy in args.busy:
        found: dict[str, list] = {way: [] for way in WAYS}
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
        try:
            for seed in range(args.repeats):
                for way, look in WAYS.items():
                    engine.release()
                    engine.threads = Threads(engine.device, look)
                    found[way].append(engine.generate(ids, args.max_new_tokens, seed=seed, ignore_eos=True).stats)
        finally:
            for other in others:
                other.kill()
        for way, stats in found.items():
            report(f"{way}, {busy} busy", {"way": way, "busy": busy, "prefill_s": median(one.prefill for one in stats),
                                           "ms_a_token": median(1e3 * one.tbt for one in stats),
                                           "ms_a_token_each": [round(1e3 * one.tbt, 1) for one in stats]},
                   machine, args.out)


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--checkpoint", default="tiny")
    flags.add_argument("--text", help="a file; default: CPython's language reference")
    flags.add_argument("--context", type=int, default=4096)
    flags.add_argument("--gamma", default=6, type=lambda x: x if x == "auto" else int(x))
    flags.add_argument("--busy", type=int, nargs="+", default=[0, 1])
    flags.add_argument("--repeats", type=int, default=3)
    flags.add_argument("--max-new-tokens", type=int, default=128)
    flags.add_argument("--out", help="append rows to this file")
    flags.set_defaults(plot=None)
    run_or_plot(run, None, flags.parse_args())
