"""What a command line asks for: reads the files and the standard input that its flags name, and checks all of it.

A command of one process does this before it imports PyTorch, which takes seconds: mistakes are told at once. So nothing
that this module imports may import PyTorch.
"""

import dataclasses
import io
import json
import os
import re
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .config import Placement, Sampling, Settings, check_logprobs, check_max_new_tokens, names_of, whole
from .errors import UserError
from .free_memory import check_answers
from .hf.folders import find_draft, resolve
from .hf.tokenizer import is_messages
from .prefix_path import check_source, check_target

DEFAULT_PROMPT_LEN = 16_384
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A flag, and those that it does not go with.
CLASHES = {
    "prompts": "prompt prompt_file prefix save_prefix interactive questions num_samples system compare show_levels",
    "prompt": "prompt_file",
    "prefix": "prompt prompt_file prompt_len system chat_template keep compare show_levels",
    "interactive": "question questions num_samples json keep compare show_levels",
    "save_prefix": "keep compare show_levels",
    "compare": "questions num_samples system",
    "show_levels": "questions num_samples system json"}
# A flag, and those of which it needs one.
NEEDS = {"logprobs": "json prompts", "save_every": "save_prefix", "chat_template": "chat system prompts",
         "chat_template_kwargs": "chat system prompts prefix"}


@dataclass(frozen=True)
class Request:
    """What a command line asks for, read and checked before a model is loaded."""

    document: str | None = None  # the text to continue, or to ask about
    is_demo: bool = False  # nobody gave one
    prompts: list[dict] | None = None  # of --prompts, instead: prompt or messages, question, seed, and the line's name
    questions: tuple[dict, ...] = ()  # of --question and --questions: question, seed, and the name for errors
    chat: dict = dataclasses.field(default_factory=dict)  # of --chat-template and -kwargs, as `encode_prompt` has them


def given(args, *classes: type) -> dict:
    """The fields of these classes for which a flag was given."""
    return {name: getattr(args, name) for name in names_of(*classes) if hasattr(args, name)}


def first_given(args, *names: str) -> str | None:
    """The first of these flags that was given."""
    found = (name for name in names if getattr(args, name) is not None and getattr(args, name) is not False)
    return next((f"--{name.replace('_', '-')}" for name in found), None)


def about_a_document(args) -> bool:
    """Whether the flags ask for more than one answer about a document, or for its file."""
    return first_given(args, "questions", "interactive", "prefix", "save_prefix", "num_samples", "system") is not None


def read_request(args, no_flags: bool = False) -> Request:
    """Reads the files and standard input that the flags name.

    Args:
        no_flags: were given. A pipe that brings nothing, as schedulers leave them, is then no mistake.

    Raises:
        UserError: a file cannot be read, a text is empty, a value is out of range, flags do not go together.
    """
    asks_alone = args.interactive and args.prompt is args.prompt_file is None  # standard input holds what is asked
    check_together(args, asks_alone)
    check_values(args)
    chat = {} if args.chat_template_kwargs is None else {"chat_template_kwargs": args.chat_template_kwargs}
    if args.chat_template is not None:
        chat["chat_template"] = read_file("--chat-template", args.chat_template)
    if args.prompts is not None:
        prompts = read_prompts(args.prompts)
        check_seeds(prompts)
        return Request(prompts=prompts, chat=chat)
    single = [] if args.question is None else [{"question": args.question, "name": "--question"}]
    questions = (*single, *questions_of(args))
    check_seeds(questions)
    if args.prefix or asks_alone and args.prompt_len is None:
        return Request(questions=questions, chat=chat)
    document = None if asks_alone else read_document(args)
    if document is None and args.checkpoint != "tiny":
        raise UserError("there is no prompt; give a text with --prompt or --prompt-file, or pipe one in")
    if document is None or document == "" and no_flags:
        return Request(default_document(), is_demo=True, questions=questions, chat=chat)
    if not document.strip():
        raise UserError("the prompt is empty; give some text with --prompt or --prompt-file" if
                        first_given(args, "prompt", "prompt_file") else "standard input is empty; did the command "
                        "before the pipe fail? Give a text with --prompt or --prompt-file")
    return Request(document, questions=questions, chat=chat)


def check_values(args) -> None:
    """Raises UserError for the value of a flag that no model could mend."""
    resolve(args.checkpoint)
    find_draft(args.checkpoint, getattr(args, "draft", None))
    Settings(**given(args, Settings))
    Placement(**given(args, Placement))
    Sampling(**given(args, Sampling)).columns(1)
    check_max_new_tokens(args.max_new_tokens)
    check_logprobs(args.logprobs)
    if args.num_samples is not None:
        check_answers(args.num_samples, args.max_new_tokens)
    if args.save_prefix:
        check_target(args.save_prefix)  # before hours of work
    if args.prefix:
        check_source(args.prefix)


