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

from .config import Placement, Sampling, Settings, check_logprobs, check_max_new_tokens, is_whole, names_of, whole
from .errors import UserError
from .free_memory import check_answers
from .hf.folders import find_draft, resolve
from .hf.tokenizer import is_messages
from .prefix_path import check_source, check_target

DEFAULT_PROMPT_LEN = 16_384
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def given(args, *classes: type) -> dict:
    """The fields of these classes for which a flag was given."""
    return {name: getattr(args, name) for name in names_of(*classes) if hasattr(args, name)}


@dataclass(frozen=True)
class Request:
    """What a command line asks for, read and checked before a model is loaded."""

    document: str | None = None  # the text to continue
    is_demo: bool = False  # nobody gave one
    prompts: list[dict] | None = None  # of --prompts, instead: prompt or messages, question, seed
    questions: tuple[dict, ...] = ()  # of --questions
    chat: dict = dataclasses.field(default_factory=dict)  # of --chat-template and -kwargs, as `encode_prompt` has them


def read_request(args, no_flags: bool = False) -> Request:
    """Reads the files and standard input that the flags name.

    Args:
        no_flags: were given. A pipe that brings nothing, as schedulers leave them, is then no mistake.

    Raises:
        UserError: a file cannot be read, a text is empty, a value is out of range, flags do not go together.
    """
    check_values(args)
    check_together(args)
    if about_a_document(args):
        check_about(args, int(os.environ.get("WORLD_SIZE", 1)))
    alone, chat = asks_alone(args), read_chat(args)
    questions = tuple(questions_of(args))
    if args.prefix or alone and args.prompt_len is None:
        if not args.prefix and _is_piped():
            print("note: standard input holds what is asked, one a line; a document comes from --prompt-file",
                  file=sys.stderr)
        return Request(questions=questions, chat=chat)
    if args.prompts is not None:
        return Request(prompts=read_prompts(args.prompts), chat=chat)
    document = None if alone else read_document(args)
    is_piped = args.prompt is None and args.prompt_file is None
    if document == "" and is_piped and no_flags:
        document = None
    refuse((
        (document == "" and is_piped, "standard input is empty; did the command before the pipe fail? Give a text with "
         "--prompt or --prompt-file"),
        (document is None and args.checkpoint != "tiny",
         "there is no prompt; give a text with --prompt or --prompt-file, or pipe one in"),
        (document is not None and not document.strip(),
         "the prompt is empty; give some text with --prompt or --prompt-file")))
    return Request(document or default_document(), is_demo=document is None, questions=questions, chat=chat)


def refuse(rules: Iterable[tuple[object, str]]) -> None:
    """Raises UserError with the text of the first rule that is broken. rules: (is it broken?, text)."""
    for is_broken, text in rules:
        if is_broken:
            raise UserError(text)


def check_values(args) -> None:
    """Raises UserError for the value of a flag that no model could mend."""
    for name in ("prompts", "prompt_file", "question", "questions", "prefix", "save_prefix", "system", "chat_template",
                 "chat_template_kwargs"):
        value = getattr(args, name)
        if value == "" or name == "question" and value is not None and not value.strip():
            raise UserError(f"--{name.replace('_', '-')} is empty; give a value, or drop the flag")
    resolve(args.checkpoint)
    find_draft(args.checkpoint, getattr(args, "draft", None))
    Settings(**given(args, Settings))
    Placement(**given(args, Placement))
    Sampling(**given(args, Sampling)).columns(1)
    check_max_new_tokens(args.max_new_tokens)
    check_logprobs(args.logprobs)
    for name, usual in (("prompt_len", DEFAULT_PROMPT_LEN), ("num_samples", 4)):
        if (value := getattr(args, name)) is not None:
            whole(1, usual)(f"--{name.replace('_', '-')}", value)


def check_together(args) -> None:
    """Raises UserError for flags that do not go together."""
    shows_json = args.json or args.prompts is not None
    refuse((
        (args.logprobs is not None and not shows_json,
         f"--logprobs ({args.logprobs}) are written as JSON only; add --json, or give --prompts"),
        (args.show_levels and shows_json,
         '--show-levels colours a text, and --json and --prompts print none: they have "levels"; drop one of them'),
        (args.save_every is not None and not args.save_prefix,
         f"--save-every ({args.save_every}) says how often a file is written; name it with --save-prefix"),
        (args.prompt is not None and args.prompt_file is not None,
         "--prompt and --prompt-file were both given; give one"),
        (args.prompts is not None and (args.prompt is not None or args.prompt_file is not None or args.compare),
         "--prompts goes with neither --prompt, --prompt-file nor --compare; drop one of them")))


