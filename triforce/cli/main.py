"""The command line: `python generate.py`, `python -m triforce`, `triforce`. Reads the flags, and says what went wrong.

What they ask for is in `request.py`, and how it is answered in `answers.py`. Only `answers.py` needs PyTorch.
"""

import argparse
import dataclasses
import difflib
import importlib
import json
import logging
import os
import re
import sys
import textwrap
import time

from ..config import Placement, Sampling, Settings
from ..errors import UserError, not_known
from ..keep import WAYS
from ..request import read_request
from ..start import importing
from ..terminal import consoles

ALIASES = {"--prefill": "--prompt-len", "--temp": "--temperature", "--gen-len": "--max-new-tokens",
           "--target": "--checkpoint", "--on-chip": "--num-resident-layers"}

# `triforce download ...`; without one of them, it generates.
COMMANDS = {"download": "hf.download", "convert": "hf.convert", "plan": "cli.plan", "check": "cli.check"}

# What most people need: `--help` has the first sentence of each.
COMMON = tuple(f"--{name}" for name in """
help help-all json prompt prompt-file prompts prompt-len keep question questions num-samples interactive chat
system save-prefix prefix max-new-tokens temperature top-p seed stop show-levels checkpoint device max-seq-len
compile offload draft budget gamma no-speculation compare""".split())


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage of all flags."""

    def error(self, message: str):
        known = self._option_string_actions
        raise UserError(f"{message}; {self.prog} {'--help-all' if '--help-all' in known else '--help'} lists all flags")


class Paragraphs(argparse.HelpFormatter):
    """Wraps paragraphs to the terminal's width; those that are indented stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(part if part.startswith(" ") else fill(part, width, indent) for part in text.split("\n\n"))


class Help(argparse.Action):
    """Prints a screen: the flags of COMMON, a line each."""

    def __call__(self, parser, *_) -> None:
        known = parser._option_string_actions
        print(f"usage: {parser.usage}\n\n{parser.description}\n")
        for flag in COMMON:
            print(f"  {flag:<18}", textwrap.shorten(re.split(r"[.;] ", known[flag].help)[0], 58, placeholder=" ..."))
        print("\n" + textwrap.fill(parser.epilog, 78))
        parser.exit()


def kind(read, is_right, wanted: str):
    """A type of argparse's: what `read` makes of a text, if that is right."""
    def checked(text: str):
        try:
            if is_right(value := read(text)):
                return value
        except (ValueError, RecursionError):
            pass
        raise argparse.ArgumentTypeError(f"{text!r} must be {wanted}")

    return checked


count = kind(int, lambda value: value >= 1, "a whole number, at least 1; try 8")
filled = kind(str, str.strip, "a text that is not empty; give one, or drop the flag")
json_object = kind(json.loads, lambda value: isinstance(value, dict),
                   "an object in JSON; try '{\"enable_thinking\": false}'")


def parser() -> Parser:
    from .. import __version__

    p = Parser(
        prog="triforce", usage="triforce [flags]", add_help=False,
        description="Continue a long text with a language model, losslessly and faster.",
        epilog="With no flags: a demonstration. Commands: `triforce download` and `triforce convert` for checkpoints, "
               "`triforce plan` (what fits), `triforce check` (whether all is well).")
    p.add_argument("-h", "--help", nargs=0, action=Help, help="what most people need")
    p.add_argument("--help-all", action="help", help="every flag, with all there is to say about it")
    p.add_argument("--version", action="version", version=f"triforce {__version__}")
    p.add_argument("--json", action="store_true", help="print JSON instead of the text. An object for each answer")
    add = p.add_argument_group("prompt").add_argument
    add("--prompt", help="the text to continue")
    add("--prompt-file", metavar="FILE", type=filled, help="the text to continue, or to ask about. With no flag for "
        "it, it is read from a pipe")
    add("--prompts", metavar="FILE", type=filled, help="several prompts, one a line, as JSON. Strings, or objects with "
        "a \"prompt\" or \"messages\", and perhaps a \"question\" and a \"seed\"; answers are lines of JSON")
    add("--batch-size", type=count, default=8, help="so many of --prompts are computed side by side (default 8)")
    add("--prompt-len", type=count, help="keep the first N tokens of the text (alias --prefill)")
    add("--keep", choices=WAYS, metavar="PART", help="of a text that is too long: start, end or both. Too long for the "
        "model or --max-seq-len; both: half of each; question and template stay (default: an error)")
    add("--question", type=filled, help="asked after the text, which may be cut")
    add("--questions", metavar="FILE", type=filled, help="questions about the text, one a line or as JSON. They are "
        "answered side by side (-: standard input)")
    add("--num-samples", type=count, metavar="N", help="so many answers. Their seeds are seed, seed + 1, ...")
    add("--interactive", action="store_true", help="a conversation, about the text if there is one; a pipe holds what "
        "is asked")
    add("--system", type=filled, help="a system message before the text")
    add("--save-prefix", metavar="FILE", type=filled, help="save the text with its keys and values")
    add("--save-every", metavar="N", type=count, help="with --save-prefix: save after about every N tokens, too; the "
        "same command continues an interrupted run")
    add("--prefix", metavar="FILE", type=filled, help="open a text that was saved, instead of a prompt")
    add("--chat", action="store_true", help="send the text as a user's message, by the chat template")
    add("--chat-template", type=filled, help="Jinja file in place of the checkpoint's chat template")
    add("--chat-template-kwargs", metavar="JSON", type=json_object, help="what the template reads besides the "
        "messages: '{\"enable_thinking\": false}' has Qwen3 answer at once")
    text = p.add_argument_group("generation")
    add = text.add_argument
    add("--max-new-tokens", type=int, default=256, help="most tokens of the output (default 256, alias --gen-len)")
    add_flags(text, Sampling)
    add("--stop", action="append", help="end before this string; may be repeated")
    add("--stop-token-ids", nargs="+", type=int, metavar="ID", help="end after one of these tokens, as after an "
        "end-of-text token")
    add("--ignore-eos", action="store_true", help="go on after an end-of-text token")
    add("--show-levels", action="store_true", help="colour the text by the level that proposed it. On a terminal; "
        "elsewhere with FORCE_COLOR=1")
    add("--logprobs", type=int, metavar="K", help="with --json or --prompts: log-probabilities of each token, and of "
        "the K most probable ones in its place")
    model = p.add_argument_group("model")
    model.add_argument("--checkpoint", default="tiny", help="Hugging Face folder, repository id, or 'tiny' (default)")
    add_flags(model, Placement)
    drafting = p.add_argument_group("speculation")
    add_flags(drafting, Settings)
    drafting.add_argument("--no-speculation", action="store_true", help="the same steps, one token at a time. At "
                          "temperature 0 the same text; --compare has the fastest autoregression")
    drafting.add_argument("--compare", action=argparse.BooleanOptionalAction, help="compare with the fastest "
                          "autoregression: the speed, and 64 greedy tokens; with --sampling coupled 64 drawn ones, "
                          "too (default: only without flags)")
    return p


