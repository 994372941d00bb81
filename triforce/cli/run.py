"""Answers what a command line asks for: encodes it, calls the engine, prints. Text goes to stdout, all else to stderr.
Knows nothing of tensors.
"""

import os
import random
import sys
import textwrap
import time
from contextlib import closing
from dataclasses import asdict
from statistics import median

from ..config import Placement, Sampling, Settings, find_device
from ..engine.conversation import Chat
from ..engine.keep import cut, fit
from ..engine.loading import load
from ..engine.output import Generation, as_json, totals
from ..engine.prompt_cache import Prefix, asked, check_room, first_difference
from ..errors import TooLong, UserError
from ..hf.files import about
from ..parallel import agreed
from ..render import Bar, as_ansi, draw, legend, say
from .interactive import converse
from .request import DEFAULT_PROMPT_LEN, Request, first_given, given

COMPARED_TOKENS = 64  # are timed, and checked
TURNS = 4  # of each way
DEMO = ("What is this text about?", "How does a string begin?", "What is said about numbers?", "What may a class hold?",
        "When is an exception raised?", "How are values compared?", "Which names are special?", "What may a call have?")
DEMO_TOKENS = 80  # of each answer


def answer(args, group, request: Request) -> int:
    """Exit status of the command.

    It answers a list of items. An item has what its line of a file holds, the prompt as ids (about a document: the
    question's text), and the number of tokens that --keep dropped.
    """
    engine = load_engine(args, group, request)
    options = {"max_new_tokens": args.max_new_tokens, **given(args, Sampling), "stop": args.stop,
               "stop_token_ids": args.stop_token_ids, "ignore_eos": args.ignore_eos, "logprobs": args.logprobs,
               "speculate": not args.no_speculation}
    loaded = time.perf_counter() - args.begun
    if request.prompts is not None:
        items = [encoded(engine, args, request, item) for item in request.prompts]
    elif first_given(args, "questions", "interactive", "prefix", "save_prefix", "num_samples", "system"):
        engine.stream([0], **options)  # checks, and computes nothing until it is iterated over
        book, dropped = document_of(engine, args, request)
        if book is not None:
            options |= {"prefix": book, "chat_template_kwargs": args.chat_template_kwargs}
        if args.interactive:
            about_nothing = {} if book is not None else {"system": args.system, **request.chat}
            converse(Chat(engine, options.pop("prefix", None), **about_nothing), options)
            return 0
        if not request.questions and args.save_prefix and args.num_samples is None:
            say(f"ask about it with --question, or later with --prefix {args.save_prefix}")
            return 0
        ask = as_text if book.messages is None else str
        items = [{**item, "prompt": ask(item["question"]) if item["question"] else "", "dropped": dropped}
                 for item in request.questions or [{"question": None}]]
    else:
        items = [encoded(engine, args, request, {"prompt": request.document})]
        introduce(engine, items[0]["prompt"], args, request)
    if args.prompts is None and args.questions is None and args.num_samples in (None, 1):
        return answer_one(engine, args, items[0], options, loaded)
    return answer_all(engine, args, items, options, loaded)


def demonstrate(args, group, request: Request) -> int:
    """What the command does without flags: questions about one document, side by side with drafts, and in two slower
    ways. Exit status of the command."""
    engine = load_engine(args, group, request)
    loaded, questions = time.perf_counter() - args.begun, [as_text(one) for one in DEMO]
    document, _, _ = fitted(engine, args, request, request.document, DEMO[0])
    about_toy(engine, args)
    wrap(f"{len(DEMO)} questions about {len(document):,} tokens of CPython's language reference are answered, "
         f"{DEMO_TOKENS} tokens each. A toy's answers mean little. What counts is the clock.")
    begun = time.perf_counter()
    with closing(Bar("prefill", len(document))) as bar:
        book = engine.prefill(document, on_progress=bar)
    before, without = loaded + time.perf_counter() - begun, {"speculate": False, "one_row": True}
    count = {"max_new_tokens": DEMO_TOKENS, "prefix": book, "ignore_eos": True, "seed": 0}

    def timed(prompts: list, **how) -> tuple[list, float]:
        begun = time.perf_counter()
        with closing(Bar("decode", DEMO_TOKENS * len(DEMO))) as bar:
            results = [engine.generate(prompt, on_decode=bar.count, **count, **how) for prompt in prompts]
        return results, time.perf_counter() - begun

    (answers,), ours = timed([questions])
    print(f"> {DEMO[0]}\n{textwrap.fill(textwrap.shorten(answers[0].text, 150, placeholder=' ...'), 78)}\n", flush=True)
    _, beside = timed([questions], **without)
    _, plain = timed(questions, **without)
    say(f"\n{'':<40}whole run   answers")
    for name, took in (("one after the other, without drafts", plain), ("side by side, without drafts", beside),
                       ("side by side, with drafts", ours)):
        say(f"{name:<40}{before + took:7.1f} s {took:7.1f} s")
    say(f"{'speed-up, last beside first':<40}{(before + plain) / (before + ours):7.1f}x{plain / ours:8.1f}x\n")
    lines, report = same_tokens(engine, questions[0], {**count, "max_new_tokens": COMPARED_TOKENS}, {})
    say("\n".join(lines) + "\nYour own text: docs/guide.md, or triforce --help")
    return int(report["greedy_first_difference"] is not None)


