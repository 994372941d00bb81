"""`--interactive`: a conversation on the terminal. Knows nothing of tensors or flags; it drives a `Chat`."""

import contextlib
import io
import sys

from ..engine.conversation import Chat
from ..errors import UserError
from ..render import say

HELP = """\
/undo        take the last question and its answer back
/save FILE   write the document and what was said, for --prefix: to go on
/stats       figures of the last answer
/help        this list
/quit        end (or Ctrl-D)
Ctrl-C ends an answer; what it said so far stays in the conversation."""


def converse(chat: Chat, options: dict) -> None:
    """Reads lines, streams answers, until /quit or the end of the input. options: of every answer."""
    with contextlib.suppress(AttributeError, io.UnsupportedOperation):  # another object stands in for it
        sys.stdin.reconfigure(errors="replace")  # in many locales a byte that is not UTF-8 raises
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then edits lines and remembers them)
    say("Ask away; /help lists what else there is.")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                command(chat, *line.split(maxsplit=1))
            elif line:
                reply(chat, line, options)
        except EOFError:
            return
        except UserError as error:
            say(f"error: {error}")
        except KeyboardInterrupt:
            say("\n(broken off; /quit or Ctrl-D ends)")


def command(chat: Chat, name: str, argument: str = "") -> None:
    """A line that begins with a slash."""
    match name, argument:
        case "/help", "":
            say(HELP)
        case "/undo", "":
            chat.undo()
            say(f"(the last question and its answer are forgotten; turns before them: {len(chat.turns)})")
        case "/stats", "":
            say(str(chat.turns[-1][1].stats) if chat.turns else "nothing has been answered yet")
        case "/save", _ if argument:
            chat.save(argument)
            say(f"(wrote {argument}; go on later with --prefix {argument} --interactive)")
        case _:
            raise UserError(f"{f'{name} {argument}'.strip()} is no command as /help lists them")


def reply(chat: Chat, text: str, options: dict) -> None:
    is_piped = not sys.stdin.isatty()  # nobody sees what is asked
    turn = chat.stream(text, **options)
    try:
        if is_piped:
            print(f"> {text}")
        for piece in turn:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        turn.close()
        say("\n(ended)")
    print("\n" if is_piped else "", flush=True)
