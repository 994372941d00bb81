"""The command line's answers: encodes what was asked, calls the engine, and prints. Text goes to stdout, all else to
stderr. Knows nothing of tensors.
"""

import os
import random
import sys
import textwrap
import time
from dataclasses import asdict

from .chat import Chat
from .compare import compare
from .config import Placement, Sampling, Settings, find_device, names_of
from .errors import TooLong, UserError
from .generation import Generation, as_json, totals
from .interactive import Conversation, say
from .keep import cut, fit
from .levels import as_ansi, legend
from .loading import load
from .parallel import agreed
from .prefix import Prefix, asked, check_room
from .prefix_path import holds_something
from .progress import Bar
from .request import DEFAULT_PROMPT_LEN, Request, about_a_document, given
from .terminal import draw


def answer(args, group, request: Request, wants_comparison: bool) -> int:
    engine = load_engine(args, group)
    named = {name: getattr(args, name) for name in ("stop_token_ids", "logprobs") if getattr(args, name) is not None}
    options = {"max_new_tokens": args.max_new_tokens, **given(args, Sampling), **named, "stop": args.stop,
               "ignore_eos": args.ignore_eos, "speculate": not args.no_speculation}
    if request.prompts is not None:
        return answer_prompts(engine, args, request, options)
    if about_a_document(args):
        return answer_about(engine, args, request, options)
    question = request.questions[0]["question"] if request.questions else None
    _, ids, dropped = fitted(engine, args, request, request.document, question)
    introduce(engine, ids, args, request)
    known = {"load": time.perf_counter() - args.begun, "dropped_tokens": dropped}
    result = stream_text(engine.stream(ids, on_prefill=Bar("prefill", len(ids)), **options), args, known)
    report = {"checkpoint": args.checkpoint, **asdict(result)}
    if wants_comparison and result.finish_reason != "interrupted":
        say("\ncomparing with autoregression ...")
        how = {name: value for name, value in options.items() if name in names_of(Sampling)}
        lines, report["compare"] = compare(engine, ids, args.max_new_tokens, {**how, "seed": result.stats.seed},
                                           result.stats, not args.no_speculation)
        say("\n" + "\n".join(lines))
    say("\n" + result.stats.NOTES)
    end(args, report)
    compared = report.get("compare", {})
    return int(any(compared.get(f"{name}_first_difference") is not None for name in ("greedy", "drawn")))


def end(args, report: dict) -> None:
    """Prints one answer as JSON where that is wanted. One that Ctrl-C ended ends the command."""
    if args.json:
        print(as_json(report), flush=True)
    if report["finish_reason"] == "interrupted":
        raise KeyboardInterrupt


def load_engine(args, group):
    say(f"loading {args.checkpoint} ...")
    chosen = given(args, Settings, Placement)
    if args.interactive and find_device(chosen.get("device")).type == "cuda":  # of many answers: it pays to wait once
        chosen = {"compile": True, **chosen}
    return load(args.checkpoint, group=group, max_batch_size=args.batch_size, **chosen)


def messages_of(args, document: str) -> list[dict]:
    """What a chat about a document begins with."""
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": document}]


def as_text(question: str) -> str:
    """A question as it follows a document that is made of text."""
    return f"\n\n{question}\n"


def fitted(engine, args, request: Request, text: str, question: str | None) -> tuple[str | list[int], list[int], int]:
    """A text, cut to --prompt-len tokens, and by --keep so far that prompt and output fit.

    Returns:
        what is left of it, as text where a chat template joins it with the question, else its ids; ids of both; how
        many tokens --keep dropped.

    Raises:
        TooLong: they are too many.
    """
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

        document, _ = fit(text, tokenizer.encode, length, "start")
        document, whole = (document, join(document)) if args.keep is None else fit(document, join, room, args.keep)
        left = len(tokenizer.encode(document))
    else:
        follows = tokenizer.encode(as_text(question), bos=False) if question else []
        fits = args.keep is None or room <= len(follows)
        document = ids if fits else cut(ids, room - len(follows), args.keep, tokenizer.bos_id)
        whole, left = document + follows, len(document)
    can_keep = not (args.keep or args.interactive or args.save_prefix)
    engine.check_len(len(whole), args.max_new_tokens, text=left, can_keep=can_keep)
    if left < len(ids):
        wrap(f"note: {len(ids) - left:,} of the text's {len(ids):,} tokens were dropped, so that prompt and output fit "
             f"(--keep {args.keep})")
    return document, whole, len(ids) - left


