"""Is the first answer of a process slower with speculation? Fresh processes, text by text, by the wall clock.

    python benchmarks/first_tokens.py --checkpoint DIR/target --draft DIR/draft --text book.txt --context 16384 \
        --out results.jsonl
    python benchmarks/first_tokens.py --text book.txt --context 6000           # the embedded pair on a CPU
    python benchmarks/first_tokens.py --text book.txt --context 6000 --wrong   # nothing that is drafted is right

For each text a process with speculation and one without, in turns: each loads the folder, prefills and decodes, by
default on what an earlier process compiled. The table tells, for so many tokens, how long it took until the last of
them was there: from the start of the process, and from the end of the prefill. Medians over the texts; the ratios are
those of autoregression over speculation, text by text. Texts are stretches of one book. Autoregression takes steps of
one row, the fastest that it has.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from first_run import wait_for_compiling  # noqa: E402
from harness import append, device_name, read_rows, read_text, run_or_plot, starter  # noqa: E402

from triforce.cli.main import ALLOCATOR, GROWING  # noqa: E402

PROCESS = """
import json, sys, time
job = json.load(open(sys.argv[1]))
sys.path.insert(0, job["root"])
import torch
import triforce
from triforce.parallel import from_environment, leave
group, device = from_environment()
engine = triforce.load(job["checkpoint"], group=group, device=device, **job["options"])
if job["wrong"]:  # the draft proposes what it finds least likely
    with torch.no_grad():
        engine.draft.norm.weight.neg_()
ids = engine.tokenizer.encode(open(job["text"], encoding="utf-8").read())
first = int((len(ids) - job["context"]) * job["share"])
loaded, rounds = time.time() - job["begun"], []
out = engine.generate(ids[first : first + job["context"]], job["new"], seed=0, ignore_eos=True,
                      speculate=job["speculate"], one_row=not job["speculate"],
                      on_decode=lambda count: rounds.append((count, time.time() - job["begun"])))
if group is None or group.rank == 0:
    print(json.dumps({"load": loaded, "prefill": out.stats.prefill, "preparing": out.stats.recording, "rounds": rounds,
                      "tokens_a_verify": out.stats.block_efficiency}))
