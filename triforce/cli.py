"""The command line: `python generate.py`, `python -m triforce`, `triforce`. Text goes to stdout, all else to stderr.

Knows nothing of tensors: it reads flags and files, calls the engine, and prints.
"""

import argparse
import dataclasses
import importlib
import io
import json
import logging
import os
import stat
import sys
import textwrap
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

from . import about
from .config import Placement, Sampling, Settings, check_max_new_tokens, names_of, whole
from .errors import UserError, not_known
from .hf.checkpoint import resolve
from .hf.tokenizer import Tokenizer
from .keep import WAYS, fit
from .loading import find_draft, load
from .logprobs import check_logprobs
from .prefix import first_difference, is_messages
from .progress import Bar
from .show import as_ansi, legend

DEFAULT_PROMPT_LEN = 16_384
LONG_DOCUMENT = 200_000  # characters
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CHECKED_TOKENS = 64  # of the greedy comparison
ALIASES = {"--prefill": "--prompt-len", "--temp": "--temperature", "--gen-len": "--max-new-tokens",
           "--target": "--checkpoint", "--on-chip": "--num-resident-layers"}


# `triforce download ...`; without one of them, it generates.
COMMANDS = {"download": "hf.download", "convert": "hf.convert", "plan": "kit.plan", "check": "kit.check"}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage of all flags."""

    def error(self, message: str):
        raise UserError(f"{message}; {self.prog} --help lists all flags")


class Paragraphs(argparse.HelpFormatter):
    """Wraps paragraphs to the terminal's width; those that are indented stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(part if part.startswith(" ") else fill(part, width, indent) for part in text.split("\n\n"))


def parser() -> Parser:
    from . import __version__

    p = Parser(
        prog="triforce", description="Continue a long text with a language model, losslessly and several times faster.",
        epilog="With no flags: the embedded tiny pair on 16,384 tokens of CPython's language reference, compared with "
               "autoregression. Flags may be spelt with underscores. `triforce download` and `triforce convert` "
               "fetch and convert checkpoints, `triforce plan` says what fits, `triforce check` whether all is well.")
    p.add_argument("--version", action="version", version=f"triforce {__version__}")
    prompt = p.add_argument_group("prompt")
    prompt.add_argument("--prompt", help="the text to continue")
    prompt.add_argument("--prompt-file", help="read the text from a file; with no flag for it, it is read from a pipe")
    prompt.add_argument("--prompts", help="a file of prompts, one a line: JSON strings, or objects with a \"prompt\" "
                        "or \"messages\", and perhaps a \"question\" and a \"seed\"; answers are lines of JSON")
    prompt.add_argument("--batch-size", type=int, default=8,
                        help="so many of --prompts are computed side by side (default 8)")
    prompt.add_argument("--prompt-len", type=int, help="keep the first N tokens (alias --prefill)")
    prompt.add_argument("--keep", choices=WAYS, help="of a text that is too long for the model or --max-seq-len, keep "
                        "the start, the end, or half of both; question and template stay (default: an error)")
    prompt.add_argument("--question", help="asked after the (cut) document")
    prompt.add_argument("--questions", metavar="FILE", help="questions about the document, one a line or as JSON, "
                        "answered side by side")
    prompt.add_argument("--num-samples", type=int, metavar="N",
                        help="number of answers, with the seeds seed, seed + 1, ...")
    prompt.add_argument("--interactive", action="store_true",
                        help="a conversation, about the document if there is one")
    prompt.add_argument("--system", help="a system message before the document")
    prompt.add_argument("--save-prefix", metavar="FILE", help="save the document with its keys and values")
    prompt.add_argument("--save-every", metavar="N", type=int, help="with --save-prefix: save after every N tokens, "
                        "too; the same command continues an interrupted run")
    prompt.add_argument("--prefix", metavar="FILE", help="open a saved document, instead of a prompt")
    prompt.add_argument("--chat", action="store_true", help="send the prompt as a user's message")
    prompt.add_argument("--chat-template", help="Jinja file in place of the checkpoint's chat template")
    prompt.add_argument("--chat-template-kwargs", metavar="JSON", help="what the template reads besides the messages: "
                        "'{\"enable_thinking\": false}' has Qwen3 answer at once")
    text = p.add_argument_group("generation")
    text.add_argument("--max-new-tokens", type=int, default=256, help="(alias --gen-len; default 256)")
    add_flags(text, Sampling)
    text.add_argument("--stop", action="append", help="end before this string; may be repeated")
    text.add_argument("--stop-token-ids", nargs="+", type=int, metavar="ID",
                      help="end after one of these tokens, as after an end-of-text token")
    text.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-text token")
    model = p.add_argument_group("model")
    model.add_argument("--checkpoint", default="tiny", help="Hugging Face folder, repository id, or 'tiny' (default)")
    add_flags(model, Placement)
    drafting = p.add_argument_group("speculation")
    add_flags(drafting, Settings)
    drafting.add_argument("--no-speculation", action="store_true", help="the same steps, one token at a time")
    drafting.add_argument("--compare", action=argparse.BooleanOptionalAction,
                          help="compare with autoregression: speed and 64 greedy tokens; with --sampling coupled 64 "
                          "drawn ones, too (default: only without flags)")
    text.add_argument("--show-levels", action="store_true", help="on a terminal: colour the text by the level that "
                      "proposed it (elsewhere with FORCE_COLOR=1)")
    text.add_argument("--logprobs", type=int, metavar="K", help="with --json or --prompts: log-probabilities of each "
                      "token, and of the K most probable ones in its place")
    p.add_argument("--json", action="store_true", help="print JSON instead of the text: an object for each answer")
    return p


