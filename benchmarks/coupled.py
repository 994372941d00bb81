"""Ways to check drawn tokens, side by side: rejection sampling, and draws that all levels share, with leaves or not.

    python benchmarks/coupled.py --text book.txt --context 8192 --seeds 8 --out results.jsonl
    python benchmarks/coupled.py --checkpoint DIR --draft DIR2 --text book.txt --context 122880

For each rule, temperature and gamma: tokens a verify, milliseconds a token, acceptance at each level, the same texts
for both. Whether the text is that of `speculate=False` is looked at for one seed. Then what a draw takes, and what a
verify does. The embedded pair by default: its acceptance is that of a small model which was trained towards its views.
"""

import argparse
import platform
import statistics
import sys
from collections import Counter
from datetime import date
from pathlib import Path

import torch

import triforce
from triforce.tape import FULL

sys.path.insert(0, str(Path(__file__).parent))
from harness import read_prompts, report, run_or_plot  # noqa: E402
from steps import milliseconds  # noqa: E402

LEAVES = {"leaves": 1, "leaves_inner": 3}
WAYS = {"rejection": {"sampling": "rejection"},
        "coupled": {"sampling": "coupled", **dict.fromkeys(LEAVES, 0)},
        "coupled, leaves": {"sampling": "coupled", **LEAVES}}


def run(args) -> None:
    args.contexts, args.quote = [args.context], 0
    machine = {"date": str(date.today()), "torch": torch.__version__, "checkpoint": args.checkpoint,
               "context": args.context, "device": args.device or platform.machine()}
    for gamma in args.gammas:
        for rule, settings in WAYS.items():
            engine = triforce.load(args.checkpoint, **({"draft": args.draft} if args.draft else {}), gamma=gamma,
                                   **settings, device=args.device, dtype=args.dtype, offload=args.offload,
                                   compile=args.compile)
            [ids] = read_prompts(engine.tokenizer, args)
            for temperature, top_p in ((0.6, 0.9), (1.0, 1.0)):
                law = {"temperature": temperature, "top_p": top_p, "ignore_eos": True}
                row = {"rule": rule, "gamma": gamma, "temperature": temperature, "top_p": top_p,
                       **measure(engine, ids, args, law)}
                report(f"{rule}, gamma {gamma}, temperature {temperature}", row, machine, args.out)
            report(f"{rule}, gamma {gamma}: a draw", {"rule": rule, "gamma": gamma, **draws(engine, ids)}, machine,
                   args.out)


def measure(engine, ids: list[int], args, law: dict) -> dict:
    """Over args.seeds texts."""
    engine.generate(ids, args.warm_up, seed=1000, **law)
    outs, leaves = [], Counter()
    for seed in range(args.seeds):
        outs.append(engine.generate(ids, args.max_new_tokens, seed=seed, **law))
        hierarchy = engine.caches.state.hierarchy
        for name, level in (("retrieval", hierarchy.inner), ("full", hierarchy.outer)):
            leaves[name] += int(level.totals[:, 2].sum())
    plain = engine.generate(ids, min(args.max_new_tokens, 64), seed=0, speculate=False, **law)
    stats = [out.stats for out in outs]
    verifies = sum(one.target_forwards for one in stats)
    row = {"seeds": args.seeds, "new_tokens": args.max_new_tokens,
           "tokens_a_verify": sum(one.new_tokens for one in stats) / verifies,
           "ms_a_token": statistics.median(one.tbt for one in stats) * 1e3}
    for level in ("retrieval", "full"):
        row[f"acceptance_{level}"] = statistics.fmean(one.acceptance_rate.get(level, 0.0) for one in stats)
        row[f"leaves_a_verify_{level}"] = leaves[level] / verifies
    same = zip(outs[0].tokens, plain.tokens, strict=False)
    return {**row, "same_as_without": all(a == b for a, b in same)}


def draws(engine, ids: list[int]) -> dict:
    """Milliseconds to draw all rows of a verify from their law, as it is written, and of a round without drafts."""
    tape, level = engine.caches.state.tape, engine.caches.state.hierarchy.outer
    law = tape.law(engine.logits([ids[-level.rows:]]).to(engine.device))
    position = torch.arange(level.rows, device=law.device)[None]
    engine.generate(ids, 8, speculate=False, seed=0)
    out = engine.generate(ids, 24, speculate=False, seed=0, ignore_eos=True)
    with torch.inference_mode():
        draw = milliseconds(lambda: tape.draw(law, position, FULL), law.device)
    return {"rows": level.rows, "vocabulary": law.shape[-1], "draw_ms": draw, "verify_ms": out.stats.tbt * 1e3}


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--checkpoint", default="tiny")
    flags.add_argument("--draft")
    flags.add_argument("--text", help="a file; default: CPython's language reference")
    flags.add_argument("--context", type=int, default=8192)
    flags.add_argument("--gammas", nargs="+", default=[6], type=lambda x: x if x == "auto" else int(x))
    flags.add_argument("--seeds", type=int, default=8)
    flags.add_argument("--max-new-tokens", type=int, default=128)
    flags.add_argument("--warm-up", type=int, default=32)
    flags.add_argument("--device")
    flags.add_argument("--dtype")
    flags.add_argument("--offload", action="store_true")
    flags.add_argument("--compile", action=argparse.BooleanOptionalAction, help="wait for compiled steps, or have none")
    flags.add_argument("--out", help="append rows to this file")
    flags.set_defaults(plot=None)
    run_or_plot(run, None, flags.parse_args())
