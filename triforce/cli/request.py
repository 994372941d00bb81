"""What a command line asks for: reads the files and the standard input that its flags name, and checks all of it.

A command of one process does this before it imports PyTorch, which takes seconds: mistakes are told at once.
"""

import io
import json
import os
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ..config import Placement, Sampling, Settings, as_count, check_logprobs, is_whole, names_of
from ..engine.prompt_cache_path import check_source, check_target
from ..errors import UserError
from ..hf.folders import find_draft, resolve
from ..hf.tokenizer import is_messages
from ..render import say

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
# A flag, and others, one of which it needs.
NEEDS = {"logprobs": "json prompts", "save_every": "save_prefix", "chat_template": "chat system prompts",
         "chat_template_kwargs": "chat system prompts prefix", "cache_dir_size": "cache_dir", "piece_tokens": "offload"}
# Fields of a line of a file of --prompts and of --questions.
FIELDS = {"prompt": ("prompt", "messages", "question", "seed"), "question": ("question", "seed")}


@dataclass(frozen=True)
class Request:
    """What a command line asks for, read and checked before a model is loaded."""

    document: str | None = None  # the text to continue, or to ask about
    is_demo: bool = False  # nobody gave one
    prompts: list[dict] | None = None  # of --prompts, instead: prompt or messages, question, seed, and the line's name
    questions: list[dict] = field(default_factory=list)  # of --question, --questions: question, seed, name for errors
    chat: dict = field(default_factory=dict)  # of --chat-template and -kwargs, as `encode_prompt` has them


def given(args, *classes: type) -> dict:
    """The fields of these classes for which a flag was given."""
    return {name: getattr(args, name) for name in names_of(*classes) if hasattr(args, name)}


def first_given(args, *names: str) -> str | None:
    """The first of these flags that was given."""
    found = (name for name in names if getattr(args, name, None) not in (None, False))
    return next((f"--{name.replace('_', '-')}" for name in found), None)


def read_request(args, no_flags: bool = False) -> Request:
    """Reads the files and standard input that the flags name. no_flags: none was given; an empty pipe, as schedulers
    leave it, is then no mistake. Raises UserError for a mistake."""
    asks_alone = args.interactive and args.prompt is args.prompt_file is None  # standard input holds what is asked
    check_together(args, asks_alone)
    check_values(args)
    chat = {} if args.chat_template_kwargs is None else {"chat_template_kwargs": args.chat_template_kwargs}
    if args.chat_template is not None:
        chat["chat_template"] = read_file("--chat-template", args.chat_template)
    if args.prompts is not None:
        return Request(prompts=read_items("--prompts", args.prompts, "prompt"), chat=chat)
    questions = [] if (q := args.question) is None else [as_item(json.dumps({"question": q}), "question", "--question")]
    if args.questions is not None:
        questions += read_items("--questions", args.questions, "question")
    if args.prefix is not None or asks_alone and args.prompt_len is None:
        return Request(questions=questions, chat=chat)
    document = None if asks_alone else read_document(args)
    if document is None and args.checkpoint == "tiny" or document == "" and no_flags:
        return Request(default_document(), is_demo=True, questions=questions, chat=chat)
    if document is None or not document.strip():
        raise UserError("no text was given, or the prompt is empty; try --prompt or --prompt-file")
    return Request(document, questions=questions, chat=chat)


def check_values(args) -> None:
    """Raises UserError for values that are wrong for every model."""
    resolve(args.checkpoint)
    find_draft(args.checkpoint, getattr(args, "draft", None))
    Settings(**given(args, Settings))
    Placement(**given(args, Placement))
    Sampling(**given(args, Sampling)).rows(1)
    as_count("max_new_tokens", args.max_new_tokens, 256)
    check_logprobs(args.logprobs)
    if args.save_prefix is not None:
        check_target(args.save_prefix)  # before hours of work
    if args.prefix is not None:
        check_source(args.prefix)


def check_together(args, asks_alone: bool) -> None:
    """Raises UserError for flags that do not go together, or that both read standard input."""
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
        raise UserError("a document and its questions cannot both come from standard input; name the document's file")
    if args.save_prefix is not None and asks_alone and args.prompt_len is None:
        raise UserError("--save-prefix needs a document; add --prompt-file, or save the conversation with /save")
    if args.interactive and (sys.stdin is None or int(os.environ.get("WORLD_SIZE", 1)) > 1):
        raise UserError("--interactive needs standard input: it is closed, or several ranks share it; use --questions")


def default_document() -> str:
    """A long English text that every Python carries: the language reference."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def read_document(args) -> str | None:
    """The text of --prompt, of --prompt-file, or of a pipe or file behind standard input; None where there is none."""
    if args.prompt is not None:
        return args.prompt
    if args.prompt_file is None:
        if not _is_piped():
            return None
        say("reading the prompt from standard input ...")
    return read_file("--prompt-file", args.prompt_file or "-")


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
        say(f"{flag} {path} is not UTF-8: {bad:,} characters are read as {REPLACEMENT}; convert it with iconv")
    return io.StringIO(text, newline=None).read()


def from_json(text: str | bytes):
    """The value of a text of JSON; None where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_items(flag: str, path: str, main: str) -> list[dict]:
    """The items of a file, one a line: objects in JSON, or strings, which stand for their field `main`. A line of
    questions may be plain text. Each object gets the "name" that it has in errors."""
    text = read_file(flag, path).rstrip()
    if isinstance(whole := from_json(text), list) or isinstance(whole, dict) and "\n" in text.strip():
        raise UserError(f"{flag} {path} is one {type(whole).__name__} of JSON; write each {main} on a line of its own")
    items = [as_item(line.strip(), main, f"line {number} of {flag} {path}")
             for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not items:
        raise UserError(f"{flag} {path} holds no {main}; write one a line")
    return items


def as_item(line: str, main: str, name: str) -> dict:
    """See `read_items`."""
    value, known = from_json(line), FIELDS[main]
    if main == "question" and not isinstance(value, (str, dict)) and not line.startswith('{"'):
        value = line
    fields = value if isinstance(value, dict) else {main: value}
    if unknown := [field for field in fields if field not in known]:
        raise UserError(f"{name} has the field {unknown[0]!r}, and there are {', '.join(known)}; mend it, or drop it")
    item = {**{field: one for field, one in fields.items() if one is not None}, "name": name}
    text, question = item.get("prompt"), item.get("question", "" if main == "prompt" else None)
    if main == "prompt" and is_messages(item.get("messages")) == (isinstance(text, str) and text != ""):
        raise UserError(f'{name} holds no prompt, or two; write "...", {{"prompt": "..."}} or {{"messages": [...]}}')
    if not isinstance(question, str) or main == "question" and not question.strip():
        raise UserError(f'{name} holds no question; write each as text, or as {{"question": "...", "seed": 1}}')
    seed = item.get("seed", 0)
    if not is_whole(seed) or not 0 <= seed < 2**63:
        raise UserError(f"{name}: seed ({seed!r}) must be a whole number from 0, below 2**63; try 1")
    return item