def check_together(args, asks_alone: bool) -> None:
    """Raises UserError for flags that do not go together."""
    for name, others in CLASHES.items():
        flag, other = first_given(args, name), first_given(args, *others.split())
        if flag and other:
            raise UserError(f"{flag} does not go with {other}; drop one of them")
    for name, others in NEEDS.items():
        flag = first_given(args, name)
        if flag and not first_given(args, *others.split()) and not (asks_alone and "chat" in others):
            raise UserError(f"{flag} has no effect by itself; add --{others.split()[0].replace('_', '-')}, or drop it")
    reads_text = args.prompt_file == "-" or args.prompt is args.prompt_file is args.prefix is None
    if reads_text and args.questions == "-" or args.prompt_file == "-" and args.interactive:
        raise UserError("a document and what is asked about it cannot both come from standard input; name the "
                        "document's file")
    if args.save_prefix and asks_alone and args.prompt_len is None:
        raise UserError("--save-prefix saves a document, and --interactive has none; give one with --prompt-file, or "
                        "save the conversation with /save")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if args.interactive and (sys.stdin is None or ranks > 1):
        raise UserError(f"--interactive needs standard input and one process, and here it is closed, or there are "
                        f"several ({ranks}); use --questions")


def check_seeds(items: Iterable[dict]) -> None:
    """Raises UserError for a "seed" that is none, before anything is computed."""
    for item in items:
        try:
            whole(0, 1)("seed", seed := item.get("seed", 0))
            Sampling(seed=seed).columns(1)
        except UserError as error:
            raise UserError(f"{item['name']}: {error}") from None


def default_document() -> str:
    """A long English text that every Python carries: the language reference."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def read_document(args) -> str | None:
    """The text of --prompt, of --prompt-file, or of a pipe or file behind standard input; None where there is none."""
    if args.prompt is not None:
        return args.prompt
    if args.prompt_file is not None:
        return read_file("--prompt-file", args.prompt_file)
    if not _is_piped():
        return None
    print("reading the prompt from standard input ...", file=sys.stderr)
    return read_file("--prompt-file", "-")


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file, rather than a terminal, nothing or /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def read_file(flag: str, path: str) -> str:
    """A text, with line ends as Python reads them; "-" is standard input. Says so if it is not UTF-8."""
    if path == "-" and sys.stdin is None:
        raise UserError(f"{flag} - reads standard input, and that is closed; name a file")
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {flag} {path}: {getattr(error, 'strerror', error)}; name another file") from None
    text = data.decode("utf-8-sig", errors="replace")
    if bad := text.count(REPLACEMENT) - data.count(REPLACEMENT.encode()):
        print(f"{flag} {path} is not UTF-8: {bad:,} characters are read as {REPLACEMENT}; convert it with iconv",
              file=sys.stderr)
    return io.StringIO(text, newline=None).read()


def read_items(flag: str, path: str, main: str, plain: bool = False) -> list[dict]:
    """What a file has a line for, or a list in JSON: objects, or strings, which stand for the field `main` of one. Each
    gets the "name" that it has in errors. plain: lines need not be JSON."""
    text = read_file(flag, path)
    kind, lines = "line", text.split("\n")
    try:
        if plain and re.fullmatch(r'\s*\[\s*["{\]].*\]\s*', text, re.S):
            kind, lines = "item", [json.dumps(item) for item in json.loads(text)]
    except (ValueError, RecursionError) as error:
        raise UserError(f"{flag} {path} looks like a list in JSON, and is none: {error}; correct it, or write one a "
                        "line") from None
    items = []
    for number, line in enumerate(lines, 1):
        name = f"{kind} {number} of {flag} {path}"
        if not line.strip():
            continue
        try:
            value = json.loads(line) if not plain or line.lstrip()[0] in '{"' else line.strip()
        except (ValueError, RecursionError):
            if not plain:
                raise UserError(f'{name} is not JSON; write each as a JSON string, or as {{"{main}": "..."}}') from None
            value = line.strip()
        fields = value if isinstance(value, dict) else {main: value}
        items.append({**{field: one for field, one in fields.items() if one is not None}, "name": name})
    if not items:
        raise UserError(f"{flag} {path} holds no {main}; write one a line")
    known = {"question", "seed", "name"} | ({"prompt", "messages"} if main == "prompt" else set())
    if unread := sorted({field for item in items for field in item} - known):
        print(f"note: {flag} {path} has fields that are not read: {', '.join(unread)}; those that are: "
              f"{', '.join(sorted(known - {'name'}))}", file=sys.stderr)
    return items


def read_prompts(path: str) -> list[dict]:
    """The prompts of a file of JSON lines: {"prompt" or "messages", "question", "seed"}."""
    items = read_items("--prompts", path, "prompt")
    for item in items:
        text = item.get("prompt")
        if is_messages(item.get("messages")) == (isinstance(text, str) and text != ""):
            raise UserError(f"{item['name']} holds no prompt, or two; write each as a JSON string, or as "
                            '{"prompt": "..."} or {"messages": [...]}')
        if not isinstance(item.get("question", ""), str):
            raise UserError(f"{item['name']}: its question must be a text")
    return items


def questions_of(args) -> list[dict]:
    """Those of --questions, if it was given: one a line, or lines of JSON, or one JSON list; of strings, or of objects
    with a "question" and perhaps a "seed"."""
    items = [] if args.questions is None else read_items("--questions", args.questions, "question", plain=True)
    for item in items:
        if not isinstance(item.get("question"), str) or not item["question"].strip():
            raise UserError(f"{item['name']} holds no question; write one a line, or "
                            '{"question": "...", "seed": 1}')
    return items