def asks_alone(args) -> bool:
    """Whether the flags ask for a conversation that is about no text: standard input holds what is asked."""
    return args.interactive and args.prompt is None and args.prompt_file is None


def read_chat(args) -> dict:
    """The chat template, and what it reads besides messages, where they are given."""
    chats = args.chat or args.system or asks_alone(args) or args.prefix or args.prompts is not None
    if args.prefix and args.chat_template is not None:
        raise UserError("--prefix opens a document with the template that it was made with; drop --chat-template")
    if not chats and (flag := first_given(args, "chat_template", "chat_template_kwargs")):
        raise UserError(f"{flag} was given without --chat; add --chat")
    chat = {}
    if args.chat_template is not None:
        chat["chat_template"] = read_file("--chat-template", args.chat_template)
    if args.chat_template_kwargs is not None:
        try:
            chat["chat_template_kwargs"] = json.loads(args.chat_template_kwargs)
        except (ValueError, RecursionError):
            chat["chat_template_kwargs"] = None
        if not isinstance(chat["chat_template_kwargs"], dict):
            raise UserError(f"--chat-template-kwargs ({args.chat_template_kwargs}) is not an object in JSON; try "
                            "'{\"enable_thinking\": false}'")
    return chat


def about_a_document(args) -> bool:
    """Whether the flags ask for more than one answer about a document, or for its file."""
    return bool(args.questions or args.interactive or args.prefix or args.save_prefix or args.num_samples is not None
                or args.system)


def first_given(args, *names: str) -> str | None:
    """The first of these flags that was given."""
    given = (name for name in names if getattr(args, name) is not None and getattr(args, name) is not False)
    return next((f"--{name.replace('_', '-')}" for name in given), None)


def check_about(args, ranks: int) -> None:
    """Raises UserError for flags of such a document that do not go together."""
    other = first_given(args, "prompts", "compare", "show_levels")
    if other is not None:
        flag = first_given(args, "questions", "interactive", "num_samples", "system", "prefix", "save_prefix")
        raise UserError(f"{flag} does not go with {other}; drop one of them")
    flag = first_given(args, "interactive", "prefix", "save_prefix")  # what will be asked is not known
    remedy = "drop one of them" if args.prefix else "cut the document with --prompt-len"
    refuse(((args.keep is not None and flag is not None, f"{flag} does not go with --keep; {remedy}"),))
    if args.save_prefix:
        check_target(args.save_prefix)  # before hours of work
    about_nothing = asks_alone(args) and args.prefix is args.prompt_len is None
    refuse((
        (args.prefix and (args.prompt is not None or args.prompt_file is not None or args.system),
         "--prefix opens a document that was saved, with its messages; drop --prompt, --prompt-file and --system"),
        (args.prefix and args.prompt_len is not None, f"--prompt-len ({args.prompt_len}) cuts a text, and --prefix "
         "opens a document that was computed whole; drop one of them"),
        (args.interactive and (args.questions or args.question or args.num_samples or args.json), "--interactive asks "
         "for the questions itself; drop --questions, --question, --num-samples and --json"),
        (args.questions == "-" and args.prompt is args.prefix is None and args.prompt_file in (None, "-"),
         "--questions - reads standard input; name the document's file with --prompt-file or --prefix"),
        (args.interactive and sys.stdin is None,
         "--interactive reads standard input, and that is closed; use --question or --questions"),
        (args.interactive and args.prompt_file == "-" and not sys.stdin.isatty(),
         "--prompt-file - and --interactive both read standard input; name a file for the document"),
        (about_nothing and args.save_prefix, f"--save-prefix {args.save_prefix} saves a document, and --interactive "
         "has none; give one with --prompt-file, or save the conversation with /save")))
    if args.prefix:
        check_source(args.prefix)
    if args.interactive and ranks > 1:
        raise UserError(f"--interactive runs in one process, and torchrun started {ranks}; use --questions")
    if args.num_samples is not None:
        check_answers(args.num_samples, args.max_new_tokens)