def add_flags(group, options: type) -> None:
    """A flag for each field that has one. A flag that is not given leaves no trace: the field's default holds."""
    for field in dataclasses.fields(options):
        about = field.metadata
        if about["flag"] is not None:
            flag = about["flag"] or "--" + field.name.replace("_", "-")
            group.add_argument(flag, dest=field.name, default=argparse.SUPPRESS, help=about["help"].replace("%", "%%"),
                               **about["argparse"])


def given(args, *classes: type) -> dict:
    """The fields of these classes for which a flag was given."""
    return {name: getattr(args, name) for name in names_of(*classes) if hasattr(args, name)}


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags that generate. Raises UserError for what is none."""
    flags = parser()
    known = {option for action in flags._actions for option in action.option_strings}
    args, unknown = flags.parse_known_args([_spell(argument, known) for argument in argv])
    if unknown:
        name = unknown[0].partition("=")[0]
        raise UserError(not_known(name, "flag", known | ALIASES.keys(), "triforce --help lists all")
                        if name.startswith("-") else
                        f"{unknown[0]!r} belongs to no flag; put quotes around a text with spaces (--prompt \"...\")")
    if getattr(args, "draft", None) == "none":
        args.draft = False
    for name, value, usual in (("--batch-size", args.batch_size, 8), ("--save-every", args.save_every, 65_536)):
        if value is not None:
            whole(1, usual)(name, value)
    return args


def _spell(argument: str, known) -> str:
    """--prompt_len=3 -> --prompt-len=3, and the reference implementations' names."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    spelt = name.replace("_", "-")
    spelt = ALIASES.get(spelt, spelt)
    return spelt + equals + value if spelt in known else argument  # else it is a text that begins so


@dataclass(frozen=True)
class Request:
    """What a command line asks for, read and checked before a model is loaded."""

    document: str | None = None  # the text to continue
    is_demo: bool = False  # nobody gave one
    prompts: list[dict] | None = None  # of --prompts, instead: prompt or messages, question, seed
    questions: tuple[dict, ...] = ()  # of --questions
    chat: dict = dataclasses.field(default_factory=dict)  # of --chat-template and -kwargs, as `encode_prompt` has them
    ids: Future | None = None  # of a long document, see `encode_beside`


