"""Text in and out: `Tokenizer` encodes and decodes as the checkpoint's own tokenizer does, and streams valid text.

How a folder's files become an encoder is in `vocabulary.py`.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import UserError
from .chat_template import read_templates, render
from .files import Fields, guarded, read_optional_json, whole
from .vocabulary import build_backend

BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    Decoding goes by bytes: each id stands for fixed bytes, a text is their concatenation, and what is not UTF-8 becomes
    U+FFFD. So text can be streamed, and a piece never has to be taken back. Only here transformers differs: it turns a
    whole run of byte pieces (such as `<0x0A>`) into U+FFFD if one of them is invalid, where we keep the valid ones.

    bos_id and eos_id are None where the tokenizer names none; a model's vocabulary may be padded beyond vocab_size.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        with guarded(f"the tokenizer of {folder} cannot be read"):
            self.backend, self.special_tokens = build_backend(self.folder)
            self.token_of = {i: token for token, i in self.backend.get_vocab(with_added_tokens=True).items()}
            self.vocab_size = max(self.token_of) + 1
            added = self.backend.get_added_tokens_decoder()
            self.special_ids = frozenset(i for i, token in added.items() if token.special)
            self.bos_id, self.eos_id = (self.backend.token_to_id(self.special_tokens.get(name, ""))
                                        for name in ("bos_token", "eos_token"))
            steps = self.backend.decoder.__getstate__() if self.backend.decoder else b""
            self._byte_of_char = byte_level_alphabet() if b'"ByteLevel"' in steps else {}
            self._adds_space = b'"Strip"' in steps  # encoding puts one before a text, and decoding takes it away

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Ids of a text. `bos`: with what the tokenizer's own settings put around a text, which may be nothing."""
        with guarded(f"the tokenizer of {self.folder} fails on the text"):
            try:
                # `backend.encode` would hold Python's lock all the while, a second for a book.
                return self.backend.encode_batch_fast([text], add_special_tokens=bos)[0].ids
            except (TypeError, UnicodeError):
                raise UserError("the text has half of a surrogate pair; read it with errors='replace'") from None

    def decode(self, ids: Iterable[int], continues: bool = False) -> str:
        """The text of ids; special tokens are left out. continues: a leading space belongs to the text, which the ids
        continue; else it is dropped if encoding put it there."""
        stream = self.stream(continues)
        return stream.push(ids) + stream.finish()

    def stream(self, continues: bool = False) -> "TextStream":
        """A decoder fed piece by piece; the pieces joined equal `decode` of all ids."""
        return TextStream(self, continues)

    def token_bytes(self, i: int) -> bytes:
        """What an id adds to a text. Empty for special tokens and for ids without a name."""
        token = self.token_of.get(i)
        if token is None or i in self.special_ids:
            return b""
        if self._byte_of_char:
            of_char = [self._byte_of_char.get(char) for char in token]
            return token.encode() if None in of_char else bytes(of_char)  # an added token is spelled as it is
        byte = BYTE_PIECE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()

    def apply_chat_template(self, messages: list[dict], template: str | None = None,
                            variables: dict | None = None) -> list[int]:
        """Ids of a conversation, ready for the model's answer: see `render`."""
        return self.encode(self.render(messages, template, variables), bos=False)  # a template spells its own bos

    def render(self, messages: list[dict], template: str | None = None, variables: dict | None = None) -> str:
        """The text of a conversation, as the chat template writes it.

        Args:
            messages: dicts with "role" and "content", and whatever else the template reads, such as "tool_calls".
            template: Jinja text; None takes the folder's own.
            variables: what the template reads besides the messages, such as {"enable_thinking": False}.
        """
        if not is_messages(messages) or not all("role" in message for message in messages):
            raise UserError('messages must be a list of {"role": ..., "content": ...}, at least one')
        if variables is not None and not isinstance(variables, dict):
            raise UserError(f"chat_template_kwargs ({variables!r}) must be a dict; try {{\"enable_thinking\": False}}")
        variables = {"tools": None, "documents": None, **(variables or {})}
        template = self.chat_template(variables["tools"]) if template is None else template
        if template is None:
            raise UserError(f"{self.folder} has no chat template; give one (--chat-template FILE), or a plain prompt")
        return render(template, messages, {**self.special_tokens, **variables})

    def chat_template(self, tools=None) -> str | None:
        """The folder's template, of several the one named `default`; with tools, `tool_use`, if there is one."""
        templates = read_templates(self.folder)
        return templates.get("tool_use" if tools is not None and "tool_use" in templates else "default")

    def same_as(self, other: "Tokenizer") -> str | None:
        """None if every id means the same to both, else one line with the first that does not."""
        mine, theirs = self._usable(), other._usable()
        differ = [i for i in mine.keys() | theirs.keys() if mine.get(i) != theirs.get(i)]
        if not differ:
            return None
        first = min(differ)
        names = " and ".join(repr(vocab[first]) if first in vocab else "nothing" for vocab in (mine, theirs))
        return f"id {first} means {names} ({self.folder} names {len(mine)} tokens, {other.folder} {len(theirs)})"

    def _usable(self) -> dict[int, str]:
        """Ids beyond the vocabulary of a tokenizer's own model do not count: the model can never give them."""
        limit = Fields(read_optional_json(self.folder / "config.json")).get("vocab_size", whole(0, 2**32), 0)
        return {i: token for i, token in self.token_of.items() if i < (limit or self.vocab_size)}


def is_messages(prompt) -> bool:
    """Whether it is a conversation, {"role", "content"} by {"role", "content"}, rather than text or ids."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(item, dict) for item in prompt)


class TextStream:
    """Ids in, text out as soon as it is valid: never half of a character, nothing ever taken back."""

    def __init__(self, tokenizer: Tokenizer, continues: bool = False):
        self.tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = tokenizer._adds_space and not continues

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; may be empty."""
        return self._without_space(self._utf8.decode(b"".join(map(self.tokenizer.token_bytes, ids))))

    def finish(self) -> str:
        """What is left of a character that was never completed: U+FFFD, or nothing."""
        return self._without_space(self._utf8.decode(b"", True))

    def _without_space(self, text: str) -> str:
        if text and self._drops_space:
            self._drops_space = False
            return text.removeprefix(" ")
        return text


def byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one visible character: itself where it is visible, else from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
