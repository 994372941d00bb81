"""`--interactive`: a conversation on the terminal. Knows nothing of tensors or flags; it drives a `Chat`."""

import contextlib
import io
import sys

from .chat import Chat
from .errors import UserError

HELP = """\
/undo        take the last question and its answer back
/save FILE   write the document and what was said to a file, for --prefix:
             a conversation goes on with it, and cannot take back what it holds
/stats       figures of the last answer
/help        this list
/quit        end (or Ctrl-D)
Ctrl-C ends an answer; what it said so far stays in the conversation."""


class Conversation:
    """Reads lines, streams answers.

    Args:
        options: of every answer; see `Engine.stream`.
    """

    def __init__(self, chat: Chat, options: dict):
        self.chat, self.options = chat, options

    def run(self) -> None:
        """Until /quit or the end of the input."""
        with contextlib.suppress(AttributeError, io.UnsupportedOperation):  # it is another's
            sys.stdin.reconfigure(errors="replace")  # in many locales a byte that is not UTF-8 raises
        say("Ask away; /help lists what else there is.")
        line = ""
        while line not in ("/quit", "/exit"):
            try:
                line = ask().strip()
                if line.startswith("/"):
                    self.command(*line.split(maxsplit=1))
                elif line:
                    self.answer(line)
            except EOFError:
                return
            except UserError as error:
                say(f"error: {error}")
            except KeyboardInterrupt:
                say("\n(broken off; /quit or Ctrl-D ends)")

    def command(self, name: str, argument: str = "") -> None:
        """One that begins with a slash."""
        match name, argument:
            case "/quit" | "/exit", "":
                return
            case "/help", "":
                say(HELP)
            case "/undo", "":
                self.chat.undo()
                say(f"(the last question and its answer are forgotten; turns before them: {len(self.chat.turns)})")
            case "/stats", "":
                say(str(self.chat.turns[-1][1].stats) if self.chat.turns else "nothing has been answered yet")
            case "/save", _ if argument:
                self.chat.save(argument)
                say(f"(wrote {argument}; go on later with --prefix {argument} --interactive)")
            case _:
                raise UserError(f"{f'{name} {argument}'.strip()} is no command as /help lists them")

    def answer(self, text: str) -> None:
        is_piped = not sys.stdin.isatty()  # nobody sees what is asked
        turn = self.chat.stream(text, **self.options)
        try:
            if is_piped:
                print(f"> {text}")
            for piece in turn:
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            turn.close()
            say("\n(ended)")
        print("\n" if is_piped else "", flush=True)


def ask() -> str:
    """A line from the terminal, with a history."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then edits lines and remembers them)
    return input("> " if sys.stdin.isatty() else "")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
