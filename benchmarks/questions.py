"""Many questions about one document: side by side over one prefix, and in the other ways that there are.

    python benchmarks/questions.py --shape llama-2-7b --context 122880 --text book.txt --dtype float16 --out rows.jsonl
    python benchmarks/questions.py --checkpoint DIR/target --draft DIR/draft --text book.txt --parts questions
    python benchmarks/questions.py --context 16384                               # the embedded pair on a CPU
    torchrun --nproc-per-node 2 benchmarks/questions.py --shape llama-3.1-8b --context 122880 --text book.txt
    python benchmarks/questions.py --plot rows.jsonl

The document is prefilled once (`prefill`). Then: all questions side by side, once and --again, as graphs are recorded
in the first call ("questions", and "questions again", in another order, so that no row holds its question yet);
autoregression over the same shared prefix ("autoregression"); the questions one after the other, by speculation and by
autoregression ("one by one", "one by one, autoregression": a few of them); samples of one question; a conversation; the
document in a file.
`--peers` adds transformers on the same weights.
"""

import argparse
import os
import tempfile
import time
from statistics import median

import on_chip
import torch
from harness import cap_memory, pyplot, read_rows, read_text, report, run_or_plot, save

import triforce
from triforce.config import Placement, Settings
from triforce.engine.engine import Engine
from triforce.fp8 import fp8_copy
from triforce.parallel import from_environment

PARTS = ("questions", "autoregression", "samples", "single", "chat", "file")
DOTS = {"questions again": "o", "autoregression": "^", "32 samples again": "s", "32 samples, autoregression": "v",
        "one by one": "D", "one by one, autoregression": "<", "transformers": "X"}  # of a plot
QUESTIONS = [
    "Who tells this story, and why does he say that he went to sea in the first place? Answer briefly.",
    "What is the name of the ship, who is its captain, and what does he want more than anything else?",
    "Describe the harpooneer whom the narrator meets at the inn, and how the two become friends.",
    "Which whale is hunted in this book, what is its colour, and what did it once do to the captain?",
    "What does the preacher say in his sermon, and how does it bear on what happens afterwards?",
    "Name three places on land that are described, and say in a sentence what happens in each of them.",
    "How do the owners of the ship differ from each other, and how do they hire the two friends?",
    "What signs of a bad end are there before the ship leaves the harbour, and who speaks of them?",
]


def engine_of(args, group) -> tuple[Engine, object]:
    """The pair, with whatever the flags say. Blocks are as wide as the number of rows suggests."""
    args.contexts, args.block_size = [args.context], None
    if args.shape is None:
        given = {"draft": args.draft, "dtype": args.dtype, "budget": args.budget, "draft_dtype": args.draft_dtype}
        engine = triforce.load(args.checkpoint, device=args.device, group=group, chunk_size=args.chunk_size,
                               offload=args.offload, compile=args.compile,
                               **{name: value for name, value in given.items() if value is not None})
        return engine, engine.tokenizer
    base, tokenizer = on_chip.load(args, group)
    place = Placement(offload=args.offload, compile=args.compile)
    return Engine(base.target, base.tokenizer, base.draft, settings=Settings(chunk_size=args.chunk_size,
                                                                           budget=args.budget), placement=place,
                  drafting=fp8_copy(base.target) if args.draft_dtype else None), tokenizer


def timed(engine: Engine, call):
    """What a call returns, and the wall clock's seconds."""
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    result = call()
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - begun


def answered(results, seconds: float) -> dict:
    """A row's figures. Of a batch, all rows share the time of decoding."""
    stats = [result.stats for result in results]
    later = sum(one.new_tokens - 1 for one in stats)
    decode = max(one.decode for one in stats)
    return {"seconds": seconds, "prefill": stats[0].prefill, "ttft": stats[0].ttft, "decode": decode,
            "compiling": stats[0].compiling, "preparing": stats[0].recording, "ms_a_token": 1e3 * decode / later,
            "block_efficiency": sum(one.block_efficiency for one in stats) / len(stats),
            "tokens": sum(one.new_tokens for one in stats), "shared": stats[0].shared_tokens,
            "peak_gib": stats[0].peak_memory / 2**30}