def read_request(args, no_flags: bool = False) -> Request:
    """Reads the files and standard input that the flags name.

    Args:
        no_flags: were given. A pipe that brings nothing, as schedulers leave them, is then no mistake.

    Raises:
        UserError: a file cannot be read, a text is empty, a value is out of range, flags do not go together.
    """
    resolve(args.checkpoint)
    find_draft(args.checkpoint, getattr(args, "draft", None))
    Settings(**given(args, Settings))
    Placement(**given(args, Placement))
    Sampling(**given(args, Sampling)).columns(1)
    check_max_new_tokens(args.max_new_tokens)
    if args.logprobs is not None and not args.json and args.prompts is None:
        raise UserError(f"--logprobs ({args.logprobs}) has no place in a text; add --json, or give --prompts")
    check_logprobs(args.logprobs)
    if args.show_levels and (args.json or args.prompts is not None):
        raise UserError("--show-levels colours a text, and --json and --prompts print none: they have \"levels\"; drop "
                        "one of them")
    if args.prompt_len is not None and args.prompt_len < 1:
        raise UserError(f"--prompt-len ({args.prompt_len}) must be at least 1; try {DEFAULT_PROMPT_LEN}")
    chat = read_chat(args)
    questions: list[dict] = []
    if args.save_every is not None and not args.save_prefix:
        raise UserError(f"--save-every ({args.save_every}) says how often a file is written; name it with "
                        "--save-prefix")
    asks_alone = args.interactive and args.prompt is None and args.prompt_file is None  # questions come from stdin
    if about.wanted(args):
        about.check(args, int(os.environ.get("WORLD_SIZE", 1)))
        if args.questions:
            questions = about.read_questions(read_file("--questions", args.questions), args.questions)
        if args.prefix or asks_alone and args.prompt_len is None:
            return Request(questions=tuple(questions), chat=chat)
    if args.prompts is not None:
        if args.prompt is not None or args.prompt_file is not None or args.compare:
            raise UserError("--prompts goes with neither --prompt, --prompt-file nor --compare; drop one of them")
        return Request(prompts=read_prompts(args.prompts), chat=chat)
    document = None if asks_alone else read_document(args)
    if document == "" and args.prompt is None and args.prompt_file is None:
        if not no_flags:
            raise UserError("standard input is empty; did the command before the pipe fail? Give a text with --prompt "
                            "or --prompt-file")
        document = None
    if document is None and args.checkpoint != "tiny":
        raise UserError("there is no prompt; give a text with --prompt or --prompt-file, or pipe one in")
    if document is not None and not document.strip():
        raise UserError("the prompt is empty; give some text with --prompt or --prompt-file")
    return Request(document or default_document(), is_demo=document is None, questions=tuple(questions),
                   chat=chat)


def read_chat(args) -> dict:
    """The chat template, and what it reads besides messages, where they are given."""
    chats, chat = args.chat or args.system or args.interactive or args.prompts is not None, {}
    for flag, value in (("--chat-template", args.chat_template), ("--chat-template-kwargs", args.chat_template_kwargs)):
        if value is not None and not chats:
            raise UserError(f"{flag} was given without --chat; add --chat")
    if args.chat_template is not None:
        chat["chat_template"] = read_file("--chat-template", args.chat_template)
    if args.chat_template_kwargs is not None:
        try:
            chat["chat_template_kwargs"] = json.loads(args.chat_template_kwargs)
        except ValueError:
            chat["chat_template_kwargs"] = None
        if not isinstance(chat["chat_template_kwargs"], dict):
            raise UserError(f"--chat-template-kwargs ({args.chat_template_kwargs}) is not an object in JSON; try "
                            "'{\"enable_thinking\": false}'")
    return chat