def wrap(text: str) -> None:
    say(textwrap.fill(text, 78, subsequent_indent="  "))


def introduce(engine, ids, args, request: Request) -> None:
    """What is about to happen: the model, the prompt, and how much of it drafts are read from."""
    budget = engine.resolve_budget(len(ids))
    wrap(f"{args.checkpoint} on {engine.device}, {engine.target.dtype_name}, {len(ids):,} prompt tokens")
    if args.checkpoint == "tiny":
        wrap(f"(the embedded pair: a toy of {engine.num_parameters / 1e6:.1f} million parameters)")
    if 0 < budget < len(ids) and not args.no_speculation:
        wrap(f"drafts read {budget:,} of these tokens (--budget), every check reads all of them")
    if request.is_demo:
        end = " ".join(engine.tokenizer.decode(ids[-60:], continues=True).split())
        wrap(f"The prompt is the beginning of CPython's language reference. It ends: ... {end[-140:]}")
    say("")


def stream_text(stream, args, known: dict) -> Generation:
    """Prints a text as it comes, unless --json, and its statistics. Returns its Generation; after Ctrl-C, what there is
    of it. known: statistics that are the command's."""
    is_plain = not args.show_levels or not wants_colours(sys.stdout)
    if args.show_levels and is_plain:
        say("note: --show-levels colours a text on a terminal; FORCE_COLOR=1 does elsewhere")
    try:
        for piece in stream:
            if not is_plain:
                draw(as_ansi(stream.spans), sys.stdout)
            elif not args.json:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if stream.result is None or not stream.result.tokens:
            raise
    finally:
        stream.close()
    if not args.json:
        print(flush=True)
    vars(stream.result.stats).update(known)
    if args.show_levels:
        draw(f"\n{legend(stream.result.levels, not is_plain and wants_colours(sys.stderr))}\n", sys.stderr)
    say(f"\n{stream.result.stats}")
    return stream.result


def wants_colours(file) -> bool:
    """Whether a file is a terminal, or colours are wanted wherever they go (FORCE_COLOR)."""
    return file.isatty() or bool(os.environ.get("FORCE_COLOR"))


def seeds_of(items, first: int | None, group, samples: int = 1) -> list[int]:
    """Of so many samples of each: those from its own "seed" on, else those of its place after `first`. first: None:
    drawn."""
    first = agreed(group, random.getrandbits(31)) if first is None else first
    begun = [item.get("seed", first + i * samples) for i, item in enumerate(items)]
    return [seed + sample for seed in begun for sample in range(samples)]


def answer_prompts(engine, args, request: Request, options: dict) -> int:
    """--prompts: a line of JSON for each, in their order, as soon as its batch is done."""
    load_seconds, found = time.perf_counter() - args.begun, []
    for item in request.prompts:  # all of them, before hours of work
        try:
            question = item.get("question", args.question) or None
            if "messages" in item:
                messages = asked(item["messages"], question) if question else item["messages"]
                ids, dropped = engine.encode_prompt(messages, **request.chat), 0
            else:
                _, ids, dropped = fitted(engine, args, request, item["prompt"], question)
            engine.check_len(len(engine.encode_prompt(ids)), args.max_new_tokens)
            found.append((ids, dropped))
        except UserError as error:
            raise UserError(f"{item['name']}: {error}") from None
    say(f"{args.checkpoint} on {engine.device}, {engine.target.dtype_name}: {len(found):,} prompts, "
        f"{sum(len(ids) for ids, _ in found):,} tokens, {min(args.batch_size, len(found))} side by side")
    seeds = seeds_of(request.prompts, options.get("seed"), engine.target.group)
    for first in range(0, len(found), args.batch_size):
        batch, begun = found[first : first + args.batch_size], time.perf_counter()
        how = {**options, "seed": seeds[first : first + len(batch)]}
        with Bar("decode", args.max_new_tokens * len(batch)) as bar:
            results = engine.generate([ids for ids, _ in batch], on_decode=bar.count, **how)
        for index, (result, (_, dropped)) in enumerate(zip(results, batch, strict=True), first):
            vars(result.stats).update(load=load_seconds, dropped_tokens=dropped)
            print(as_json({"index": index, **asdict(result)}), flush=True)
        say(f"{first + len(batch)} of {len(found)} prompts, the last {len(batch)} in "
            f"{time.perf_counter() - begun:.1f} s")
    return 0


