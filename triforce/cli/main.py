"""Reads the flags, prints help, runs a command, and reports mistakes.

`request.py` reads what the flags ask for. `run.py` answers it. PyTorch is imported once the flags are known to be fine.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import logging
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Iterator

from ..config import Placement, Sampling, Settings
from ..engine.keep import WAYS
from ..errors import Parser, UserError, not_known
from ..render import consoles, say
from .request import read_request

# `triforce download ...`; without one of them, it generates.
COMMANDS = {"download": "hf.download", "convert": "hf.convert", "plan": "cli.plan", "check": "cli.check",
            "eval": "evaluation", "serve": "serve"}

# Names of the reference implementations.
ALIASES = {"--prefill": "--prompt-len", "--temp": "--temperature", "--gen-len": "--max-new-tokens",
           "--target": "--checkpoint", "--on-chip": "--num-resident-layers"}

# What most people need: `--help` has the first sentence of each.
COMMON = """help help-all json prompt prompt-file prompts prompt-len keep question questions num-samples interactive
chat system save-prefix prefix cache-dir max-new-tokens temperature top-p seed stop show-levels checkpoint device
max-seq-len compile offload draft budget gamma no-speculation compare""".split()


class Help(argparse.Action):
    """Prints a screen: the flags of COMMON, a line each."""

    def __call__(self, parser, *_) -> None:
        known = parser._option_string_actions
        print(f"usage: {parser.usage}\n\n{parser.description}\n")
        for name in COMMON:
            about = re.split(r"[.;] ", known[f"--{name}"].help)[0]
            print(f"  --{name:<16}", textwrap.shorten(about, 58, placeholder=" ..."))
        print("\n" + textwrap.fill(parser.epilog, 78))
        parser.exit()


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return int(text)


def json_value(text: str):
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None


# What PyTorch takes its allocator's settings from, the first that is set; and the one that the commands choose.
ALLOCATOR, GROWING = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
ALLOCATORS = (ALLOCATOR, "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
FILE, COUNT, SWITCH = {"metavar": "FILE"}, {"metavar": "N", "type": count}, {"action": "store_true"}

# Flags that are no options of config.py, by group: name, what argparse is told, help.
FLAGS = {
    "prompt": (
        ("prompt", {}, "the text to continue"),
        ("prompt-file", FILE, "the text to continue, or to ask about. Without a flag it is read from a pipe"),
        ("prompts", FILE, "several prompts, one a line, as JSON. Strings, or {prompt or messages, question, seed}"),
        ("batch-size", {**COUNT, "default": 8}, "how many of --prompts run side by side (default 8)"),
        ("prompt-len", COUNT, "keep the first N tokens of the text (alias --prefill)"),
        ("keep", {"choices": WAYS, "metavar": "PART"}, "part to keep of a too long text: start, end or both"),
        ("question", {}, "a question that follows the text, which may be cut"),
        ("questions", FILE, "questions about the text, one a line or as JSON. All at once (-: standard input)"),
        ("num-samples", COUNT, "the number of answers. Their seeds are seed, seed + 1, ..."),
        ("interactive", SWITCH, "a conversation, about the text if there is one; a pipe holds what is asked"),
        ("system", {}, "a system message before the text"),
        ("save-prefix", FILE, "save the text with its keys and values"),
        ("save-every", COUNT, "with --save-prefix: also after about every N tokens, to continue from"),
        ("prefix", FILE, "open a text that was saved, instead of a prompt"),
        ("chat", SWITCH, "send the text as a user's message, by the chat template"),
        ("chat-template", FILE, "Jinja file in place of the checkpoint's chat template"),
        ("chat-template-kwargs", {"metavar": "JSON", "type": json_value},
         'what the template reads beside messages: {"enable_thinking": false}')),
    "generation": (
        ("max-new-tokens", {"type": int, "default": 256}, "most tokens of the output (default 256, alias --gen-len)"),
        Sampling,
        ("stop", {"action": "append"}, "end before this string; may be repeated"),
        ("stop-token-ids", {"nargs": "+", "type": int, "metavar": "ID"}, "end after one of these tokens"),
        ("ignore-eos", SWITCH, "go on after an end-of-text token"),
        ("show-levels", SWITCH, "colour the text by the level that proposed it. FORCE_COLOR=1: also in a file"),
        ("logprobs", {"type": int, "metavar": "K"}, "in JSON: log-probabilities of each token, and of K likely ones")),
    "model": (
        ("checkpoint", {"default": "tiny"}, "Hugging Face folder, repository id, or 'tiny' (default)"),
        Placement),
    "speculation": (
        Settings,
        ("no-speculation", SWITCH, "the same steps, one token at a time. At temperature 0 the same text"),
        ("compare", SWITCH, "compare the speed with autoregression, and greedy tokens with --no-speculation"))}


def parser() -> Parser:
    from .. import __version__

    p = Parser(
        prog="triforce", usage="triforce [flags]", add_help=False,
        description="Continue a long text with a language model, losslessly and faster.",
        epilog="With no flags: a demonstration. Commands: triforce download, convert, plan (what fits), check (is all "
               "well?), serve (a server), eval (lm-evaluation-harness).")
    p.add_argument("-h", "--help", nargs=0, action=Help, help="what most people need")
    p.add_argument("--help-all", action="help", help="every flag, with its whole description")
    p.add_argument("--version", action="version", version=f"triforce {__version__}")
    p.add_argument("--json", action="store_true", help="print JSON instead of the text. An object for each answer")
    for title, flags in FLAGS.items():
        group = p.add_argument_group(title)
        for flag in flags:
            if isinstance(flag, tuple):
                name, how, about = flag
                group.add_argument(f"--{name}", help=about, **how)
                continue
            for field in dataclasses.fields(flag):  # one that is not given leaves no trace: the field's default holds
                about = field.metadata
                if about["flag"] is not None:
                    group.add_argument(about["flag"] or "--" + field.name.replace("_", "-"), dest=field.name,
                                       default=argparse.SUPPRESS, help=about["help"].replace("%", "%%"),
                                       **about["argparse"])
    return p


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags of a generation. Raises UserError for an unknown one."""
    flags = parser()
    known = flags._option_string_actions.keys()
    args, unknown = flags.parse_known_args([_spell(argument, known) for argument in argv])
    if unknown:
        raise UserError(not_known(unknown[0].partition("=")[0], "flag or command", {*known, *ALIASES, *COMMANDS},
                                  "triforce --help-all lists all flags; a text goes behind --prompt, in quotes"))
    if getattr(args, "draft", None) == "none":
        args.draft = False
    return args


