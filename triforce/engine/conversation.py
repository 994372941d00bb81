"""A conversation, turn by turn. What was said stays in the engine's cache: a turn computes only what is new.

    chat = engine.chat(prefix=book)
    for piece in chat.stream("Who is Queequeg?"):
        print(piece, end="")
    print(chat.send("And where does he come from?").text)
    chat.undo()
"""

import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import TooLong, UserError
from ..parallel import agreed
from .output import Generation
from .prompt_cache import Prefix, asked, check_prefix

if TYPE_CHECKING:
    from .engine import Engine, Stream


class Chat:
    """See `Engine.chat`, which makes one.

    Attributes:
        turns: (what the user said, the Generation that answered) so far.
    """

    def __init__(self, engine: "Engine", prefix: Prefix | None = None, *, system: str | None = None,
                 chat_template: str | None = None, **options):
        if prefix is not None:
            check_prefix(prefix, engine, chat_template)
        check_options(options)
        engine.check_options(options)
        if system is not None and (prefix is not None or not isinstance(system, str)):
            raise UserError(f"system ({system!r}) must be a text, and there may be no prefix: one begins with its own "
                            "messages, which may have the role \"system\"")
        self.engine, self.prefix, self.options, self.chat_template = engine, prefix, options, chat_template
        tokenizer = engine.tokenizer_or_raise()
        self._before = [] if system is None else [{"role": "system", "content": system}]
        if prefix is None:
            kwargs = options.get("chat_template_kwargs")
            tools = kwargs.get("tools") if isinstance(kwargs, dict) else None  # which may have a template of their own
            self.uses_template = chat_template is not None or tokenizer.chat_template(tools) is not None
            self.rendered_at = agreed(engine.target.group, datetime.now().isoformat(timespec="seconds"))
        else:
            self._before, self.chat_template = prefix.messages or [], prefix.chat_template
            self.uses_template, self.rendered_at = prefix.messages is not None, prefix.rendered_at
        self.turns: list[tuple[str, Generation]] = []
        self._open: Turn | None = None
        self._lock = threading.RLock()  # held while a piece comes, and by `send` for all of its answer

    def __repr__(self) -> str:
        about = "" if self.prefix is None else f" about a document of {len(self.prefix):,} tokens"
        return f"<triforce.Chat{about}: turns so far: {len(self.turns)}>"

    def stream(self, text: str, **options) -> "Turn":
        """Says something, and gives the answer piece by piece. The answer is what was given before the iteration
        ends or is closed, or the next turn begins. options: see `Engine.stream`; they override those of the chat."""
        if not isinstance(text, str):
            raise UserError(f"a message is a text, and this one is of type {type(text).__name__}")
        if not text.strip():
            raise UserError("the message is empty; say something")
        check_options(options)
        with self._lock:
            self.end()
            options = {"prefix": self.prefix, **self.options, **options}
            if not self.uses_template:
                prompt = self._ids(text)
            elif self.prefix is not None:
                prompt = said(self.messages, text)
            else:
                prompt = self.engine.encode_prompt(said(self.messages, text), self.chat_template,
                                                   options.pop("chat_template_kwargs", None), self.rendered_at)
            try:
                stream = self.engine.stream(prompt, **options)
            except TooLong as error:
                if not self.turns:
                    raise
                raise TooLong(f"the conversation has become too long: {str(error).partition('; ')[0]}; take turns back "
                              "with undo, begin a new one, say less, or ask for fewer new ones") from None
            self._open = Turn(self, text, stream)
            return self._open

    def send(self, text: str, **options) -> Generation:
        """Says something, and returns the whole answer. Calls from other threads wait."""
        with self._lock:
            turn = self.stream(text, **options)
            for _ in turn:
                pass
            return turn.result

    def save(self, path: str | Path) -> None:
        """Writes the document and what was said, with what the engine holds of their keys and values, to a file.
        `Engine.open` opens it as a prefix, and `Engine.chat` goes on with that; the turns in it cannot be undone. Every
        rank calls this. Raises UserError if nothing has been said yet, and there is no document; see `Prefix.save`."""
        with self._lock, self.engine.holding_still():
            self.end()
            if not self.turns and self.prefix is None:
                raise UserError("nothing has been said yet, so there is nothing to save; say something first")
            (self._so_far() if self.turns else self.prefix).save(path)

    def _so_far(self) -> Prefix:
        """The conversation as a prefix of others, with what the engine holds of it."""
        book = self.prefix
        if not self.uses_template:
            return self.engine.buffers.held([*(book.tokens if book is not None else []), *self._ids()], book)
        messages, variables = self.messages, self.options.get("chat_template_kwargs")
        if book is not None and variables is None:
            variables = book.chat_template_kwargs
        ids = self.engine.encode_beginning(messages, self.chat_template, variables, self.rendered_at)
        held = self.engine.buffers.held(ids, book)
        held.messages, held.chat_template, held.chat_template_kwargs = messages, self.chat_template, variables
        held.rendered_at = self.rendered_at
        return held

    def undo(self) -> None:
        """Back by one turn. Raises UserError if there is none."""
        with self._lock:
            self.end()
            if not self.turns:
                raise UserError("there is no turn to undo; say something, or begin another conversation")
            self.turns.pop()

    def end(self) -> None:
        """The present answer, if there is one, ends here."""
        with self._lock:
            if self._open is not None:
                self._open.close()

    @property
    def messages(self) -> list[dict]:
        """The conversation as messages {role, content}, what it began with among them."""
        messages = list(self._before)
        for text, answer in self.turns:
            messages = [*said(messages, text), {"role": "assistant", "content": answer.text}]
        return messages

    def _ids(self, text: str | None = None) -> list[int]:
        """Of all turns, and of what the user says then: those that follow the prefix, where no template joins them."""
        encode = self.engine.tokenizer.encode
        ids = [] if self.prefix is not None or not self._before else encode(self._before[0]["content"])
        for one, answer in (*self.turns, *([] if text is None else [(text, None)])):
            begins = not ids and self.prefix is None
            ids = ids + (encode(f"{one}\n") if begins else encode(f"\n\n{one}\n", bos=False))
            ids += self._told(answer) if answer is not None else []
        return ids

    def _told(self, answer: Generation) -> list[int]:
        """Ids of an answer: its tokens, or, where something that ended it is among those, of its text."""
        tokens = [token for token in answer.tokens if token not in self.engine.eos_ids]
        tokenizer = self.engine.tokenizer
        # Where nothing ended it, the last character may be incomplete, and the next turn follows its tokens.
        if answer.finish_reason != "stop" or tokenizer.decode(tokens, continues=True) == answer.text:
            return tokens
        return tokenizer.encode(answer.text, bos=False)