def default_document() -> str:
    """A long English text that every Python carries: the language reference."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def read_document(args) -> str | None:
    """The text of --prompt, of --prompt-file, or of a pipe or file behind standard input; None where there is none."""
    if args.prompt is not None and args.prompt_file is not None:
        raise UserError("--prompt and --prompt-file were both given; give one")
    if args.prompt is not None:
        return args.prompt
    if args.prompt_file == "-":
        if sys.stdin is None:
            raise UserError("--prompt-file - reads standard input, and that is closed; name a file")
        return _read_stdin()
    if args.prompt_file is not None:
        return read_file("--prompt-file", args.prompt_file)
    if not _is_piped():
        return None
    print("reading the prompt from standard input ...", file=sys.stderr)
    return _read_stdin()


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file, rather than a terminal, nothing or /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _read_stdin() -> str:
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
    """The prompts of a file of JSON lines: {"prompt" or "messages", "question", "seed"}."""
    prompts = []
    for number, line in enumerate(read_file("--prompts", path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"line {number} of --prompts {path} is not JSON; write each prompt as a JSON string, or as "
                            '{"prompt": "..."}') from None
        item = item if isinstance(item, dict) else {"prompt": item}
        text, messages = item.get("prompt"), item.get("messages")
        if not is_messages(messages) and (not isinstance(text, str) or not text):
            raise UserError(f"line {number} of --prompts {path} holds no prompt; write each as a JSON string, or as "
                            '{"prompt": "..."} or {"messages": [...]}')
        if not isinstance(item.get("question", ""), str) or not isinstance(item.get("seed", 0), int):
            raise UserError(f"line {number} of --prompts {path}: a question must be a text, and a seed a whole number")
        prompts.append(item)
    if not prompts:
        raise UserError(f"--prompts {path} holds no prompt; write one a line")
    return prompts


def first_tokens(args, tokenizer, text: str, request: Request) -> list[int]:
    """A text's ids, cut to --prompt-len tokens."""
    ids = tokenizer.encode(text) if request.ids is None else request.ids.result()
    length = DEFAULT_PROMPT_LEN if request.is_demo and args.prompt_len is None else args.prompt_len
    if length is not None and length > len(ids):
        print(f"note: the prompt has {len(ids):,} tokens, fewer than --prompt-len {length:,}", file=sys.stderr)
    return ids[:length]


def encode_beside(args, request: Request) -> Request:
    """Begins to encode a long document, beside the weights that are read next: a million characters take a second."""
    if request.document is None or len(request.document) < LONG_DOCUMENT:
        return request
    folder, ids = resolve(args.checkpoint), Future()

    def encode() -> None:
        try:
            ids.set_result(Tokenizer(folder).encode(request.document))
        except BaseException as error:
            ids.set_exception(error)

    threading.Thread(target=encode, daemon=True).start()  # who has made a mistake does not wait for it
    return dataclasses.replace(request, ids=ids)


def encode(args, engine, text: str, request: Request, question: str | None) -> tuple[list[int], int]:
    """A prompt's ids: the text, cut to --prompt-len tokens, then the question; or both as a user's message.

    Returns:
        ids, and how many of the text's tokens were dropped to make it fit, by --keep.
    """
    tokenizer = engine.tokenizer
    ids = first_tokens(args, tokenizer, text, request)

    def finish(ids: list[int]) -> list[int]:
        if args.chat:
            content = tokenizer.decode(ids) + (f"\n\n{question}" if question else "")
            return engine.encode_prompt([{"role": "user", "content": content}], **request.chat)
        return ids + tokenizer.encode(f"\n\n{question}\n", bos=False) if question else ids

    if args.keep is None:
        return finish(ids), 0
    room = engine.room(args.max_new_tokens)
    made, dropped = fit(ids, finish, room, args.keep, tokenizer.bos_id)
    if dropped:
        kept = "start and end are" if args.keep == "both" else f"{args.keep} is"
        note = (f"note: {dropped:,} of the text's {len(ids):,} tokens were dropped, so that prompt and output fit; its "
                f"{kept} kept (--keep {args.keep})")
        print(textwrap.fill(note, 78, subsequent_indent="  "), file=sys.stderr)
    return made, dropped