def rows_of(engine: Engine, tokenizer, ids: list[int], args):
    """(what, figures) of all that is measured."""
    law = {"temperature": args.temperature, "top_p": args.top_p, "ignore_eos": True}
    new = args.max_new_tokens
    asked = [tokenizer.encode(f"\n\n{QUESTIONS[i % len(QUESTIONS)]}\n", bos=False) for i in range(args.questions)]
    book, seconds = timed(engine, lambda: engine.prefill(ids))
    yield "prefill", {"seconds": seconds, "gib": book.nbytes / 2**30}

    def ask(questions, seed=0, tokens=new, **more):
        return timed(engine, lambda: engine.generate(questions, tokens, prefix=book, seed=seed, **law, **more))

    def plan():
        controller = engine.buffers.state.pilot.controller
        return {"plan": str(controller and controller.plan), "budget": engine.buffers.state.budget,
                "block": engine.buffers.state.settings.block_size, "compiled": engine.buffers.state.compiler.compiles}

    if "questions" in args.parts:
        yield "questions", {**answered(*ask(asked)), **plan()}
        time.sleep(args.rest)
        for i in range(1, 1 + args.again):
            yield "questions again", {**answered(*ask([*asked[i:], *asked[:i]], seed=100 * i)), **plan()}
    if "autoregression" in args.parts:
        yield "autoregression", answered(*ask(asked, speculate=False, one_row=True))
    if "samples" in args.parts:
        for count in args.samples:
            for what, how in (("", {}), (" again", {}), (", autoregression", {"speculate": False, "one_row": True})):
                results, seconds = ask(asked[0], num_samples=count, **how)
                yield f"{count} samples{what}", {**answered(results, seconds), **(plan() if not how else {})}
    if "single" in args.parts:
        ask(asked[0], tokens=max(new, 64))  # records its graphs
        single = [answered([result], seconds) for result, seconds in (ask(one, seed=i) for i, one in
                                                                       enumerate(asked[: args.singles]))]
        yield "one by one", {name: median(one[name] for one in single) for name in single[0]} | plan()
    if "autoregression" in args.parts:
        result, seconds = ask(asked[1], tokens=min(new, 48), speculate=False, one_row=True)
        yield "one by one, autoregression", answered([result], seconds)
    if "chat" in args.parts:
        chat, turns = engine_chat(engine, book, tokenizer, asked), []
        for i in range(10):
            result, seconds = timed(engine, lambda i=i: chat(i, min(new, 32), law))
            turns.append((seconds, result.stats.ttft))
        yield "conversation", {"first_turn_s": turns[0][0], "turn_2_s": turns[1][0], "turn_9_s": turns[8][0],
                               "turn_10_s": turns[9][0], "median_ttft": median(ttft for _, ttft in turns[1:])}
    if "file" in args.parts:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            path = os.path.join(folder, "book.prefix")
            _, wrote = timed(engine, lambda: book.save(path))
            size = os.path.getsize(path) / 1e9
            del book
            engine.release()
            _, read = timed(engine, lambda: engine.open(path))
            yield "file", {"gb": size, "save_s": wrote, "save_gb_s": size / wrote, "open_s": read,
                           "open_gb_s": size / read}


def engine_chat(engine: Engine, book, tokenizer, asked):
    """A conversation by ids: a call answers turn i."""
    said: list[int] = []

    def turn(i: int, tokens: int, law: dict):
        said.extend(asked[i % len(asked)])
        result = engine.generate(list(said), tokens, prefix=book, seed=i, **law)
        said.extend(result.tokens)
        return result

    return turn


def transformers_rows(engine: Engine, tokenizer, ids: list[int], args) -> dict:
    """Autoregression by transformers over the whole prompt of a question: prefill, and a time per token."""
    model = on_chip.transformers_model(engine.target)
    prompt = torch.tensor([ids + tokenizer.encode(f"\n\n{QUESTIONS[0]}\n", bos=False)], device=engine.device)
    times = []
    with torch.inference_mode():
        out, seconds = timed(engine, lambda: model(prompt, use_cache=True, logits_to_keep=1))
        cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
        for _ in range(args.peer_tokens):
            def step(token=token):
                out = model(token, past_key_values=cache, use_cache=True)
                return out.logits[:, -1:].argmax(-1)

            token, took = timed(engine, step)
            times.append(took)
    return {"prefill": seconds, "ms_a_token": 1e3 * median(times)}


