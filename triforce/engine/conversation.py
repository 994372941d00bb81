"""A conversation, turn by turn. What was said stays in the engine's cache: a turn computes only what is new.

    chat = engine.chat(prefix=book)
    for piece in chat.stream("Who is Queequeg?"):
        print(piece, end="")
    print(chat.send("And where does he come from?").text)
    chat.undo()
"""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import TooLong, UserError
from ..parallel import agreed
from ..runtime.host import ProcessLock, not_pickled
from .output import Generation
from .prompt_cache import Prefix, asked, check_prefix

if TYPE_CHECKING:
    from .engine import Engine, Stream


class Chat:
    """See `Engine.chat`, which makes one.

    Attributes:
        turns: (what the user said, the Generation that answered) so far.
    """

    __reduce__ = not_pickled("a conversation", "save it, and open the file as a prefix")

    def __init__(self, engine: "Engine", prefix: Prefix | None = None, *, system: str | None = None,
                 chat_template: str | None = None, **options):
        if prefix is not None:
            check_prefix(prefix, engine, chat_template)
        engine.check_options(options)
        if system is not None and (prefix is not None or not isinstance(system, str)):
            raise UserError(f"system ({system!r}) must be a text; with a prefix, leave it out: it has its own")
        self.engine, self.prefix, self.options, self.chat_template = engine, prefix, options, chat_template
        tokenizer = engine.tokenizer_or_raise()
        self._before = [] if system is None else [{"role": "system", "content": system}]
        if prefix is None:
            self.uses_template = chat_template is not None or tokenizer.chat_template() is not None
            self.rendered_at = agreed(engine.target.group, datetime.now().isoformat(timespec="seconds"))
        else:
            self._before, self.chat_template = prefix.messages or [], prefix.chat_template
            self.uses_template, self.rendered_at = prefix.messages is not None, prefix.rendered_at
        self.turns: list[tuple[str, Generation]] = []
        self._open: Turn | None = None
        self._lock = ProcessLock()  # held while a piece comes, and by `send` for all of its answer

    def stream(self, text: str, **options) -> "Turn":
        """Says something, and gives the answer piece by piece. The answer is what was given before the iteration
        ends or is closed, or the next turn begins. options: see `Engine.stream`; they override those of the chat."""
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"a message is a text that is not empty, and this one is {text!r:.40}; say something")
        self.engine.check_options(options)
        with self._lock:
            self.end()
            options = {"prefix": self.prefix, **self.options, **options}
            prompt = asked(self.messages, text) if self.uses_template else self._ids((text, None))
            if self.uses_template and self.prefix is None:
                prompt = self.engine.encode_prompt(prompt, self.chat_template,
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
        rank calls this. Raises UserError if there is nothing to save; see `Prefix.save`."""
        with self._lock, self.engine.holding_still():
            self.end()
            if not self.turns and self.prefix is None:
                raise UserError("nothing has been said yet, so there is nothing to save; say something first")
            book, variables, about = self.prefix, self.options.get("chat_template_kwargs"), ()
            if book is not None and variables is None:
                variables = book.chat_template_kwargs
            if not self.turns:
                return book.save(path)
            if self.uses_template:
                about = (self.messages, self.chat_template, variables, self.rendered_at)
                ids = self.engine.encode_beginning(*about)
            else:
                ids = [*(book.tokens if book is not None else []), *self._ids()]
            held = self.engine.buffers.held(ids, book)
            held.tell(*about)
            held.save(path)

    def undo(self) -> None:
        """Goes back by one turn. Raises UserError if there is none."""
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
        """The conversation as messages {role, content}, with those that it began with."""
        messages = list(self._before)
        for text, answer in self.turns:
            messages = [*asked(messages, text), {"role": "assistant", "content": answer.text}]
        return messages

    def _ids(self, *more: tuple[str, Generation | None]) -> list[int]:
        """Ids of all turns, and of more. They follow the prefix where no template joins them."""
        encode = self.engine.tokenizer.encode
        ids = [] if self.prefix is not None or not self._before else encode(self._before[0]["content"])
        for said, answer in [*self.turns, *more]:
            begins = not ids and self.prefix is None
            ids = ids + (encode(f"{said}\n") if begins else encode(f"\n\n{said}\n", bos=False))
            ids += [] if answer is None else self._told(answer)
        return ids

    def _told(self, answer: Generation) -> list[int]:
        """Ids of an answer: its tokens, or those of its text where the tokens hold what ended it."""
        tokens = [token for token in answer.tokens if token not in self.engine.eos_ids]
        tokenizer, ended = self.engine.tokenizer, answer.finish_reason == "stop"
        if ended and tokenizer.decode(tokens[:-1], continues=True) == answer.text:
            return tokens[:-1]  # by a special token, which has no text
        # Where nothing ended it, the last character may be incomplete, and the next turn follows its tokens.
        if not ended or tokenizer.decode(tokens, continues=True) == answer.text:
            return tokens
        return tokenizer.encode(answer.text, bos=False)


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
        """Ends the answer early. The pieces that were given stay in the conversation."""
        self._stream.cancel()  # first, since whoever waits for a piece has the lock
        with self._chat._lock:
            self._stream.close()
            if self._chat._open is self:
                self._chat._open = None
                if self.result is not None and self.result.tokens:
                    self._chat.turns.append((self._text, self.result))