def load_engine(args, group):
    return load(args.checkpoint, group=group, max_batch_size=args.batch_size, **given(args, Settings, Placement))


def stream_text(engine, ids, args, sampling):
    """Generates, printing text as it comes unless --json. Returns the Generation; after Ctrl-C, what there is of it."""
    stream = engine.stream(ids, speculate=not args.no_speculation, stop=args.stop, on_prefill=Bar("prefill", len(ids)),
                           ignore_eos=args.ignore_eos, **sampling)
    shown, coloured = "", args.show_levels and wants_colours(sys.stdout)
    if args.show_levels:
        print(f"{legend(wants_colours(sys.stderr))}\n" if coloured else "note: --show-levels colours a text on a "
              "terminal, and standard output\n  is none; FORCE_COLOR=1 colours it nevertheless\n", file=sys.stderr)
    try:
        for shown in stream:
            if not args.json:
                sys.stdout.write(as_ansi(stream.spans) if coloured else shown)
                sys.stdout.flush()
    except KeyboardInterrupt:
        if stream.result is None or not stream.result.tokens:
            raise
    finally:
        stream.close()
        if shown and not args.json:
            sys.stdout.write("\n")
            sys.stdout.flush()
    if args.show_levels:
        print("\n" + legend(coloured and wants_colours(sys.stderr), stream.result.levels), file=sys.stderr)
    return stream.result


def wants_colours(file) -> bool:
    """Whether a file is a terminal, or colours are wanted wherever they go (FORCE_COLOR)."""
    return file.isatty() or bool(os.environ.get("FORCE_COLOR"))


def answer_prompts(engine, request: Request, args, sampling) -> int:
    """--prompts: a line of JSON for each, in their order, as soon as its batch is done."""
    prompts, dropped = [], []
    for index, item in enumerate(request.prompts):  # all of them, before hours of work
        try:
            if "messages" in item:
                ids, count = engine.encode_prompt(item["messages"], **request.chat), 0
            else:
                ids, count = encode(args, engine, item["prompt"], request, item.get("question", args.question))
            prompts.append(engine.encode_prompt(ids))
            dropped.append(count)
            engine.check_len(len(prompts[-1]), args.max_new_tokens)
        except UserError as error:
            raise UserError(f"prompt {index} of --prompts {args.prompts}: {error}") from None
    print(f"{args.checkpoint} on {engine.device}, {engine.target.dtype_name}: {len(prompts):,} prompts, "
          f"{sum(map(len, prompts)):,} tokens, {min(args.batch_size, len(prompts))} side by side", file=sys.stderr)
    begun, tokens, own = time.perf_counter(), 0, None
    if any(item.get("seed") is not None for item in request.prompts):
        own = about.seeds_of(request.prompts, sampling.get("seed"), engine.target.group)
        Sampling(seed=own).columns(len(own))
    for first in range(0, len(prompts), args.batch_size):
        ids = prompts[first : first + args.batch_size]
        seeds = {"seed": sampling["seed"] + first} if "seed" in sampling else {}
        if own is not None:
            seeds = {"seed": own[first : first + args.batch_size]}
        prefill, decode = Bar("prefill", sum(map(len, ids))), Bar("decode", args.max_new_tokens * len(ids))
        try:
            results = engine.generate(ids, speculate=not args.no_speculation, stop=args.stop,
                                      ignore_eos=args.ignore_eos, on_prefill=prefill,
                                      on_decode=decode.count, **{**sampling, **seeds})
        finally:
            prefill.close()
            decode.close()
        for index, result in enumerate(results, first):
            result.stats.dropped_tokens = dropped[index]
            print(json.dumps({"index": index, **asdict(result)}), flush=True)
            tokens += len(result.tokens)
        speed = tokens / (time.perf_counter() - begun)
        print(f"{first + len(ids)} of {len(prompts)} prompts, {tokens:,} new tokens, {speed:.1f} a second, prefill "
              "included", file=sys.stderr)
    return 0