def load_engine(args, group, request: Request):
    say(f"loading {args.checkpoint} ...")
    count = len(request.prompts or request.questions or [""]) * (args.num_samples or 1)
    chosen = given(args, Settings, Placement)
    if args.interactive and find_device(chosen.get("device")).type == "cuda":  # one wait pays over many answers
        chosen = {"compile": True, **chosen}
    return load(args.checkpoint, group=group, max_batch_size=min(args.batch_size, count), **chosen)


def answer_one(engine, args, item: dict, options: dict, loaded: float) -> int:
    """Prints it as it comes, unless --json. loaded: seconds until the model was ready."""
    if "prefix" not in options:
        options["on_prefill"] = Bar("prefill", len(item["prompt"]))
    stream, coloured = engine.stream(item["prompt"], **options), args.show_levels and wants_colours(sys.stdout)
    if args.show_levels and not coloured:
        say("note: --show-levels colours a text on a terminal; FORCE_COLOR=1 does elsewhere")
    try:
        for piece in stream:
            if coloured:
                draw(as_ansi(stream.spans), sys.stdout)
            elif not args.json:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if stream.result is None or not stream.result.tokens:
            raise
    stream.close()
    result, report = stream.result, record(args, item, stream.result, loaded)
    if not args.json:
        print(flush=True)
    if args.show_levels:
        draw(f"\n{legend(result.levels, wants_colours(sys.stderr))}\n", sys.stderr)
    say(f"\n{result.stats}")
    is_whole = result.finish_reason != "interrupted"
    if args.compare and is_whole:
        say("\ncomparing with autoregression ...")
        sampling = {**given(args, Sampling), "seed": result.stats.seed}
        lines, report["compare"] = compare(engine, item["prompt"], args, sampling, result.stats)
        say("\n" + "\n".join(lines))
    say("\n" + result.stats.notes())
    if args.json:
        print(as_json(report), flush=True)
    if not is_whole:
        raise KeyboardInterrupt
    return int(any(report.get("compare", {}).get(f"{name}_first_difference") is not None
                   for name in ("greedy", "drawn")))


def answer_all(engine, args, items: list[dict], options: dict, loaded: float) -> int:
    """Answers all questions about a document at once, and prompts batch by batch. Prints each batch when it is done."""
    samples, results, begun = args.num_samples or 1, [], time.perf_counter()
    seeds = seeds_of(items, options.get("seed"), engine.target.group, samples)
    size = args.batch_size if args.prompts is not None else len(items)
    for first in range(0, len(items), size):
        batch = items[first : first + size]
        options["seed"] = seeds[first : first + size]
        with closing(Bar("decode", args.max_new_tokens * len(batch) * samples)) as bar:
            rows = engine.generate([item["prompt"] for item in batch], num_samples=samples, on_decode=bar.count,
                                   **options)
        for index, (item, row) in enumerate(zip(batch, rows, strict=True), first):
            for sample, result in enumerate(row):
                report = record(args, item, result, loaded, index, sample)
                name = f" (sample {sample + 1})" if samples > 1 else ""
                print(as_json(report) if args.json or args.prompts is not None else
                      f"> {item['question'] or ''}{name}\n{result.text.strip()}\n", flush=True)
        results += [result for row in rows for result in row]
        say(f"{first + len(batch)} of {len(items)} after {time.perf_counter() - begun:.1f} s")
    say("\n" + totals(results, time.perf_counter() - begun))
    return 0


def record(args, item: dict, result: Generation, loaded: float, index: int = 0, sample: int = 0) -> dict:
    """An answer as JSON has it. Its statistics get what only the command knows."""
    result.stats.load, result.stats.dropped_tokens = loaded, item["dropped"]
    return {"checkpoint": args.checkpoint, "index": index, "question": item.get("question"), "sample": sample,
            **asdict(result)}


# -- what is asked -----------------------------------------------------------------------------------------------------

