"""The papers' own set-ups, with the published checkpoints: what fits here, what has to be downloaded, and the times.

    python benchmarks/published.py                                  # what fits, and the commands; runs nothing
    python benchmarks/published.py --text book.txt --out rows.jsonl # runs the set-ups that are here and fit
    python benchmarks/published.py --text book.txt --only on-chip-7b
    python benchmarks/published.py --text book.txt --stand-in tiny --prompt-len 2000 --only self-8b   # to try it

Each set-up is a fresh process of `generate.py`: with speculation, and without it. The speed-up that a paper's abstract
names stands beside ours. Their texts are samples of PG-19; any book that is long enough has the same times, and other
rates of acceptance.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from triforce import cli
from triforce.cli import plan
from triforce.errors import UserError
from triforce.hf.folders import resolve
from triforce.hf.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Setup:
    """One line of a paper."""

    name: str
    target: str
    draft: str | None
    prompt_len: int
    flags: str
    claim: str  # of the paper's abstract
    rows: int = 1  # prompts side by side
    gpus: int = 1

    def command(self, args, *more: str) -> list[str]:
        """Flags of `generate.py`, without a text."""
        target, draft = args.stand_in or self.target, None if args.stand_in else self.draft
        length = args.prompt_len or self.prompt_len
        words = ["--checkpoint", target, *(["--draft", draft] if draft else []), "--prompt-len", str(length)]
        return [*words, *shlex.split(self.flags), *more]


YARN, DRAFT = "NousResearch/Yarn-Llama-2-7b-128k", "JackFram/llama-68m"
TRIFORCE = "--temperature 0.6 --top-p 0.9 --chunk-size 8"
SETUPS = [
    Setup("on-chip-7b", YARN, DRAFT, 124928, f"{TRIFORCE} --budget 4096 --gamma 6", "up to 2.31x, one A100"),
    Setup("on-chip-7b-auto", YARN, DRAFT, 124928, f"{TRIFORCE} --budget 4096", "up to 2.31x, one A100"),
    Setup("offload-7b", YARN, DRAFT, 122880, f"{TRIFORCE} --budget 8192 --gamma 12 --offload",
          "0.108 s a token and 7.78x, two RTX 4090"),
    Setup("offload-7b-2", YARN, DRAFT, 122880, f"{TRIFORCE} --budget 8192 --gamma 12 --offload",
          "0.108 s a token and 7.78x, two RTX 4090", gpus=2),
    Setup("offload-7b-chat", "LargeWorldModel/LWM-Text-Chat-128K", DRAFT, 122880,
          f"{TRIFORCE} --budget 12288 --gamma 16 --offload", "0.108 s a token and 7.78x, two RTX 4090"),
    Setup("self-8b", "meta-llama/Meta-Llama-3.1-8B", None, 16000,
          "--draft none --draft-cache streaming --budget 264 --gamma 3", "up to 2.51x, batches of 32 to 256", rows=8),
    Setup("draft-7b-32k", "togethercomputer/LLaMA-2-7B-32K", "TinyLlama/TinyLlama_v1.1", 16000,
          "--no-retrieval --gamma 3", "up to 2x, batches of 32 to 256, eight A100", rows=8),
]


def obstacle(setup: Setup, args) -> str | None:
    """Why a set-up cannot run here, and what to do; None: it can."""
    if args.stand_in is None:
        for name in filter(None, (setup.target, setup.draft)):
            try:
                resolve(name)
            except UserError:
                return f"not here: triforce download --repo-id {name}"
    count = torch.cuda.device_count()
    if setup.gpus > max(count, 1):
        return f"needs {setup.gpus} GPUs, and {count} are here"
    job = plan.job_of(cli.parse(setup.command(args, "--batch-size", str(setup.rows))), setup.rows)
    own = plan.parser().parse_args([] if count == 0 else ["--gpus", str(setup.gpus)])
    machine = plan.machine_of(own, None)
    need = plan.need(job, machine)
    if not need.fits(machine):
        return f"does not fit: {need.bytes / 2**30:.1f} GiB of {(machine.memory or 0) / 2**30:.1f}"
    return None


def run(setup: Setup, args, folder: Path) -> dict:
    """Both processes of a set-up, as a row."""
    text = Path(args.text).read_text(encoding="utf-8", errors="replace")
    length = args.prompt_len or setup.prompt_len
    ids = Tokenizer(resolve(args.stand_in or setup.target)).encode(text)
    if len(ids) < length + (setup.rows - 1) * 64:
        raise SystemExit(f"--text has {len(ids):,} tokens, and {setup.name} needs {length + (setup.rows - 1) * 64:,}; "
                         "give a longer one")
    row = {"setup": setup.name, "checkpoint": args.stand_in or setup.target, "prompt_len": length, "rows": setup.rows,
           "gpus": setup.gpus, "claim": setup.claim, "date": str(date.today()), "torch": torch.__version__,
           "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
           "command": shlex.join(setup.command(args))}
    if setup.rows == 1:
        given = ["--prompt-file", args.text]
    else:  # the same book, begun a little later for each
        prompts, tokenizer = folder / "prompts.jsonl", Tokenizer(resolve(args.stand_in or setup.target))
        prompts.write_text("".join(json.dumps(tokenizer.decode(ids[64 * i : 64 * i + length])) + "\n"
                                   for i in range(setup.rows)))
        given = ["--prompts", str(prompts), "--batch-size", str(setup.rows)]
    for name, more in (("on", []), ("off", ["--no-speculation"])):
        stats = _generate(setup, setup.command(args, *given, *more, "--max-new-tokens", str(args.new), "--ignore-eos",
                                               "--seed", "0", *([] if setup.rows > 1 else ["--json"])))
        row |= {f"{name}_ms": 1e3 * stats["tbt"] / setup.rows, f"{name}_prefill": stats["prefill"]}
        if name == "on":
            row |= {"acceptance": stats["acceptance_rate"], "tokens_a_verify": stats["block_efficiency"]}
    return row | {"speedup": row["off_ms"] / row["on_ms"]}


def _generate(setup: Setup, flags: list[str]) -> dict:
    """A process of generate.py: the statistics of its (last) answer."""
    start = [sys.executable]
    if setup.gpus > 1:
        start += ["-m", "torch.distributed.run", "--nproc-per-node", str(setup.gpus)]
    done = subprocess.run([*start, str(ROOT / "generate.py"), *flags], capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if done.returncode:
        raise SystemExit(f"{setup.name} ended with {done.returncode}: {done.stderr[-600:]}")
    return json.loads(done.stdout.splitlines()[-1])["stats"]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--text", help="a text file, long enough for the longest prompt; without it nothing runs")
    p.add_argument("--only", nargs="+", choices=[setup.name for setup in SETUPS], help="these set-ups")
    p.add_argument("--new", type=int, default=256, help="new tokens (default 256)")
    p.add_argument("--stand-in", metavar="CHECKPOINT", help="in place of the published ones, to try the script")
    p.add_argument("--prompt-len", type=int, help="in place of the papers', to try the script")
    p.add_argument("--out", help="append rows to this file of JSON lines")
    args = p.parse_args()
    chosen = [setup for setup in SETUPS if not args.only or setup.name in args.only]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for setup in chosen:
            try:
                why = obstacle(setup, args)
            except UserError as error:
                why = str(error)
            if why is None and args.text:
                print(f"{setup.name} ...", file=sys.stderr, flush=True)
                row = run(setup, args, Path(folder))
                rows.append(row)
                if args.out:
                    with open(args.out, "a") as file:
                        file.write(json.dumps(row) + "\n")
            else:
                start = f"torchrun --nproc-per-node {setup.gpus}" if setup.gpus > 1 else "python"
                text = ["--prompt-file", "book.txt"] if setup.rows == 1 else ["--prompts", "prompts.jsonl"]
                command = f"{start} generate.py {shlex.join(setup.command(args, *text))}"
                print(f"{setup.name} ({setup.claim}): {why or 'can run here; give --text'}\n\n    {command}\n")
    if rows:
        cells = [[row["setup"], f"{row['prompt_len']:,}", f"{row['off_ms']:.2f}", f"{row['on_ms']:.2f}",
                  f"{row['speedup']:.2f}x", f"{row['acceptance'].get('full', 0):.2f}"] for row in rows]
        print(plan.table(["set-up", "prompt", "off", "on", "speed-up", "acceptance"], cells) + "\n")
        print(textwrap.fill(f"ms a token of all rows, on {rows[0]['device']}. The abstracts: " + "; ".join(
            f"{row['setup']} {row['claim']}" for row in rows) + ".", 80))


if __name__ == "__main__":
    main()
