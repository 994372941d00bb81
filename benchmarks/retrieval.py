"""Which selection drafts best: acceptance of the retrieval level against the full cache, setting by setting.

    python benchmarks/retrieval.py --text book.txt --context 122880 --budget 4096 --out results.jsonl

Uses the embedded pair: acceptance is a matter of the model and the text, not of the size of its body. The level drafts
alone, one token a verify, so that the rate is kept / checked tokens, over several seeds. Times are those of a rebuild
for this small model: compare them with each other only.
"""

import argparse
import json
import math
import platform
import sys
from datetime import date
from pathlib import Path

import torch

import triforce
from triforce.calibration import milliseconds

sys.path.insert(0, str(Path(__file__).parent))
from harness import read_text  # noqa: E402

VARIANTS = [
    {}, {"rebuild_interval": 8}, {"rebuild_interval": 32}, {"rebuild_interval": 256}, {"chunk_size": 4},
    {"chunk_size": 16}, {"chunk_size": 32}, {"recent": 0.0625}, {"recent": 0.125}, {"recent": 0.5}, {"recent": 0.95},
]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--text", help="a file to continue; default: CPython's language reference")
    p.add_argument("--context", type=int, default=16384)
    p.add_argument("--budget", type=int)
    p.add_argument("--seeds", type=int, default=8)
    p.add_argument("--max-new-tokens", type=int, default=256)
    p.add_argument("--compile", action=argparse.BooleanOptionalAction)
    p.add_argument("--out", help="append JSON lines to this file")
    args = p.parse_args()
    text = read_text(args.text)
    print(f"{'setting':<28}{'acceptance':>12}{'+-':>8}{'rebuild ms':>12}")
    for variant in VARIANTS:
        engine = triforce.load("tiny", draft=False, gamma=1, block_size=8, budget=args.budget, compile=args.compile,
                               **variant)
        ids = engine.tokenizer.encode(text)[: args.context]
        accepted = tested = 0
        for seed in range(args.seeds):
            engine.generate(ids, args.max_new_tokens, seed=seed, ignore_eos=True)
            kept, drafted = engine._state.outer.totals[0].tolist()
            accepted, tested = accepted + kept, tested + drafted
        rate = accepted / tested
        with torch.inference_mode():
            rebuild = milliseconds(lambda e=engine: e._state.retrieval.rebuild(0), engine.device, repeats=9, warm_up=3)
        row = {"date": str(date.today()), "torch": torch.__version__, "context": len(ids),
               "budget": engine._state.budget,
               "device": torch.cuda.get_device_name() if engine.device.type == "cuda" else platform.machine(),
               "setting": variant, "acceptance": rate, "error": math.sqrt(rate * (1 - rate) / tested),
               "rebuild_ms": rebuild}
        name = ", ".join(f"{key} {value}" for key, value in variant.items()) or "default"
        print(f"{name:<28}{rate:>12.4f}{row['error']:>8.4f}{rebuild:>12.2f}", flush=True)
        if args.out:
            with open(args.out, "a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