def messages_of(args, document: str) -> list[dict]:
    """The messages that a chat about a document begins with."""
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": document}]


def as_text(question: str) -> str:
    """A question as it follows a document that is made of text."""
    return f"\n\n{question}\n"


def encoded(engine, args, request: Request, item: dict) -> dict:
    """Makes an item of `answer` from a text or messages, and perhaps a question."""
    question = item.get("question", args.question) or None
    with about(item.get("name")):
        if "messages" in item:
            if cuts := first_given(args, "prompt_len", "keep"):
                raise UserError(f"messages are not cut by {cuts}; drop it, or give a prompt")
            messages = asked(item["messages"], question) if question else item["messages"]
            ids, dropped = engine.encode_prompt(messages, **request.chat), 0
            engine.check_len(len(ids), args.max_new_tokens)
        else:
            _, ids, dropped = fitted(engine, args, request, item["prompt"], question)
    return {**item, "question": question, "prompt": ids, "dropped": dropped}


def fitted(engine, args, request: Request, text: str, question: str | None) -> tuple[str | list[int], list[int], int]:
    """Cuts a text to --prompt-len tokens, and by --keep until prompt and output fit. Returns what is left (as text
    where a chat template joins it with the question, else as ids), the ids of both, and how many tokens --keep
    dropped."""
    tokenizer, room = engine.tokenizer, engine.room(args.max_new_tokens)
    ids = tokenizer.encode(text)
    length = args.prompt_len or (DEFAULT_PROMPT_LEN if request.is_demo else len(ids))
    if length > len(ids):
        say(f"note: the prompt has {len(ids):,} tokens, fewer than --prompt-len {length:,}")
    ids = ids[:length]
    if args.chat or args.system:
        def join(part: str) -> list[int]:
            messages = messages_of(args, part)
            return engine.encode_prompt(messages if question is None else asked(messages, question), **request.chat)

        document, ids = fit(text, tokenizer.encode, length, "start")
        document, whole = fit(document, join, room, args.keep)
        left = len(tokenizer.encode(document))
    else:
        follows = tokenizer.encode(as_text(question), bos=False) if question else []
        document = cut(ids, max(room - len(follows), 1), args.keep, tokenizer.bos_id)
        whole, left = document + follows, len(document)
    try:
        engine.check_len(len(whole), args.max_new_tokens)
    except TooLong as error:
        fits = left + room - len(whole)
        raise TooLong(f"{error}" + f" (the text: --prompt-len {fits}, or --keep)" * (fits > 0)) from None
    if left < len(ids):
        wrap(f"note: {len(ids) - left:,} of the text's {len(ids):,} tokens were dropped, so that prompt and output fit "
             f"(--keep {args.keep})")
    return document, whole, len(ids) - left


def seeds_of(items, first: int | None, group, samples: int = 1) -> list[int]:
    """From which each item's samples count: its own "seed", or its place after `first` (None: drawn)."""
    first = agreed(group, random.getrandbits(31)) if first is None else first
    return [item.get("seed", first + i * samples) for i, item in enumerate(items)]


def document_of(engine, args, request: Request) -> tuple[Prefix | None, int]:
    """Opens or prefills the document that is asked about, and saves it if asked to. Returns it, None if there is none;
    and how many of its tokens --keep dropped."""
    begun, dropped = time.perf_counter(), 0
    if args.prefix is not None:
        book = engine.open(args.prefix)
        if args.chat and book.messages is None:
            raise UserError(f"{args.prefix} was made of text; drop --chat, or make it anew with --chat")
    elif request.document is None:
        return None, 0
    else:
        book, dropped = prefilled(engine, args, request)
    wrap(f"{args.checkpoint} on {engine.device}: a document of {len(book):,} tokens, there after "
         f"{time.perf_counter() - begun:.1f} s; {book.num_shared:,} of them are shared by all questions")
    if args.save_prefix is not None:
        if not args.save_every or args.prefix is not None:
            book.save(args.save_prefix)
        say(f"{args.save_prefix} has {len(book):,} tokens, {book.num_read:,} of them from before")
    say("")
    return book, dropped


def prefilled(engine, args, request: Request) -> tuple[Prefix, int]:
    """Prefills what fits of the document beside the longest question. Returns it, and how many tokens were dropped."""
    longest = max(request.questions or [{"question": "", "name": "the text"}],
                  key=lambda item: len(engine.tokenizer.encode(item["question"])))
    with about(longest["name"], TooLong):
        document, ids, dropped = fitted(engine, args, request, request.document, longest["question"])
    options = {"keep": args.save_prefix, "keep_every": args.save_every} if args.save_every else {}
    if args.save_prefix is not None and not options:  # with options the prefill looks
        check_room(args.save_prefix, engine, len(ids))
    if isinstance(document, str):
        document, options = messages_of(args, document), {**options, **request.chat}
    with closing(Bar("prefill", len(ids))) as bar:
        return engine.prefill(document, on_progress=bar, **options), dropped