def add_flags(group, options: type) -> None:
    """A flag for each field that has one. A flag that is not given leaves no trace: the field's default holds."""
    for field in dataclasses.fields(options):
        about = field.metadata
        if about["flag"] is not None:
            flag = about["flag"] or "--" + field.name.replace("_", "-")
            group.add_argument(flag, dest=field.name, default=argparse.SUPPRESS, help=about["help"].replace("%", "%%"),
                               **about["argparse"])


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags that generate. Raises UserError for what is none."""
    flags = parser()
    known = flags._option_string_actions.keys()
    args, unknown = flags.parse_known_args([_spell(argument, known) for argument in argv])
    if unknown:
        name = unknown[0].partition("=")[0]
        if name.startswith("-"):
            raise UserError(not_known(name, "flag", known | ALIASES.keys(), "triforce --help-all lists all"))
        if difflib.get_close_matches(name, COMMANDS) and argv[0] == name:
            raise UserError(not_known(name, "command", COMMANDS))
        raise UserError(f"{name!r} stands without a flag; give a text with --prompt, in quotes if it has spaces")
    if getattr(args, "draft", None) == "none":
        args.draft = False
    return args


def _spell(argument: str, known) -> str:
    """--prompt_len=3 -> --prompt-len=3, and the reference implementations' names."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    spelt = name.replace("_", "-")
    spelt = ALIASES.get(spelt, spelt)
    return spelt + equals + value if spelt in known else argument  # else it is a text that begins so


def run(argv: list[str]) -> int:
    """Generates. With several ranks, rank 0 reads for all, once they know each other, and the others say nothing."""
    args = parse(argv)
    args.begun = time.perf_counter()
    logging.getLogger("triforce").setLevel(logging.INFO)  # says where an offloaded cache lies
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    request = read_request(args, not argv) if "WORLD_SIZE" not in os.environ else None
    with importing():
        from ..answers import answer
        from ..parallel import from_environment, leave, read_first
    group, args.device = from_environment(getattr(args, "device", None))
    stderr = sys.stderr
    if group is not None and group.rank > 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")
        logging.disable()
    try:
        if request is None:
            request = read_first(group, lambda: read_request(args, not argv))
        status = answer(args, group, request, not argv if args.compare is None else args.compare)
    except Exception:
        sys.stderr = stderr  # a rank that fails alone has to say why
        raise
    leave()
    return status


def run_command(argv: list[str]) -> int:
    """`run`, or another command. What it has printed is written when it ends, however it ends."""
    try:
        if not argv or argv[0] not in COMMANDS:
            return run(argv)
        with importing():
            command = importlib.import_module(f"triforce.{COMMANDS[argv[0]]}")
        return command.main(argv[1:])
    finally:
        sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Runs the command line. Exit status: 0; 1 if a check fails; 2 for a user's mistake; 130 for Ctrl-C."""
    with consoles():
        try:
            return run_command(sys.argv[1:] if argv is None else argv)
        except UserError as error:
            rank = int(os.environ.get("RANK", 0)) if os.environ.get("WORLD_SIZE", "1") != "1" else 0
            if rank > 0:  # what all of them find, rank 0 says, which ends the others
                time.sleep(1)
            print(f"rank {rank}: error: {error}" if rank else f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except BrokenPipeError:  # the reader of a pipe has seen enough
            return 0
        except OSError as error:
            if error.errno is None:  # a library that is not there
                raise
            where = f" {error.filename}" if error.filename else ""
            print(f"error: the system refuses{where}: {error.strerror}; mend that, and run the command again",
                  file=sys.stderr)
            return 2