def default_document() -> str:
    """A long English text that every Python carries: the language reference."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def read_document(args) -> str | None:
    """The text of --prompt, of --prompt-file, or of a pipe or file behind standard input; None where there is none."""
    if args.prompt is not None:
        return args.prompt
    if args.prompt_file == "-":
        return _read_stdin("--prompt-file")
    if args.prompt_file is not None:
        return read_file("--prompt-file", args.prompt_file)
    if not _is_piped():
        return None
    print("reading the prompt from standard input ...", file=sys.stderr)
    return _read_stdin("--prompt-file")


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file, rather than a terminal, nothing or /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _read_stdin(flag: str) -> str:
    if sys.stdin is None:
        raise UserError(f"{flag} - reads standard input, and that is closed; name a file")
    return decoded("standard input", sys.stdin.buffer.read())


def read_file(flag: str, path: str) -> str:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {flag} {path}: {error.strerror}") from None
    return decoded(f"{flag} {path}", data)


def decoded(what: str, data: bytes) -> str:
    """A text, with line ends as Python reads them. Says so if it is not UTF-8."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        text = data.decode("utf-8-sig", errors="replace")
        print(f"{what} is not UTF-8 from byte {error.start:,} on: {text.count(REPLACEMENT):,} characters are read as "
              f"{REPLACEMENT}; convert it with iconv", file=sys.stderr)
    return io.StringIO(text, newline=None).read()


def read_prompts(path: str) -> list[dict]:
    """The prompts of a file of JSON lines: {"prompt" or "messages", "question", "seed"}, each with the number of its
    "line"."""
    prompts = {}
    for number, line in enumerate(read_file("--prompts", path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"line {number} of --prompts {path} is not JSON; write each prompt as a JSON string, or as "
                            '{"prompt": "..."}') from None
        item = item if isinstance(item, dict) else {"prompt": item}
        item = {name: value for name, value in item.items() if value is not None}
        text, messages = item.get("prompt"), item.get("messages")
        if text is not None and messages is not None:
            raise UserError(f"line {number} of --prompts {path} has a \"prompt\" and \"messages\"; drop one of them")
        if not is_messages(messages) and (not isinstance(text, str) or not text):
            raise UserError(f"line {number} of --prompts {path} holds no prompt; write each as a JSON string, or as "
                            '{"prompt": "..."} or {"messages": [...]}')
        if not isinstance(item.get("question", ""), str) or not is_whole(item.get("seed", 0)):
            raise UserError(f"line {number} of --prompts {path}: a question must be a text, and a seed a whole number")
        prompts[number] = item
    if not prompts:
        raise UserError(f"--prompts {path} holds no prompt; write one a line")
    note_unread(prompts.values(), {"prompt", "messages", "question", "seed"}, f"--prompts {path}")
    return [{**item, "line": number} for number, item in prompts.items()]


def note_unread(items: Iterable[dict], known: set[str], what: str) -> None:
    """Says which fields of a file's objects nothing reads: one of them may be misspelt."""
    unread = sorted({name for item in items for name in item} - known)
    if unread:
        print(f"note: {what} has fields that are not read: {', '.join(unread)}; those that are: "
              f"{', '.join(sorted(known))}", file=sys.stderr)


def questions_of(args) -> list[dict]:
    """Those of --questions, if it was given."""
    if not args.questions:
        return []
    text = _read_stdin("--questions") if args.questions == "-" else read_file("--questions", args.questions)
    return read_questions(text, args.questions)


def read_questions(text: str, path: str) -> list[dict]:
    """Questions of a file: one a line, or lines of JSON, or one JSON list; of strings, or of objects with a "question"
    and perhaps a "seed"."""
    try:
        found = json.loads(text)
        if not isinstance(found, (list, dict, str)):
            raise ValueError  # a line of text that happens to be a number
        items = found if isinstance(found, list) else [found]
    except (ValueError, RecursionError) as error:
        if re.match(r'\[\s*["{\]]', text.strip()) and text.strip()[-1] == "]":
            raise UserError(f"--questions {path} looks like a list in JSON, and is none: {error}; correct it, or write "
                            "one question a line") from None
        items = []
        for line in filter(str.strip, text.split("\n")):
            try:
                items.append(json.loads(line) if line.lstrip()[:1] in '{"' else line.strip())
            except ValueError:
                items.append(line.strip())
    questions = [item if isinstance(item, dict) else {"question": item} for item in items]
    for number, item in enumerate(questions, 1):
        if not isinstance(item.get("question"), str) or not item["question"].strip():
            what = "is empty" if isinstance(item.get("question"), str) else "is no text"
            raise UserError(f"question {number} of --questions {path} {what}; write one a line, or "
                            '{"question": "...", "seed": 1}')
        if not is_whole(item.get("seed", 0)):
            raise UserError(f"the seed of question {number} of --questions {path} must be a whole number")
    if not questions:
        raise UserError(f"--questions {path} holds no question; write one a line")
    note_unread(questions, {"question", "seed"}, f"--questions {path}")
    return questions
