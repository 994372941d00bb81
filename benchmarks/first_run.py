"""What a user waits for: fresh processes, from a folder on disk to the last token, by the wall clock.

    python benchmarks/first_run.py --checkpoint DIR/target --draft DIR/draft --text book.txt --contexts 16384 122880 \
        --gpus 1 2 --peers --out results.jsonl
    python benchmarks/first_run.py --contexts 4096 --new 32 256                 # the embedded pair on a CPU
    python benchmarks/first_run.py --plot results.jsonl

For each context and number of GPUs these commands run one after the other: `generate.py` with an empty cache of
compiled steps ("first"), again with what that left behind ("later"), and without speculation, as a later process.
`--peers` adds transformers on the same folder. A bar of the plot is a run, and begins when its command was given.
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

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from harness import device_name, pyplot, read_rows, read_text, report, run_or_plot, save, starter  # noqa: E402

PARTS = ("load", "prefill", "compiling", "preparing", "decode")
PATIENCE = 180  # seconds for the processes that compile


def generate(args, context: int, gpus: int, cache: str, *more: str) -> dict:
    """One command: its statistics, and the wall clock from the start of the process to its end."""
    text = ["--prompt-file", args.text] if args.text else []
    draft = ["--draft", args.draft] if args.draft else []
    command = [*starter(gpus), str(ROOT / "generate.py"), "--checkpoint", args.checkpoint, *draft, *text,
               "--prompt-len", str(context), "--ignore-eos", "--json", "--seed", str(args.seed), *args.flags, *more]
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRIFORCE_CACHE": cache},
                          stdin=subprocess.DEVNULL)
    wall = time.perf_counter() - begun
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-600:]}")
    stats = json.loads(done.stdout.splitlines()[-1])["stats"]
    first_round = stats["ttft"] - stats["prefill"]
    return {"load": stats["load"], "prefill": stats["prefill"] - stats["compiling"], "compiling": stats["compiling"],
            "preparing": stats["recording"],
            "decode": max(first_round + stats["decode"] - stats["recording"], 0.0), "ttft": stats["ttft"],
            "to_last_token": stats["load"] + stats["ttft"] + stats["decode"], "tbt_ms": 1e3 * stats["tbt"],
            "process": wall, "block_efficiency": stats["block_efficiency"], "peak_gib": stats["peak_memory"] / 2**30}


def wait_for_compiling(cache: str) -> float:
    """Until every folder of the cache is complete. Returns seconds."""
    begun = time.perf_counter()
    while time.perf_counter() - begun < PATIENCE:
        folders = [path.parent for path in Path(cache).glob("*/about.json")]
        if folders and all((folder / "complete").exists() for folder in folders):
            return time.perf_counter() - begun
        time.sleep(0.25)
    raise SystemExit(f"nothing was compiled within {PATIENCE} s; see {cache}")


PEER = """
import json, sys, time
begun = time.time() - float(sys.argv[5])
import torch
from transformers import AutoModelForCausalLM
from triforce.hf.tokenizer import Tokenizer
folder, text, context, new = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto" if device == "cuda" else torch.float32,
                                             attn_implementation="sdpa").to(device)
ids = torch.tensor([Tokenizer(folder).encode(open(text, encoding="utf-8").read())[:context]], device=device)
def now():
    torch.cuda.synchronize() if device == "cuda" else None
    return time.time() - float(sys.argv[5])
loaded = now()
with torch.inference_mode():
    out = model(ids, use_cache=True, logits_to_keep=1)
    cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
    token.tolist()
    first = now()
    for _ in range(new - 1):
        out = model(token, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        token.tolist()
last = now()
print(json.dumps({"load": loaded, "prefill": first - loaded, "preparing": 0.0, "decode": last - first,
                  "ttft": first - loaded, "to_last_token": last, "tbt_ms": 1e3 * (last - first) / (new - 1)}))
"""


def peer(args, context: int, new: int, folder: str) -> dict:
    """transformers, greedy, nothing compiled: `sdpa` attention, a growing cache."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as text:
        text.write(read_text(args.text))
        text.flush()
        done = subprocess.run([sys.executable, "-c", PEER, folder, text.name, str(context), str(new), str(time.time())],
                              capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if done.returncode:
        raise SystemExit(f"transformers failed: {done.stderr[-600:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run(args) -> None:
    where = device_name()
    machine = {"device": where, "torch": torch.__version__, "date": str(date.today()), "checkpoint": args.checkpoint,
               "widened": args.widened, "flags": " ".join(args.flags)}
    for gpus in args.gpus:
        for context in args.contexts:
            for new in args.new:
                with tempfile.TemporaryDirectory() as cache:
                    rows = rows_of(args, context, gpus, new, cache)
                    for way, row in rows:
                        title = f"{way}, {context:,} tokens, {new} new, {gpus} GPU" if where != "CPU" else way
                        report(title, {"way": way, "context": context, "new": new, "gpus": gpus, **row}, machine,
                               args.out)


def rows_of(args, context: int, gpus: int, new: int, cache: str):
    def ours(*more: str) -> dict:
        return generate(args, context, gpus, cache, "--max-new-tokens", str(new), *more)

    yield "first", ours()
    compiles = torch.cuda.is_available()
    waited = wait_for_compiling(cache) if compiles else 0.0
    yield "later", {**ours(), "compiled_after_s": waited}
    yield "no speculation", ours("--no-speculation")
    if args.peers and gpus == 1:
        yield "transformers", peer(args, context, new, args.checkpoint)


def plot(path: str) -> None:
    rows, plt = read_rows(path), pyplot()
    figure, axes = plt.subplots(figsize=(11, 0.32 * len(rows) + 1.6))
    labels = [f"{row['checkpoint']}: {row['way']}, {row['context']:,} + {row['new']}"
              + (f", {row['gpus']} GPUs" if row["gpus"] > 1 else "") + (f", {row['flags']}" if row["flags"] else "")
              for row in rows]
    left = [0.0] * len(rows)
    for part in PARTS:
        widths = [row.get(part, 0.0) for row in rows]  # of earlier rows no process waited for the compiler
        if not any(widths):
            continue
        axes.barh(range(len(rows)), widths, 0.7, left=left, label={"preparing": "preparing steps"}.get(part, part))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the command was given")
    axes.legend(fontsize=8)
    save(figure, path, rows)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", default="tiny", help="a Hugging Face folder, or 'tiny'")
    p.add_argument("--draft", help="a folder")
    p.add_argument("--text", help="a text file (default: CPython's language reference)")
    p.add_argument("--contexts", type=int, nargs="+", default=[16_384])
    p.add_argument("--new", type=int, nargs="+", default=[256], help="new tokens")
    p.add_argument("--gpus", type=int, nargs="+", default=[1])
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="the rest: flags for generate.py")
    p.add_argument("--peers", action="store_true", help="transformers, too")
    p.add_argument("--widened", action="store_true", help="the checkpoint is the embedded pair, widened; see widen.py")
    p.add_argument("--out", help="append rows to this file of JSON lines")
    p.add_argument("--plot", help="draw a plot of such a file, beside it")
    args = p.parse_args()
    run_or_plot(run, plot, args)


if __name__ == "__main__":
    main()
