"""Ways to check drawn tokens, side by side: rejection sampling, and draws that all levels share, by chains, with leaves
at their sides, or by trees.

    python benchmarks/coupled.py --text book.txt --context 8192 --seeds 8 --out results.jsonl
    python benchmarks/coupled.py --checkpoint DIR --draft DIR2 --text book.txt --context 122880
    torchrun --nproc-per-node 2 benchmarks/coupled.py --checkpoint DIR --draft DIR2 --text book.txt --context 122880
    python benchmarks/coupled.py --checkpoint DIR --draft DIR2 --text book.txt --context 122880 --offload \
        --gammas auto --ways rejection "coupled, tree" --tree-size 512 --same 8 --no-draws

For each rule, temperature and gamma: tokens a verify and row, milliseconds a token of all rows, acceptance at each
level, the same texts for both. With `--side-by-side` all engines are held at once, and take turns text by text: for
machines whose speed changes. `--samples 8` has that many continuations of the prompt over one prefix, `--batch 8` that
many prompts. Whether the text is that of `speculate=False` is looked at for one seed. Then what a draw takes, and what
a verify does. Of trees: how many tokens a verify the controller expects by what it has seen, beside what came. The
embedded pair by default: its acceptance is that of a small model which was trained towards its views.
"""

import argparse
import statistics
import sys
from collections import Counter
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

import triforce
from triforce.parallel import from_environment
from triforce.tape import FULL

sys.path.insert(0, str(Path(__file__).parent))
from harness import device_name, read_prompts, report, run_or_plot  # noqa: E402
from steps import milliseconds  # noqa: E402

LEAVES = {"leaves": 1, "leaves_inner": 3}
WAYS = {"rejection": {"sampling": "rejection"},
        "coupled": {"sampling": "coupled", **dict.fromkeys(LEAVES, 0)},
        "coupled, leaves": {"sampling": "coupled", **LEAVES},
        "coupled, tree": {"sampling": "coupled", "leaves_inner": LEAVES["leaves_inner"]}}


def run(args) -> None:
    args.contexts, args.quote = [args.context], 0
    group, args.device = from_environment(args.device)
    machine = {"date": str(date.today()), "torch": torch.__version__, "checkpoint": args.checkpoint,
               "context": args.context, "device": device_name(args.device),
               "gpus": 1 if group is None else group.size, "offload": args.offload, "samples": args.samples,
               "batch": args.batch, "block_size": args.block_size, "side_by_side": args.side_by_side}
    for gamma in args.gammas:
        for ways in [args.ways] if args.side_by_side else [[way] for way in args.ways]:
            engines = {way: load(way, gamma, args, group) for way in ways}
            prompts = read_batch(engines[ways[0]].tokenizer, args)
            for temperature, top_p in ((0.6, 0.9), (1.0, 1.0)):
                law = {"temperature": temperature, "top_p": top_p, "ignore_eos": True}
                for way, row in measure(engines, prompts, args, law).items():
                    row = {"rule": way, "gamma": gamma, "temperature": temperature, "top_p": top_p, **row}
                    report(f"{way}, gamma {gamma}, temperature {temperature}", row, machine, args.out)
            for way, engine in engines.items():
                if args.draws:
                    row = {"rule": way, "gamma": gamma, **draws(engine, prompts[0])}
                    report(f"{way}, gamma {gamma}: a draw", row, machine, args.out)
                engine.release()


def load(way: str, gamma, args, group):
    settings = WAYS[way] | ({"tree_size": args.tree_size} if "tree" in way else {}) | {"block_size": args.block_size}
    return triforce.load(args.checkpoint, **({"draft": args.draft} if args.draft else {}), group=group, gamma=gamma,
                         **settings, device=args.device, dtype=args.dtype, offload=args.offload, compile=args.compile,
                         max_batch_size=max(args.batch, args.samples))


