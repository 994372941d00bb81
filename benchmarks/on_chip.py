"""What one round costs, step by step, and end to end, with the whole cache on one device.

    python benchmarks/on_chip.py --shape llama-2-7b --contexts 124928 --budgets 4096 --text book.txt
    python benchmarks/on_chip.py --checkpoint tiny --contexts 16384 32768            # on a CPU too

`--shape` fills a named shape by widening the embedded pair (see widen.py): the cost is the shape's, the text and the
acceptance are those of the small trained model. Prints a table; each row is also a line of JSON in --out.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import torch

import triforce
from triforce.cli import default_document
from triforce.engine import Engine
from triforce.state import Settings, State

sys.path.insert(0, str(Path(__file__).parent))
from widen import SHAPES, widen  # noqa: E402


class Timer:
    """Median milliseconds of a call, by CUDA events on a GPU."""

    def __init__(self, device: torch.device, repeats: int):
        self.cuda, self.repeats = device.type == "cuda", repeats

    def __call__(self, call) -> float:
        call()
        return statistics.median(self.once(call) for _ in range(self.repeats))

    def once(self, call) -> float:
        if not self.cuda:
            begun = time.perf_counter()
            call()
            return (time.perf_counter() - begun) * 1e3
        torch.cuda.synchronize()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)


@torch.inference_mode()
def step_times(state: State, timer: Timer) -> dict[str, float]:
    """Each level's step on its own, from where the state stands; leaves the lengths as they were."""
    outer, inner, draft = state.outer, state.inner, state.drafter
    length = outer.length.clone()

    def at_start(level, call):
        def run():
            for speculator in (outer, inner):
                speculator.length.copy_(length)
            inner.base.copy_(length)
            torch.add(length, inner.gamma, out=inner.limit)
            draft.length.copy_(length)
            draft.base.copy_(length)
            draft.head.copy_(length)
            outer.speculate = inner.speculate = False
            call()
            outer.speculate = inner.speculate = True
        return timer(run)

    times = {
        "one_row": at_start(outer, state.one_row.round),
        "verify": at_start(outer, outer.round),
        "retrieval": at_start(inner, inner.round),
        "draft": at_start(draft, lambda: draft.step(1)),
        "rebuild": timer(lambda: state.retrieval.rebuild(0)),
    }
    outer.length.copy_(length)
    return times


def end_to_end(engine: Engine, ids: list[int], args) -> dict[str, float]:
    """Decoding with speculation and by the fastest autoregression, on the same prefill."""
    options = {"temperature": args.temperature, "top_p": args.top_p, "seed": args.seed, "ignore_eos": True}
    engine.generate(ids, args.warm_up, **options)  # compiles, and records the graphs
    fast = engine.generate(ids, args.max_new_tokens, **options).stats
    engine.generate(ids, 8, speculate=False, one_row=True, **options)
    plain = engine.generate(ids, args.plain_tokens, speculate=False, one_row=True, **options).stats
    return {"tbt_ms": fast.tbt * 1e3, "one_row_tbt_ms": plain.tbt * 1e3, "speedup": plain.tbt / fast.tbt,
            "acceptance_retrieval": fast.acceptance_rate.get("retrieval", 0.0),
            "acceptance_full": fast.acceptance_rate.get("full", 0.0), "block_efficiency": fast.block_efficiency,
            "rebuilds": fast.retrieval_rebuilds, "peak_memory_gib": fast.peak_memory / 2**30}


def load(args) -> tuple[Engine, object]:
    if args.shape is None:
        engine = triforce.load(args.checkpoint, device=args.device, gamma=args.gamma, gamma_inner=args.gamma_inner)
        return engine, engine.tokenizer
    tiny = triforce.load("tiny", device="cpu", compile=True)  # compile=True: weights stay unpacked
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    target = widen(tiny.target, SHAPES[args.shape], device=device, dtype=dtype)
    draft = widen(tiny.draft, SHAPES["llama-68m"], vocab_size=target.config.vocab_size, device=device, dtype=dtype)
    settings = Settings(gamma=args.gamma, gamma_inner=args.gamma_inner, prefill_chunk_size=8192)
    return Engine(target, None, draft, settings=settings), tiny.tokenizer


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", default="tiny")
    p.add_argument("--shape", choices=sorted(SHAPES))
    p.add_argument("--device")
    p.add_argument("--contexts", type=int, nargs="+", default=[16384])
    p.add_argument("--budgets", type=int, nargs="+", help="default: 1/32 of the context")
    p.add_argument("--text", help="a file to continue; default: CPython's language reference")
    p.add_argument("--gamma", type=int, default=6)
    p.add_argument("--gamma-inner", type=int, default=2)
    p.add_argument("--temperature", type=float, default=0.6)
    p.add_argument("--top-p", type=float, default=0.9)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--max-new-tokens", type=int, default=256)
    p.add_argument("--plain-tokens", type=int, default=64, help="tokens of the autoregressive run")
    p.add_argument("--warm-up", type=int, default=300, help="tokens generated before anything is timed")
    p.add_argument("--repeats", type=int, default=11)
    p.add_argument("--out", help="append JSON lines to this file")
    args = p.parse_args()

    engine, tokenizer = load(args)
    text = Path(args.text).read_text(encoding="utf-8", errors="replace") if args.text else default_document()
    ids = tokenizer.encode(text)
    device = engine.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    machine = {"date": str(date.today()), "device": name, "torch": torch.__version__, "shape": args.shape,
               "checkpoint": None if args.shape else args.checkpoint, "widened": args.shape is not None,
               "dtype": str(engine.target.dtype).removeprefix("torch."), "gamma": args.gamma,
               "gamma_inner": args.gamma_inner, "temperature": args.temperature, "top_p": args.top_p}
    timer, rows = Timer(device, args.repeats), []
    for context in args.contexts:
        if context > len(ids):
            raise SystemExit(f"the text has {len(ids):,} tokens, fewer than --contexts {context:,}; give a longer one")
        for budget in args.budgets or [None]:
            engine.budget = budget
            begun = time.perf_counter()
            state = engine.prepare([ids[:context]], 2048, temperature=args.temperature, top_p=args.top_p, top_k=None,
                                   min_p=None, seed=[args.seed])
            if device.type == "cuda":
                torch.cuda.synchronize()
            row = {"context": context, "budget": state.budget, "prefill_s": time.perf_counter() - begun}
            begun = time.perf_counter()
            state.round()
            row["first_round_s"] = time.perf_counter() - begun
            row |= end_to_end(engine, ids[:context], args)
            row |= {f"{step}_ms": value for step, value in step_times(state, timer).items()}
            round_ms = row["tbt_ms"] * row["block_efficiency"]
            draft_steps = args.gamma_inner * state.inner.rounds
            steps = row["verify_ms"] + state.inner.rounds * row["retrieval_ms"] + draft_steps * row["draft_ms"]
            row["round_over_steps"] = round_ms / steps
            rows.append(row)
            model = f"{args.shape} (widened)" if args.shape else args.checkpoint
            print(f"--- {model}, {context:,} tokens, budget {state.budget:,}, {name}, torch {torch.__version__}")
            for key, value in row.items():
                print(f"{key:<24}{value:>14.3f}" if isinstance(value, float) else f"{key:<24}{value:>14,}")
            if args.out:
                Path(args.out).parent.mkdir(parents=True, exist_ok=True)
                with open(args.out, "a") as file:
                    file.write(json.dumps({**machine, **row}) + "\n")
    print(json.dumps({**machine, "rows": rows}))


if __name__ == "__main__":
    main()