def run(args) -> None:
    if args.again >= max(args.questions, 2):
        raise SystemExit(f"--again ({args.again}) must be less than --questions ({args.questions}), or 1: no row is "
                         "to be asked what it still holds")
    group, args.device = from_environment(args.device)
    cap_memory(args.memory_cap)
    engine, tokenizer = engine_of(args, group)
    ids = tokenizer.encode(read_text(args.text))[: args.context]
    machine = {"gpus": 1 if group is None else group.size, "offload": args.offload, "context": len(ids),
               "questions": args.questions, "new": args.max_new_tokens, "compile": args.compile, "rest": args.rest,
               **on_chip.about(engine, args)}
    machine["widened"] |= args.widened
    del machine["seeds"], machine["quote"], machine["block_size"]
    for what, figures in rows_of(engine, tokenizer, ids, args):
        report(f"{what}, {len(ids):,} tokens", {"what": what, **figures}, machine, args.out)
    if args.peers:
        engine.release()
        torch.cuda.empty_cache()
        report("transformers", {"what": "transformers", **transformers_rows(engine, tokenizer, ids, args)}, machine,
               args.out)


def plot(path: str) -> None:
    """A line a setting, a dot a way of asking: the last row of each."""
    rows, plt = [row for row in read_rows(path) if row["what"] in DOTS], pyplot()
    settings: dict[str, dict[str, float]] = {}
    for row in rows:
        name = "".join((row["shape"] or row["checkpoint"], ", offloaded" if row["offload"] else "",
                        f", {row['memory_cap_gib']:.0f} GiB" if row.get("memory_cap_gib") else "",
                        ", 2 GPUs" if row["gpus"] == 2 else "",
                        "" if row.get("compiled") or row.get("pieces") else ", not compiled"))
        settings.setdefault(name, {})[row["what"]] = row["ms_a_token"]
    settings = dict(sorted(settings.items()))
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(settings) + 2.2))
    for number, (what, marker) in enumerate(DOTS.items()):
        shown = [(times[what], y) for y, times in enumerate(settings.values()) if what in times]
        if not shown:
            continue
        for ms, y in shown:
            axes.annotate(f"{ms:.2g}" if ms < 100 else f"{ms:.0f}", (ms, y), (0, -14 if number % 2 else 7), fontsize=7,
                          textcoords="offset points", ha="center")
        axes.plot(*zip(*shown, strict=True), marker, ms=7, label=what.replace(" again", ""))
    axes.set_xscale("log")
    axes.set_yticks(range(len(settings)), settings, fontsize=8)
    axes.set_ylim(len(settings) - 0.4, -0.8)
    axes.grid(axis="y", lw=0.3)
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.16))
    axes.set_xlabel("milliseconds a token, all answers together (decoding)")
    save(figure, path, rows)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", default="tiny")
    p.add_argument("--draft", help="a folder; with --checkpoint")
    p.add_argument("--widened", action="store_true", help="the checkpoint is the embedded pair, widened; see widen.py")
    p.add_argument("--shape", help="of a widened pair, as in widen.py")
    p.add_argument("--draft-shape", default="llama-68m")
    p.add_argument("--dtype", help="float16 or bfloat16 (default: bfloat16 on a GPU)")
    p.add_argument("--device")
    p.add_argument("--context", type=int, default=16_384)
    p.add_argument("--text", help="a text file (default: CPython's language reference)")
    p.add_argument("--questions", type=int, default=8)
    p.add_argument("--again", type=int, default=1, help="calls with all questions after the first one")
    p.add_argument("--rest", type=float, default=0.0, help="seconds without a question after the first call: a process "
                   "that finds compiled steps loads them meanwhile")
    p.add_argument("--samples", type=int, nargs="+", default=[32])
    p.add_argument("--singles", type=int, default=3, help="questions that are asked one by one")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--temperature", type=float, default=0.6)
    p.add_argument("--top-p", type=float, default=0.9)
    p.add_argument("--budget", type=int)
    p.add_argument("--chunk-size", type=int, default=8)
    p.add_argument("--draft-dtype", choices=["fp8"])
    p.add_argument("--offload", nargs="?", const=True, default=False)
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, help="wait for compiled steps, or have none")
    p.add_argument("--memory-cap", type=float, help="GiB of GPU memory that this process may allocate")
    p.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    p.add_argument("--folder", help="where the file is written (default: the system's for temporary files)")
    p.add_argument("--peers", action="store_true", help="transformers, too")
    p.add_argument("--peer-tokens", type=int, default=12)
    p.add_argument("--out", help="append rows to this file of JSON lines")
    p.add_argument("--plot", help="draw a plot of such a file, beside it")
    args = p.parse_args()
    args.draft_ranks, args.plain_tokens, args.seeds, args.quote = None, 64, 1, 0
    run_or_plot(run, plot, args)


if __name__ == "__main__":
    main()
