"""The command line's ways to use one document more than once: questions, samples, a conversation, a file.

Knows nothing of tensors: it calls the engine, and prints.
"""

import random
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict

from .chat import Chat
from .config import Sampling
from .engine import Stream
from .errors import UserError
from .generation import Generation, as_json, totals
from .interactive import Conversation, say
from .keep import Document
from .parallel import agreed
from .prefix import JOINTS, Prefix, asked
from .prefix_path import holds_something
from .progress import Bar
from .terminal import draw


def seeds_of(items: list[dict], first: int | None, group, count: int = 1) -> list[int]:
    """Of `count` samples of each: those from its own "seed" on, else those of its place after `first`. first: None:
    drawn."""
    first = agreed(group, random.getrandbits(31)) if first is None else first
    begun = [first + i * count if item.get("seed") is None else item["seed"] for i, item in enumerate(items)]
    return [seed + sample for seed in begun for sample in range(count)]


def check_seeds(what: str, first, count: int) -> None:
    """Raises UserError for a seed that cannot be counted up for so many answers. first: None: it is drawn."""
    for seed in () if first is None else (first, first + count - 1):
        try:
            Sampling(seed=seed).columns(1)
        except UserError as error:
            counted = f", counted up for {count} answers" if seed != first else ""
            raise UserError(f"{what} ({first}){counted}: {error}") from None


def asked_of(args, questions: Sequence[dict]) -> dict[str, dict]:
    """What is asked about a document, each under the name that it has in an error: those of --questions and of
    --question; or else nothing, once."""
    found = {f"question {number} of --questions {args.questions}": item for number, item in enumerate(questions, 1)}
    if args.question:
        found["--question"] = {"question": args.question}
    return found or {"": {"question": ""}}


def prompt_length(engine, args, document: Document | None, question: str, chat: dict) -> int:
    """Tokens of a document and a question about it. None: of what stands beside a document.

    To put a long document into a chat template once for each question takes seconds. So that is done only where the
    template with a document of no text says that it may not fit.
    """
    ids = [] if document is None else document.ids
    if not (args.chat or args.system):
        return len(ids) + (len(engine.tokenizer.encode(as_text(question), bos=False)) if question else 0)
    length = len(ids) + len(engine.encode_prompt(asked(messages_of(args, "."), question), **chat))
    if document is not None and length > engine.room(args.max_new_tokens) - JOINTS:
        length = len(engine.encode_prompt(asked(messages_of(args, document.text), question), **chat))
    return length


def messages_of(args, document: str) -> list[dict]:
    """What a chat about a document begins with."""
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": document}]


def as_text(question: str) -> str:
    """A question as it follows a document that is made of text."""
    return f"\n\n{question}\n"


def document_of(engine, args, document: Document | None, chat: dict) -> Prefix | None:
    """What is asked about: opened, or prefilled; saved where that is wanted. None: nothing."""
    begun, how = time.perf_counter(), "opened"
    if args.prefix:
        book = engine.open(args.prefix)
        if args.chat and book.messages is None:
            raise UserError(f"{args.prefix} holds a document that was made of text; drop --chat, or make it anew "
                            "with --chat")
    elif document is None:
        return None
    else:
        bar, keeping, how = Bar("prefill", len(document.ids)), {}, "computed"
        if args.save_every is not None:
            keeping = {"keep": args.save_prefix, "keep_every": args.save_every}
        try:
            if args.chat or args.system:
                book = engine.prefill(messages_of(args, document.text), **chat, on_progress=bar, **keeping)
            else:
                book = engine.prefill(document.ids, on_progress=bar, **keeping)
        except KeyboardInterrupt:
            bar.close()
            if keeping and holds_something(args.save_prefix):
                say(f"{args.save_prefix} keeps what was computed; the same command goes on from there")
            raise
        finally:
            bar.close()
    shared = book.num_shared
    if args.prefix and book.messages is not None:  # the template may have become another one
        shared = book.shared_with(book.ids("?", chat.get("chat_template_kwargs")))
    told = (f"{args.checkpoint} on {engine.device}: a document of {len(book):,} tokens, {how} in "
            f"{time.perf_counter() - begun:.1f} s; {shared:,} of them are shared by all questions")
    say(textwrap.fill(told, 78, subsequent_indent="  "))
    if args.save_prefix:
        if args.save_every is None or args.prefix:
            book.save(args.save_prefix)
        if book.num_read:
            say(f"{args.save_prefix} had {book.num_read:,} of {len(book):,} tokens")
        say(f"wrote {len(book):,} tokens to {args.save_prefix}")
    return book