def read_batch(tokenizer, args) -> list[list[int]]:
    """Prompts from places of the text that lie apart, each of args.context tokens."""
    args.contexts = [args.context + 512 * (args.batch - 1)]
    [ids] = read_prompts(tokenizer, args)
    return [ids[512 * i : 512 * i + args.context] for i in range(args.batch)]


def measure(engines: dict, prompts: list[list[int]], args, law: dict) -> dict[str, dict]:
    """Over args.seeds texts of each row; the ways take turns."""
    def generate(engine, count: int, seed: int, **more) -> list:
        if args.samples > 1:
            return engine.generate(prompts[0], count, seed=seed, num_samples=args.samples, **law, **more)
        return engine.generate(prompts, count, seed=[seed + 1000 * row for row in range(len(prompts))], **law, **more)

    for engine in engines.values():
        generate(engine, args.warm_up, 1000)
    outs, leaves = {way: [] for way in engines}, {way: Counter() for way in engines}
    for seed in range(args.seeds):
        for way, engine in engines.items():
            outs[way].append(generate(engine, args.max_new_tokens, seed))
            hierarchy = engine.buffers.state.hierarchy
            for name, level in (("retrieval", hierarchy.inner), ("full", hierarchy.outer)):
                leaves[way][name] += int(level.totals[:, 2].sum())
    rows = {way: expected(engine) for way, engine in engines.items()}
    for way, engine in engines.items():
        plain = generate(engine, min(args.max_new_tokens, args.same), 0, speculate=False)
        rows[way] |= told(outs[way], leaves[way], plain, args)
    return rows


def told(outs: list[list], leaves: Counter, plain: list, args) -> dict:
    stats = [out.stats for rows in outs for out in rows]
    verifies = sum(rows[0].stats.target_forwards * len(rows) for rows in outs)
    times = [rows[0].stats.decode * 1e3 / sum(out.stats.new_tokens - 1 for out in rows) for rows in outs]
    row = {"seeds": args.seeds, "new_tokens": args.max_new_tokens,
           "tokens_a_verify": sum(one.new_tokens for one in stats) / verifies,
           "ms_a_token": statistics.median(times), "ms_a_token_by_seed": [round(one, 3) for one in times]}
    for level in ("retrieval", "full"):
        row[f"acceptance_{level}"] = statistics.fmean(one.acceptance_rate.get(level, 0.0) for one in stats)
        row[f"leaves_a_verify_{level}"] = leaves[level] / verifies
    pairs = [zip(out.tokens, other.tokens, strict=False) for out, other in zip(outs[0], plain, strict=True)]
    return {**row, "same_as_without": all(a == b for pair in pairs for a, b in pair)}


def expected(engine) -> dict:
    """The last plan, and, of a tree, the tokens a verify that it is expected to bring."""
    controller = engine.buffers.state.pilot.controller
    if controller is None:
        return {}
    plan = engine.buffers.state.last_round.plan
    row = {"plan": str(replace(plan, shape=None))}
    if not plan.branches:
        return row
    chances = [controller.rates[name].value for name in ("retrieval", "leaves")]
    return {**row, "rows": plan.shape.rows, "chances": chances, "expected_tokens_a_verify": controller.tokens}


def draws(engine, ids: list[int]) -> dict:
    """Milliseconds to draw all rows of a verify from their law, as it is written, and of a round without drafts."""
    tape, level = engine.buffers.state.tape, engine.buffers.state.hierarchy.outer
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
    flags.add_argument("--ways", nargs="+", default=list(WAYS)[:3], choices=list(WAYS))
    flags.add_argument("--side-by-side", action="store_true")
    flags.add_argument("--samples", type=int, default=1)
    flags.add_argument("--batch", type=int, default=1)
    flags.add_argument("--tree-size", type=int, default=512)
    flags.add_argument("--block-size", type=int, help="default: by device and number of rows")
    flags.add_argument("--same", type=int, default=64, help="tokens that are compared with those of speculate=False")
    flags.add_argument("--draws", action=argparse.BooleanOptionalAction, default=True, help="what a draw takes, too")
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