def compare(engine, ids, args, sampling, result) -> tuple[list[str], dict]:
    """The same prompt by the fastest autoregression, and tokens with and without speculation: greedy ones, and where
    levels share their draws, drawn ones."""
    seeded = {**sampling, "seed": result.stats.seed}
    plain = engine.generate(ids, speculate=False, one_row=True, ignore_eos=args.ignore_eos, stop=args.stop, **seeded)
    plain.stats.dropped_tokens = result.stats.dropped_tokens
    checks = {"greedy": {"temperature": 0.0}}
    if engine.settings.coupled:
        checks["drawn"] = seeded
    speedup = plain.stats.tbt / result.stats.tbt if result.stats.tbt else 0.0
    # As if it had been run alone: it took over the other's start and prefill.
    wall = result.stats.load + result.stats.prefill + plain.stats.ttft - plain.stats.prefill + plain.stats.decode
    over_all = wall / result.stats.wall
    lines = [f"{'':<26}{'no speculation' if args.no_speculation else 'speculation':>16}{'autoregression':>18}"]
    for (name, value), (_, other) in zip(_columns(result.stats), _columns(plain.stats), strict=True):
        if name in ("start and load", "prefill", "time to first token"):
            other = "-"  # it took over the other's prefill
        lines.append(f"{name:<26}{value:>16}{other:>18}")
    lines.append(f"{'speed-up per token':<26}{f'{speedup:.2f}x' if speedup else '-':>16}")
    lines.append(f"{'speed-up of the whole run':<26}{f'{over_all:.2f}x':>16}")
    report = {"autoregression": asdict(plain.stats), "speedup": speedup, "speedup_of_run": over_all}
    for name, law in checks.items():
        law = {**law, "max_new_tokens": min(CHECKED_TOKENS, args.max_new_tokens), "ignore_eos": True}
        on, off = (engine.generate(ids, speculate=speculate, **law).tokens for speculate in (True, False))
        differ = first_difference(on, off)
        verdict = "identical" if differ is None else f"DIFFERENT from token {differ} on"
        lines.append(f"{name} check, {len(on)} tokens, speculation on and off: {verdict}")
        report |= {f"{name}_tokens": len(on), f"{name}_first_difference": differ}
    return lines, report


def _columns(stats) -> list[tuple[str, str]]:
    """The statistics, with a row for each level whether it was used or not, so that two columns line up."""
    rates = {f"acceptance at {level}": "-" for level in ("retrieval", "full")}
    rows = dict(stats.rows())
    names = [name for name in rows if not name.startswith(("acceptance", "  shared", "  held"))]
    at = names.index("tokens per target forward")
    names[at:at] = [name for name in rates]
    return [(name, rows.get(name, "-")) for name in names]


def run(argv: list[str]) -> int:
    from .parallel import from_environment, leave, read_first

    args = parse(argv)
    logging.getLogger("triforce").setLevel(logging.INFO)  # says where an offloaded cache lies
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    group, args.device = from_environment(getattr(args, "device", None))
    if group is not None and group.rank > 0:  # the others compute and say nothing
        sys.stdout = sys.stderr = open(os.devnull, "w")
        logging.disable()
    try:
        request = read_first(group, lambda: read_request(args, not argv))
        status = answer(args, group, request, wants_comparison=args.compare if args.compare is not None else not argv)
    except Exception:
        if group is not None:
            sys.stderr = sys.__stderr__  # a rank that fails alone has to say why
        raise
    leave()
    return status