del engine  # recorded graphs hold on to the group
leave()
"""


def process(args, text: Path, share: float, speculate: bool, cache: str) -> dict:
    """A fresh process, and when so many tokens were there: seconds from its start, and from the end of its prefill."""
    options = {"offload": args.offload} | ({"draft": args.draft} if args.draft else {})
    options |= {"retrieval": False} if args.wrong else {}
    script, order = text.with_name("process.py"), text.with_name("job.json")
    script.write_text(PROCESS)
    order.write_text(json.dumps({"root": str(ROOT), "checkpoint": args.checkpoint, "text": str(text), "context":
                                args.context, "new": max(args.new), "share": share, "speculate": speculate,
                                "options": options, "wrong": args.wrong, "begun": time.time()}))
    done = subprocess.run([*starter(args.gpus), str(script), str(order)], capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, env={**os.environ, ALLOCATOR: GROWING, "TRIFORCE_CACHE": cache})
    if done.returncode:
        raise SystemExit(f"a process ended with {done.returncode}: {done.stderr[-600:]}")
    row = json.loads(done.stdout.splitlines()[-1])
    rounds, prefilled = row.pop("rounds"), row["load"] + row["prefill"]
    there = [next(when for told, when in rounds if told >= count) for count in args.new]
    return {"speculate": speculate, **row, "tokens": args.new, "from_start": there,
            "from_prefill": [when - prefilled for when in there]}


def run(args) -> None:
    machine = {"device": device_name(), "date":
               str(date.today()), "torch": torch.__version__, "checkpoint": args.checkpoint, "context": args.context,
               "wrong": args.wrong, "empty": args.empty, "offload": args.offload, "gpus": args.gpus}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        text, cache = Path(folder, "text.txt"), args.cache or os.path.join(folder, "cache")
        text.write_text(read_text(args.text), encoding="utf-8")
        if not args.empty:
            process(args, text, 0.0, True, cache)
            if torch.cuda.is_available():
                wait_for_compiling(cache)
        for i in range(args.texts):
            for speculate in (True, False) if i % 2 else (False, True):  # neither is always the first
                own = os.path.join(folder, f"{i}-{speculate}") if args.empty else cache
                rows.append({"text": i, **process(args, text, i / max(args.texts - 1, 1), speculate, own)})
                print(f"text {i}, {'with' if speculate else 'without'} speculation: {rows[-1]['from_start'][-1]:.1f} s",
                      flush=True)
                if args.out:
                    append(args.out, {**machine, **rows[-1]})
                if args.empty and torch.cuda.is_available():
                    wait_for_compiling(own)  # beside which nothing else is to be measured
    print_table(rows)


SAME = ("device", "checkpoint", "context", "wrong", "offload", "gpus", "empty", "code")  # of the rows of one run


def print_tables(rows: list[dict]) -> None:
    """One for each run that a file has rows of."""
    runs: dict[tuple, list[dict]] = {}
    for row in rows:
        runs.setdefault(tuple(row.get(name) for name in SAME), []).append(row)
    for run, own in runs.items():
        print("\n" + ", ".join(f"{name} {value}" for name, value in zip(SAME, run, strict=True) if value is not None))
        print_table(own)


def print_table(rows: list[dict]) -> None:
    """Medians over the texts of which there are both rows."""
    ways = [{row["text"]: row for row in rows if row["speculate"] == speculate} for speculate in (True, False)]
    pairs = [(ways[0][text], ways[1][text]) for text in sorted(ways[0].keys() & ways[1].keys())]
    if not pairs:
        print("no text has both rows")
        return
    for name in ("load", "prefill", "preparing", "tokens_a_verify"):
        ours, plain = (median(pair[i][name] for pair in pairs) for i in (0, 1))
        print(f"{name:<18}{ours:8.2f}, autoregression {plain:.2f}")
    print(f"\n{len(pairs)} texts; seconds        speculation  autoregression  its time over speculation's (least)")
    for since in ("from_start", "from_prefill"):
        for i, count in enumerate(pairs[0][0]["tokens"]):
            ours, plain = ([pair[j][since][i] for pair in pairs] for j in (0, 1))
            ratios = [b / a for a, b in zip(ours, plain, strict=True)]
            print(f"{since:<13}{count:>5} tokens {median(ours):>12.2f}  {median(plain):>14.2f}  "
                  f"{median(ratios):>13.3f} ({min(ratios):.3f})")
    # Until the prompt is given, the two do the same. What this takes differs from process to process by more than they
    # differ afterwards, so the shares are of the median process.
    print("\nsaved after the prefill, of all that autoregression takes from the start")
    for i, count in enumerate(pairs[0][0]["tokens"]):
        saved = median(plain["from_prefill"][i] - ours["from_prefill"][i] for ours, plain in pairs)
        whole = median(plain["from_start"][i] for _, plain in pairs)
        print(f"{count:>18} tokens {saved:>12.2f}  {whole:>14.2f}  {saved / whole:>+13.1%}")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", default="tiny", help="a Hugging Face folder, or 'tiny'")
    p.add_argument("--draft", help="a folder")
    p.add_argument("--text", help="a text file (default: CPython's language reference)")
    p.add_argument("--context", type=int, default=16_384)
    p.add_argument("--texts", type=int, default=10)
    p.add_argument("--new", type=int, nargs="+", default=[32, 64, 128, 256], help="new tokens")
    p.add_argument("--wrong", action="store_true", help="a draft alone, which proposes what it finds least likely")
    p.add_argument("--offload", action="store_true")
    p.add_argument("--gpus", type=int, default=1)
    p.add_argument("--empty", action="store_true", help="each process finds an empty cache of compiled steps")
    p.add_argument("--cache", help="where compiled steps are kept (default: a folder that is deleted at the end)")
    p.add_argument("--out", help="append rows to this file of JSON lines")
    p.add_argument("--table", help="print the tables of such a file")
    p.set_defaults(plot=None)
    args = p.parse_args()
    if args.table:
        print_tables(read_rows(args.table))
    else:
        run_or_plot(run, None, args)


if __name__ == "__main__":
    main()
