"""A target whose weights are in fp8, beside the same with wider weights: what steps, prefills and memory take.

    python benchmarks/float8.py --checkpoint DIR --text book.txt --contexts 4096 32768 122880 --out rows.jsonl

DIR is a checkpoint with wide weights, made by benchmarks/widen.py say. For each kind of weights and context: the
prefill, autoregression (one row a step), a verify (all rows of a block), and the peak of the device's memory. Then how
alike the two models are: over the last tokens of the shortest context, the chance that rejection sampling would keep a
token which the one drew for the other (1 - TV of their laws at temperature 1).
"""

import argparse
import statistics
import sys
from datetime import date
from pathlib import Path

import torch

import triforce
from triforce.engine.output import Stats

sys.path.insert(0, str(Path(__file__).parent))
from harness import cap_memory, read_prompts, report, run_or_plot  # noqa: E402

KINDS = {"wide": None, "fp8": "fp8"}
LAST = 256  # positions whose laws are compared


def run(args) -> None:
    args.quote, laws = 0, {}
    cap_memory(args.memory_cap)
    for kind in args.kinds:
        weights = KINDS[kind]
        engine = triforce.load(args.checkpoint, draft=False, gamma=args.block_size - 1, block_size=args.block_size,
                               device=args.device, dtype=args.dtype, weights=weights, compile=args.compile,
                               offload=args.offload, max_seq_len=max(args.contexts) + 512)
        on_gpu = engine.device.type == "cuda"
        machine = {"date": str(date.today()), "torch": torch.__version__, "checkpoint": args.checkpoint,
                   "device": torch.cuda.get_device_name() if on_gpu else "cpu", "weights": engine.target.dtype_name,
                   "weight_bytes": engine.target.weight_bytes, "block_size": args.block_size}
        for context, ids in zip(sorted(args.contexts), sorted(read_prompts(engine.tokenizer, args), key=len),
                                strict=True):
            row = {"context": context, **measure(engine, ids, args.max_new_tokens)}
            report(f"{machine['weights']}, {context:,} tokens", row, machine, args.out)
            if kind not in laws:
                laws[kind] = law(engine, ids[-4096:])
        del engine
        if on_gpu:
            torch.cuda.empty_cache()
    if len(laws) == 2:
        kept = torch.minimum(*laws.values()).sum(-1)
        report("laws", {"positions": len(kept), "kept_mean": float(kept.mean()), "kept_least": float(kept.min())},
               {"date": str(date.today()), "checkpoint": args.checkpoint}, args.out)


def measure(engine, ids: list[int], count: int) -> dict:
    """Of a prefill, and of warm steps."""
    def generate(**how) -> Stats:
        return engine.generate(ids, count, temperature=0.0, speculate=False, ignore_eos=True, **how).stats

    first = generate()
    return {"prefill_s": first.prefill, "verify_ms": 1e3 * statistics.median(generate().tbt for _ in range(2)),
            "autoregression_ms": 1e3 * min(generate(one_row=True).tbt for _ in range(2)),
            "peak_gib": first.peak_memory / 2**30,
            "resident_layers": engine.buffers.state.cache.prefix.num_resident}


def law(engine, ids: list[int]) -> torch.Tensor:
    """[LAST, V] of the model's own, over a text."""
    return engine.logits([ids], last=LAST)[0].float().softmax(-1).cpu()


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--checkpoint", default="tiny")
    flags.add_argument("--text", help="a file; default: CPython's language reference")
    flags.add_argument("--contexts", type=int, nargs="+", default=[4096])
    flags.add_argument("--max-new-tokens", type=int, default=32)
    flags.add_argument("--block-size", type=int, default=16)
    flags.add_argument("--device")
    flags.add_argument("--dtype")
    flags.add_argument("--offload", nargs="?", const=True, default=False)
    flags.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    flags.add_argument("--memory-cap", type=float, metavar="GIB", help="pretend that the GPU has no more")
    flags.add_argument("--compile", action=argparse.BooleanOptionalAction, help="wait for compiled steps, or have none")
    flags.add_argument("--out", help="append rows to this file")
    flags.set_defaults(plot=None)
    run_or_plot(run, None, flags.parse_args())
