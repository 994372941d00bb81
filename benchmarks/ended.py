"""What a round of a batch takes when some of its rows have ended, beside a batch of those that go on alone.

    python benchmarks/ended.py --shape llama-3.1-8b --contexts 32768 --batches 8 --going 8 4 1 --text book.txt
    python benchmarks/ended.py --contexts 16384 --batches 8 --going 8 4 1 --shared --device cpu --text book.txt

Rows continue different stretches of the text, which become shorter by `--ragged` tokens from row to row; with
`--shared` they are questions about one stretch. Rows end from the last one on, or, with `--scattered`, every other one
first. Each figure is the median of `--rounds` rounds: by autoregression, and with `--gammas` tokens drafted by the
draft model. On a GPU the engine waits for compiled steps, with `--as-written` it does without. Shapes are widened as in
on_chip.py.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from triforce.engine import Engine
from triforce.plan import AUTOREGRESSION, ONE_ROW, Plan
from triforce.state import State

sys.path.insert(0, str(Path(__file__).parent))
import on_chip  # noqa: E402
from batch import engine_of  # noqa: E402
from harness import cap_memory, read_rows, read_text, report, run_or_plot  # noqa: E402

SETTLING = 4  # rounds after rows have ended that are not timed: steps of fewer rows may be recorded in them


def prompts_of(ids: list[int], context: int, batch: int, args) -> list[list[int]]:
    """Stretches of the text, or 30 to 33 tokens after the shared one."""
    if args.shared:
        return [ids[:context] + ids[context + 40 * i : context + 40 * i + 30 + i % 4] for i in range(batch)]
    step = (len(ids) - context) // max(batch - 1, 1)
    if batch > 1 and step < 1 or context <= batch * args.ragged:
        raise SystemExit(f"the text has {len(ids):,} tokens, too few for {batch} stretches of {context:,}, each "
                         f"{args.ragged:,} shorter than the one before")
    return [ids[i * step : i * step + context - i * args.ragged] for i in range(batch)]


def order_of_ends(batch: int, scattered: bool) -> list[int]:
    """Rows, as they end."""
    rows = list(range(batch))[::-1]
    return rows[::2] + rows[1::2] if scattered else rows


def time_rounds(state: State, plan: Plan, ended: list[int], limit: int, args) -> dict[str, float]:
    """Milliseconds of a round, of what drafts in it and of its verify."""
    state.rewind(limit, plan, state.pilot.padding)
    for _ in range(args.warm_up):
        state.round()
    for row in ended:
        state.close_row(row)
    rounds = []
    for _ in range(SETTLING + args.rounds):
        begun = time.perf_counter()
        state.round()  # waits for the device
        rounds.append((time.perf_counter() - begun, state.last_round.timing))
    timed = [(1e3 * seconds, timing) for seconds, timing in rounds[SETTLING:] if timing is not None]
    if not timed:
        raise SystemExit(f"no round of {args.rounds} was without a recording; raise --rounds or --warm-up")
    return {"round_ms": median(ms for ms, _ in timed), "drafting_ms": median(timing.drafting for _, timing in timed),
            "verify_ms": median(timing.checking for _, timing in timed), "rounds": len(timed)}


def measure(engine: Engine, ids: list[int], context: int, batch: int, args):
    """Rows of one size: of a batch of which so many go on, and of a batch of so many."""
    prompts = prompts_of(ids, context, batch, args)
    limit = (args.warm_up + SETTLING + args.rounds + 1) * engine.settings.block_size  # more than they can emit
    book = engine.prefill(prompts[0][:context]) if args.shared else None
    law = {"temperature": args.temperature, "top_p": args.top_p, "top_k": None, "min_p": None}
    for count in sorted({batch, *(going for going in args.going if going <= batch)}, reverse=True):
        more = {"prefix": book} if book is not None else {}
        state = engine.prepare(prompts[:count], limit, seed=list(range(count)), **law, **more)
        plain = AUTOREGRESSION if state.pilot.padding.plain else ONE_ROW
        plans = {"autoregression": plain} | {f"gamma {gamma}": Plan(gamma, "model", padded=state.pilot.padding.drafts)
                                               for gamma in args.gammas}
        for name, plan in plans.items():
            for going in (n for n in args.going if n <= batch) if count == batch else [count]:
                ended = order_of_ends(batch, args.scattered)[: batch - going] if count == batch else []
                figures = time_rounds(state, plan, ended, limit, args)
                yield {"context": context, "batch": count, "going": going, "plan": name, **figures,
                       "computed_for": state.hierarchy.outer.num_computed or count,
                       "attending": state.hierarchy.outer.num_attending}


def run(args) -> None:
    cap_memory(args.memory_cap)
    base, tokenizer = on_chip.load(args)
    if args.as_written:
        base.placement = replace(base.placement, compile="beside")
    engine = engine_of(base, "draft")
    ids = tokenizer.encode(read_text(args.text))
    common = {**on_chip.about(engine, args), "shared": args.shared, "ragged": args.ragged,
              "scattered": args.scattered, "as_written": args.as_written}
    del common["seeds"]  # each row has one
    for context in args.contexts:
        for batch in args.batches:
            for row in measure(engine, ids, context, batch, args):
                title = f"{row['plan']}, {row['batch']} rows of {context:,} tokens, {row['going']} of them go on"
                report(title, row, common, args.out)
            engine.release()


def table(path: str) -> None:
    """Milliseconds of a round, and of its verify, by the number of rows that go on."""
    for row in read_rows(path):
        kind = "shared" if row["shared"] else f"shorter by {row['ragged']} each"
        model = row["shape"] or row["checkpoint"]
        print(f"{model}, {row['context']:,} tokens {kind}, {row['plan']}, {row['going']} of {row['batch']} rows: "
              f"{row['round_ms']:.2f} ms a round, {row['verify_ms']:.2f} its verify")


def main() -> None:
    p = on_chip.parser()
    p.description = __doc__
    p.add_argument("--batches", type=int, nargs="+", default=[8])
    p.add_argument("--going", type=int, nargs="+", default=[8, 4, 1], help="rows that go on")
    p.add_argument("--gammas", type=int, nargs="*", default=[3])
    p.add_argument("--shared", action="store_true", help="rows are questions about one stretch")
    p.add_argument("--ragged", type=int, default=0, help="tokens by which each stretch is shorter than the one before")
    p.add_argument("--scattered", action="store_true", help="every other row ends first")
    p.add_argument("--as-written", action="store_true", help="steps that are not compiled")
    p.add_argument("--rounds", type=int, default=14, help="timed in each setting")
    p.set_defaults(block_size=4, warm_up=24)
    run_or_plot(run, table, p.parse_args())


if __name__ == "__main__":
    main()