def answer(engine, args, book: Prefix | None, questions: list[dict], chat: dict, sampling: dict, known: dict) -> int:
    """Whatever the flags ask for. known: statistics that are the command's: seconds from its start until the model was
    there, and tokens that were dropped."""
    options = {**sampling, "speculate": not args.no_speculation, "stop": args.stop, "ignore_eos": args.ignore_eos}
    if book is not None:
        say("")
        if "chat_template_kwargs" in chat:
            options["chat_template_kwargs"] = chat["chat_template_kwargs"]
    if args.interactive:
        system = args.system if book is None else None
        Conversation(Chat(engine, book, system=system, **(chat if book is None else {})),
                     options).run()
        return 0
    if args.question:
        questions = [{"question": args.question}, *questions]
    if not questions and args.save_prefix and args.num_samples is None:
        say(f"ask about it with --question, or later with --prefix {args.save_prefix}")
        return 0
    texts = [said(book, item["question"]) for item in questions] or [""]
    if any(item.get("seed") is not None for item in questions):
        options["seed"] = seeds_of(questions, options.get("seed"), engine.target.group, args.num_samples or 1)
    if len(texts) == 1 and args.num_samples in (None, 1):
        return answer_one(engine, args, book, texts[0], questions[0]["question"] if questions else None, options,
                          known)
    begun, bar = time.perf_counter(), Bar("decode", args.max_new_tokens * len(texts) * (args.num_samples or 1))
    try:
        results = engine.generate(texts, prefix=book, num_samples=args.num_samples or 1, on_decode=bar.count, **options)
    finally:
        bar.close()
    seconds = time.perf_counter() - begun
    for index, samples in enumerate(results):
        for sample, result in enumerate(samples):
            vars(result.stats).update(known)
            show(args, index, sample, questions[index]["question"] if questions else None, result)
    say("\n" + totals([one for samples in results for one in samples], seconds))
    return 0


def answer_one(engine, args, book: Prefix, text: str, question: str | None, options: dict, known: dict) -> int:
    """One answer, as it comes. After Ctrl-C, what there is of it. known: see `answer`."""
    if isinstance(options.get("seed"), list):
        [options["seed"]] = options["seed"]
    stream = engine.stream(text, prefix=book, **options)
    is_listed = args.questions is not None and not args.json  # one of a list, which happens to have one
    if is_listed:
        print(f"> {question}", flush=True)
    try:
        result = print_stream(stream, args.json, strips=True)
    finally:
        if is_listed:
            print(flush=True)
    vars(result.stats).update(known)
    if args.json:
        show(args, 0, 0, question, result)
    say(f"\n{result.stats}")
    if result.finish_reason == "interrupted":
        raise KeyboardInterrupt
    return 0


def print_stream(stream: Stream, quiet: bool, coloured=None, strips: bool = False) -> Generation:
    """Prints a text as it comes. Returns its Generation; after Ctrl-C, what there is of it.

    Args:
        quiet: nothing is printed. strips: the text begins with its first letter.
        coloured: gives what a piece looks like with colours. None: it is shown as it is.
    """
    begun = False
    try:
        for piece in stream:
            piece = piece.lstrip() if strips and not begun else piece
            begun = begun or bool(piece)
            if coloured is not None and not quiet:
                draw(coloured(piece), sys.stdout)
            elif not quiet:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if stream.result is None or not stream.result.tokens:
            raise
    finally:
        stream.close()
        if begun and not quiet:
            print(flush=True)
    return stream.result


def said(book: Prefix, question: str) -> str:
    """A question as it follows the document."""
    return question if book.messages is not None else as_text(question)


def show(args, index: int, sample: int, question: str | None, result: Generation) -> None:
    """One answer: a line of JSON, or text."""
    if args.json:
        about = {"index": index, "question": question, "sample": sample}
        print(as_json({**about, **asdict(result)}), flush=True)
        return
    name = f" (sample {sample + 1})" if args.num_samples and args.num_samples > 1 else ""
    if question is not None or name:
        print(f"> {question}{name}" if question is not None else f">{name}")
    print(f"{result.text.strip()}\n", flush=True)