def said(messages: list[dict], text: str) -> list[dict]:
    """Messages with one more of the user's."""
    return asked(messages, text) if messages else [{"role": "user", "content": text}]


def check_options(options: dict) -> None:
    """Raises UserError for what a turn of a conversation cannot be given."""
    for name in options.keys() & {"prefix", "chat_template", "num_samples"}:
        raise UserError(f"{name} is no option of a turn: a conversation has one document, one template, and one answer "
                        "to a turn; drop it, or give it to `Engine.chat`")


class Turn(Iterator):
    """Iterates over the pieces of one answer; `result` is its Generation so far."""

    def __init__(self, chat: Chat, text: str, stream: "Stream"):
        self._chat, self._text, self._stream = chat, text, stream

    def __next__(self) -> str:
        with self._chat._lock:
            try:
                return next(self._stream)
            except BaseException:
                self.close()
                raise

    @property
    def result(self) -> Generation | None:
        return self._stream.result

    def close(self) -> None:
        """Ends the answer early. What was given of it stays in the conversation."""
        self._stream.cancel()  # first, since whoever waits for a piece has the lock
        with self._chat._lock:
            self._stream.close()
            if self._chat._open is self:
                self._chat._open = None
                if self.result is not None and self.result.tokens:
                    self._chat.turns.append((self._text, self.result))
