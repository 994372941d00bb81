"""The command line's ways to use one document more than once: questions, samples, a conversation, a file.

Knows nothing of tensors: it reads files, calls the engine, and prints.
"""

import json
import random
from dataclasses import asdict

from . import prefix_file
from .chat import Chat
from .config import whole
from .errors import UserError
from .generation import Generation
from .interactive import Conversation, say
from .parallel import agreed
from .prefix import Prefix
from .progress import Bar


def wanted(args) -> bool:
    """Whether the flags ask for any of it."""
    return bool(args.questions or args.interactive or args.prefix or args.save_prefix or args.num_samples is not None
                or args.system)


def first_given(args, *names: str) -> str | None:
    """The first of these flags that was given."""
    given = (name for name in names if getattr(args, name) is not None and getattr(args, name) is not False)
    return next((f"--{name.replace('_', '-')}" for name in given), None)


def check(args, ranks: int) -> None:
    """Raises UserError for flags that do not go together."""
    other = first_given(args, "prompts", "compare", "show_levels", "keep")
    if other is not None:
        flag = first_given(args, "questions", "interactive", "num_samples", "system", "prefix", "save_prefix")
        remedy = "cut the document with --prompt-len" if other == "--keep" else "drop one of them"
        raise UserError(f"{flag} does not go with {other}; {remedy}")
    if args.save_prefix:
        prefix_file.check_target(args.save_prefix)  # before hours of work
    if args.prefix and (args.prompt is not None or args.prompt_file is not None or args.system or args.chat):
        raise UserError("--prefix opens a document that was saved, with its messages; drop --prompt, --prompt-file, "
                        "--system and --chat")
    if args.prefix and args.prompt_len is not None:
        raise UserError(f"--prompt-len ({args.prompt_len}) cuts a text, and --prefix opens a document that was "
                        "computed whole; drop one of them")
    if args.interactive and (args.questions or args.question or args.num_samples or args.json):
        raise UserError("--interactive asks for the questions itself; drop --questions, --question, --num-samples and "
                        "--json")
    if args.interactive and ranks > 1:
        raise UserError(f"--interactive runs in one process, and torchrun started {ranks}; use --questions")
    if args.num_samples is not None:
        whole(1, 4)("--num-samples", args.num_samples)


def read_questions(text: str, path: str) -> list[dict]:
    """Questions of a file: one a line, or lines of JSON, or one JSON list; of strings, or of objects with a "question"
    and perhaps a "seed"."""
    try:
        found = json.loads(text)
        if not isinstance(found, (list, dict, str)):
            raise ValueError  # a line of text that happens to be a number
        items = found if isinstance(found, list) else [found]
    except (ValueError, RecursionError):
        items = []
        for line in filter(str.strip, text.splitlines()):
            try:
                items.append(json.loads(line) if line.lstrip()[:1] in '{"' else line.strip())
            except ValueError:
                items.append(line.strip())
    questions = [item if isinstance(item, dict) else {"question": item} for item in items]
    for number, item in enumerate(questions, 1):
        if not isinstance(item.get("question"), str) or not item["question"].strip():
            raise UserError(f"question {number} of --questions {path} is no text; write one a line, or "
                            '{"question": "...", "seed": 1}')
        if not isinstance(item.get("seed", 0), int):
            raise UserError(f"the seed of question {number} of --questions {path} must be a whole number")
    if not questions:
        raise UserError(f"--questions {path} holds no question; write one a line")
    return questions


def seeds_of(items: list[dict], first: int | None, group, count: int = 1) -> list[int]:
    """Of `count` samples of each: those from its own "seed" on, else those of its place after `first`. first: None:
    drawn."""
    first = agreed(group, random.getrandbits(31)) if first is None else first
    begun = [first + i * count if item.get("seed") is None else item["seed"] for i, item in enumerate(items)]
    return [seed + sample for seed in begun for sample in range(count)]


def document_of(engine, args, ids: list[int] | None, chat: dict) -> Prefix | None:
    """What is asked about: opened, or prefilled from a document's ids; saved where that is wanted. None: nothing."""
    if args.prefix:
        book = engine.open(args.prefix)
    elif ids is None:
        return None
    else:
        bar, keeping = Bar("prefill", len(ids)), {}
        if args.save_every is not None:
            keeping = {"keep": args.save_prefix, "keep_every": args.save_every}
        try:
            if args.chat or args.system:
                system = [{"role": "system", "content": args.system}] if args.system else []
                document = {"role": "user", "content": engine.tokenizer.decode(ids)}
                book = engine.prefill([*system, document], **chat, on_progress=bar, **keeping)
            else:
                book = engine.prefill(ids, on_progress=bar, **keeping)
        finally:
            bar.close()
    if args.save_prefix:
        if args.save_every is None or args.prefix:
            book.save(args.save_prefix)
        if book.num_read:
            say(f"{args.save_prefix} had {book.num_read:,} of {len(book):,} tokens")
        say(f"wrote {len(book):,} tokens to {args.save_prefix}")
    return book


def answer(engine, args, book: Prefix | None, questions: list[dict], chat: dict, sampling: dict) -> int:
    """Whatever the flags ask for."""
    options = {**sampling, "speculate": not args.no_speculation, "stop": args.stop, "ignore_eos": args.ignore_eos}
    if book is not None:
        say(f"{args.checkpoint} on {engine.device}: a document of {len(book):,} tokens, {book.num_shared:,} of them "
            "shared by all questions\n")
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
    bar = Bar("decode", args.max_new_tokens * len(texts) * (args.num_samples or 1))
    try:
        results = engine.generate(texts, prefix=book, num_samples=args.num_samples or 1, on_decode=bar.count, **options)
    finally:
        bar.close()
    for index, samples in enumerate(results):
        for sample, result in enumerate(samples):
            show(args, index, sample, questions[index]["question"] if questions else None, result)
    count = sum(map(len, results))
    if count > 1:
        say(f"\nof the first of {count} answers:")
    say(f"\n{results[0][0].stats}")
    return 0


def said(book: Prefix, question: str) -> str:
    """A question as it follows the document."""
    return question if book.messages is not None else f"\n\n{question}\n"


def show(args, index: int, sample: int, question: str | None, result: Generation) -> None:
    """One answer: a line of JSON, or text."""
    if args.json:
        about = {"index": index, "question": question, "sample": sample}
        print(json.dumps({**about, **asdict(result)}), flush=True)
        return
    name = f" (sample {sample + 1})" if args.num_samples and args.num_samples > 1 else ""
    if question is not None or name:
        print(f"> {question or ''}{name}")
    print(f"{result.text.strip()}\n", flush=True)