# -- what is printed ---------------------------------------------------------------------------------------------------

def wrap(text: str) -> None:
    say(textwrap.fill(text, 78, subsequent_indent="  "))


def introduce(engine, ids, args, request: Request) -> None:
    """Prints the model, the prompt, and how much of the prompt drafts read."""
    about_toy(engine, args, f", {len(ids):,} prompt tokens" + " of CPython's language reference" * request.is_demo)
    if not args.no_speculation and 0 < (budget := engine.buffers.budget(len(ids))) < len(ids):
        wrap(f"drafts read {budget:,} of these tokens (--budget), every check reads all of them")
    say("")


def about_toy(engine, args, more: str = "") -> None:
    toy = f" (a toy of {engine.num_parameters / 1e6:.1f} million parameters)" if args.checkpoint == "tiny" else ""
    wrap(f"{args.checkpoint}{toy} on {engine.device}, {engine.target.dtype_name}{more}")


def wants_colours(file) -> bool:
    """Whether a file is a terminal, or colours are wanted wherever they go (FORCE_COLOR)."""
    return file.isatty() or bool(os.environ.get("FORCE_COLOR"))


# -- the comparison ----------------------------------------------------------------------------------------------------

def compare(engine, ids: list[int], args, sampling: dict, stats) -> tuple[list[str], dict]:
    """--compare: lines, and the same as JSON. It compares the speed with that of the fastest autoregression. Its steps
    have one row: they have the distribution of padded steps, whose bits are promised, and are faster on a CPU. It
    compares tokens with and without speculation: greedy ones, and drawn ones where levels share their draws.

    Args:
        sampling: of the run, with its seed. stats: of the run.
    """
    count = {"max_new_tokens": min(COMPARED_TOKENS, args.max_new_tokens), "ignore_eos": True}
    ways = {"no speculation" if args.no_speculation else "speculation": {"speculate": not args.no_speculation},
            "autoregression": {"speculate": False, "one_row": True}}
    # They take turns, so that a machine that becomes busy hits both. In the first turn steps are prepared.
    turns = [{way: engine.generate(ids, **sampling, **count, **how).stats.tbt for way, how in ways.items()}
             for _ in range(1 + TURNS)][1:]
    times = {way: [turn[way] for turn in turns] for way in ways}
    lines, report = speeds(times, stats) if all(map(all, times.values())) else (["too few tokens; ask for 64"], {})
    same, told = same_tokens(engine, ids, count, {"drawn": sampling} if engine.settings.coupled else {})
    return lines + same, report | told


def same_tokens(engine, prompt, count: dict, drawn: dict[str, dict]) -> tuple[list[str], dict]:
    """Lines and JSON: whether tokens with and without speculation are the same, greedy and by ways to draw them."""
    lines, report = [], {}
    for name, one in {"greedy": {"temperature": 0.0}, **drawn}.items():
        on, off = (engine.generate(prompt, speculate=on, **one, **count).tokens for on in (True, False))
        differ = first_difference(on, off)
        verdict = "identical" if differ is None else f"DIFFERENT from token {differ} on"
        lines.append(f"{name} check, {len(on)} tokens, speculation on and off: {verdict}")
        report |= {f"{name}_tokens": len(on), f"{name}_first_difference": differ}
    return lines, report


def speeds(times: dict[str, list[float]], stats) -> tuple[list[str], dict]:
    """Lines and JSON about the whole run and a token: medians, and the least and the most of a token in brackets.

    Args:
        times: seconds a token, of the turns of each way. stats: of a run, which began as the other way's would.
    """
    lines, report = [], {}
    for name, way in times.items():
        run = stats.load + stats.ttft + max(stats.new_tokens - 1, 0) * median(way)
        report[name] = {"tbt": median(way), "tbt_of_turns": way, "run": run}
        lines.append(f"{name:<15}{1e3 * median(way):7.1f} ms a token ({1e3 * min(way):.1f} to {1e3 * max(way):.1f}); "
                     f"whole run {run:.1f} s")
    first, second = report.values()
    gain, of_run = second["tbt"] / first["tbt"], second["run"] / first["run"]
    lines.append(f"speed-up {gain:.2f}x a token, {of_run:.2f}x the whole run of {stats.new_tokens:,} tokens")
    return lines, {**report, "speedup": gain, "speedup_of_run": of_run}