def parse_both(argv: list[str], flags: tuple, command: str, about: str,
               example: str) -> tuple[argparse.Namespace, argparse.Namespace]:
    """What is given of a command's own flags (as in FLAGS), and of those of `triforce`, which it knows, too."""
    about = textwrap.fill(f"{about} Exit status: 0 if so, 1 if not, 2 for a mistake.", 78)
    epilog = "Flags of `triforce` are known here, too: --checkpoint, --draft, --device, ..."
    p = Parser(prog=f"triforce {command}", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
               description=about, epilog=f"{epilog}\n\n    {example}")
    for name, how, help in flags:
        p.add_argument(f"--{name}", help=help, **how)
    own, rest = p.parse_known_args([_spell(one, p._option_string_actions) for one in argv])
    return own, parse(rest)


def _spell(argument: str, known) -> str:
    """--prompt_len=3 -> --prompt-len=3, and the names of ALIASES. Another argument stays a text."""
    name, equals, value = argument.partition("=")
    spelt = name.replace("_", "-")
    spelt = ALIASES.get(spelt, spelt)
    return spelt + equals + value if spelt in known else argument


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Within, PyTorch is imported, and Ctrl-C ends the process at once. PyTorch would swallow a KeyboardInterrupt that
    comes while it imports NumPy, and go on with half of it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not ignored, as by nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def generate(argv: list[str]) -> int:
    """With several ranks, rank 0 reads for all once they are connected, and the others print nothing."""
    args = parse(argv)
    args.begun = time.perf_counter()
    logging.getLogger("triforce").setLevel(logging.INFO)  # says where an offloaded cache lies
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    request = None if "WORLD_SIZE" in os.environ else read_request(args, not argv)  # before PyTorch is imported
    with importing():
        from ..parallel import from_environment, leave, read_first
        from .run import answer, demonstrate
    group, args.device = from_environment(getattr(args, "device", None))
    stderr = sys.stderr
    if group is not None and group.rank > 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")
        logging.disable()
    try:
        request = request or read_first(group, lambda: read_request(args, not argv))
        status = (answer if argv or not request.is_demo else demonstrate)(args, group, request)
    except Exception:
        sys.stderr = stderr  # a rank that fails alone has to say why
        raise
    leave()
    return status


def run(argv: list[str]) -> int:
    """Runs a command, and flushes its output however it ends."""
    try:
        if not argv or argv[0] not in COMMANDS:
            return generate(argv)
        with importing():
            command = importlib.import_module(f"triforce.{COMMANDS[argv[0]]}")
        return command.main(argv[1:])
    finally:
        sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Runs the command line. Exit status: 0; 1 if a check fails; 2 for a user's mistake; 130 for Ctrl-C."""
    if not any(name in os.environ for name in (*ALLOCATORS, "WORLD_SIZE")):
        # With segments of fixed size an 8B whose plan left 1.4 GiB of a cap of 24 ran out of memory. With growing ones
        # its peak was 22.6 (measured on an H200). Ranks keep the default: no measurement covers them.
        os.environ[ALLOCATOR] = GROWING
    with consoles():
        try:
            return run(sys.argv[1:] if argv is None else argv)
        except KeyboardInterrupt:
            say("interrupted")
            return 130
        except BrokenPipeError:  # the reader of a pipe has seen enough
            return 0
        except UserError as error:
            told = str(error)
        except OSError as error:
            if error.errno is None:  # a library that is not there
                raise
            told = f"{error.filename or 'the output'}: {error.strerror}; mend that, and run the command again"
        rank = int(os.environ.get("RANK", 0)) if "WORLD_SIZE" in os.environ else 0
        if rank:  # rank 0 reports what all of them find, which ends the others
            time.sleep(1)
        told = f"rank {rank}: error: {told}" if rank else f"error: {told}"
        say(textwrap.fill(told, 79, break_long_words=False, break_on_hyphens=False) if sys.stderr.isatty() else told)
        return 2