def answer_about(engine, args, request: Request, options: dict) -> int:
    """Questions, samples, or a conversation about one document, or its file. What a generation would refuse is refused
    before hours of prefill."""
    engine.stream([0], **options)  # checks, and computes nothing until it is iterated over
    document, ids, dropped, questions = None, [], 0, request.questions
    if request.document is not None:
        longest = max(questions or [{"question": "", "name": "the text"}],
                      key=lambda item: len(engine.tokenizer.encode(item["question"])))
        try:
            document, ids, dropped = fitted(engine, args, request, request.document, longest["question"])
        except TooLong as error:
            raise UserError(f"{longest['name']}: {error}") from None
    known = {"load": time.perf_counter() - args.begun, "dropped_tokens": dropped}
    book = document_of(engine, args, request, document, len(ids))
    if book is not None:
        say("")
        options |= {name: value for name, value in request.chat.items() if name == "chat_template_kwargs"}
    if args.interactive:
        about_nothing = {} if book is not None else {"system": args.system, **request.chat}
        Conversation(Chat(engine, book, **about_nothing), options).run()
        return 0
    if not questions and args.save_prefix and args.num_samples is None:
        say(f"ask about it with --question, or later with --prefix {args.save_prefix}")
        return 0
    asked_texts, samples = [item["question"] for item in questions] or [None], args.num_samples or 1
    texts = [as_text(text) if text and book.messages is None else text or "" for text in asked_texts]
    seeds = seeds_of(questions, options.get("seed"), engine.target.group, samples)
    if args.questions is None and samples == 1:
        result = stream_text(engine.stream(texts[0], prefix=book, **options), args, known)
        end(args, {"index": 0, "question": asked_texts[0], "sample": 0, **asdict(result)})
        return 0
    if seeds:
        options["seed"] = seeds
    begun = time.perf_counter()
    with Bar("decode", args.max_new_tokens * len(texts) * samples) as bar:
        results = engine.generate(texts, prefix=book, num_samples=samples, on_decode=bar.count, **options)
    seconds = time.perf_counter() - begun
    for index, (text, row) in enumerate(zip(asked_texts, results, strict=True)):
        for sample, result in enumerate(row):
            vars(result.stats).update(known)
            if args.json:
                print(as_json({"index": index, "question": text, "sample": sample, **asdict(result)}), flush=True)
            else:
                name = f" (sample {sample + 1})" if samples > 1 else ""
                print(f"> {text or ''}{name}\n{result.text.strip()}\n", flush=True)
    say("\n" + totals([one for row in results for one in row], seconds))
    return 0


def document_of(engine, args, request: Request, document: str | list[int] | None, length: int) -> Prefix | None:
    """What is asked about: opened, or prefilled; saved where that is wanted. None: nothing.

    Args:
        document, length: text or ids, and about how many tokens that is; None: it is in a file, or there is none.
    """
    begun, how, path = time.perf_counter(), "computed", args.save_prefix
    if args.prefix:
        book, how = engine.open(args.prefix), "opened"
        if args.chat and book.messages is None:
            raise UserError(f"{args.prefix} holds a document that was made of text; drop --chat, or make it anew "
                            "with --chat")
    elif document is None:
        return None
    else:
        if path and not args.save_every:  # or the prefill looks
            check_room(path, engine, length)
        options = {"keep": path, "keep_every": args.save_every} if args.save_every else {}
        if isinstance(document, str):
            document, options = messages_of(args, document), {**options, **request.chat}
        try:
            with Bar("prefill", length) as bar:
                book = engine.prefill(document, on_progress=bar, **options)
        except KeyboardInterrupt:
            if args.save_every and holds_something(path):
                say(f"{path} keeps what was computed; the same command goes on from there")
            raise
    shared = book.num_shared
    if args.prefix and book.messages is not None:  # the template may have become another one
        shared = book.shared_with(book.ids("?", request.chat.get("chat_template_kwargs")))
    wrap(f"{args.checkpoint} on {engine.device}: a document of {len(book):,} tokens, {how} in "
         f"{time.perf_counter() - begun:.1f} s; {shared:,} of them are shared by all questions")
    if path:
        if not args.save_every or args.prefix:
            book.save(path)
        say(f"{path} has {len(book):,} tokens, {book.num_read:,} of them from before")
    return book