def answer(args, group, request: Request, wants_comparison: bool) -> int:
    request = encode_beside(args, request)
    engine = load_engine(args, group)
    sampling = {"max_new_tokens": args.max_new_tokens, **given(args, Sampling), **wishes(args)}
    if request.prompts is not None:
        return answer_prompts(engine, request, args, sampling)
    if about.wanted(args):
        text = request.document
        ids = None if text is None else first_tokens(args, engine.tokenizer, text, request)
        check_before_prefill(engine, args, ids, list(request.questions), sampling)
        book = about.document_of(engine, args, ids, request.chat)
        return about.answer(engine, args, book, list(request.questions), request.chat, sampling)
    ids, dropped = encode(args, engine, request.document, request, args.question)
    engine.check_len(len(ids), args.max_new_tokens)
    introduce(engine, ids, args, request)
    load_seconds = age()
    result = stream_text(engine, ids, args, sampling)
    result.stats.load, result.stats.dropped_tokens = load_seconds, dropped
    report = {"checkpoint": args.checkpoint, **asdict(result)}
    identical = True
    interrupted = result.finish_reason == "interrupted"
    if wants_comparison and not interrupted:
        print("comparing with autoregression ...", file=sys.stderr)
        lines, report["compare"] = compare(engine, ids, args, sampling, result)
        identical = all(report["compare"].get(f"{name}_first_difference") is None for name in ("greedy", "drawn"))
        print("\n" + "\n".join(lines), file=sys.stderr)
    else:
        print(f"\n{result.stats}", file=sys.stderr)
    print("\n" + "\n".join(result.stats.NOTES), file=sys.stderr)
    if args.json:
        print(json.dumps(report), flush=True)
    if interrupted:
        raise KeyboardInterrupt
    return 0 if identical else 1


def check_before_prefill(engine, args, ids: list[int] | None, questions: list[dict], sampling: dict) -> None:
    """Raises UserError for what a generation over a document would refuse, before hours of prefill."""
    engine.stream([0], stop=args.stop, **sampling)  # checks, and computes nothing until it is iterated over
    engine.check_len(len(ids or [0]), args.max_new_tokens)
    for item in questions:
        Sampling(seed=item.get("seed")).columns(1)


def wishes(args) -> dict:
    """Further options of `Engine.generate` for which a flag was given."""
    names = ("stop_token_ids", "logprobs")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def age() -> float:
    """Seconds since this process was started."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError):  # not Linux
        return time.process_time()


def introduce(engine, ids, args, request: Request) -> None:
    """What is about to happen: the model, the prompt, and how much of it drafts are read from."""
    budget = engine.resolve_budget(len(ids))
    lines = [f"{args.checkpoint} on {engine.device}, {engine.target.dtype_name}, {len(ids):,} prompt tokens"]
    if args.checkpoint == "tiny":
        lines.append(f"(the embedded pair: a toy of {engine.num_parameters / 1e6:.1f} million parameters "
                     "that writes what it can)")
    if budget and not args.no_speculation:
        lines.append(f"drafts read {min(budget, len(ids)):,} of these tokens (--budget), every check reads all of them")
    if request.is_demo:
        end = " ".join(engine.tokenizer.decode(ids[-60:], continues=True).split())
        lines += ["The prompt is the beginning of CPython's language reference. It ends:", f"  ... {end[-140:]}"]
    print("\n".join(textwrap.fill(line, 78, subsequent_indent="  ") for line in lines) + "\n", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line. Exit status: 0; 1 if a check fails; 2 for a user's mistake; 130 for Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, "w"))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    try:
        if argv and argv[0] in COMMANDS:
            return importlib.import_module(f".{COMMANDS[argv[0]]}", __package__).main(argv[1:])
        return run(argv)
    except UserError as error:
        rank = int(os.environ.get("RANK", 0))
        if rank > 0:  # what all of them find, rank 0 says, which ends the others
            time.sleep(1)
            print(f"rank {rank}: ", end="", file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stdout = None
        return 0
    except OSError as error:  # a full disk behind a redirection
        print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
        sys.stdout = None
        return 2
