"""Text in and out: `Tokenizer` encodes and decodes as the checkpoint's own tokenizer does, and streams valid text.

It knows nothing of the model: only ids and strings. How a folder's files become an encoder is in `vocabulary.py`.
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from ..errors import UserError
from .files import Fields, guarded, one_line, read_optional_json, read_text, shown, whole
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
            self._read()

    def _read(self) -> None:
        self.backend, self.special_tokens = build_backend(self.folder)
        self.token_of = {i: token for token, i in self.backend.get_vocab(with_added_tokens=True).items()}
        self.vocab_size = max(self.token_of) + 1
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_id, self.eos_id = (self.backend.token_to_id(self.special_tokens.get(name, ""))
                                    for name in ("bos_token", "eos_token"))
        self._bytes: dict[int, bytes] = {}  # filled as ids are met
        decoder = json.loads(self.backend.decoder.__getstate__()) if self.backend.decoder else {}
        steps = {step["type"]: step for step in decoder.get("decoders", [decoder]) if "type" in step}
        self._byte_of_char = byte_level_alphabet() if "ByteLevel" in steps else {}
        self._byte_fallback = "ByteFallback" in steps
        self._num_strip = steps.get("Strip", {}).get("start", 0)
        self._plain_start = bool(self._byte_of_char) or self._byte_fallback or "Strip" in steps
        plain = (i for i, token in self.token_of.items() if i not in added and not BYTE_PIECE.fullmatch(token)
                 and self.backend.decode([i]).strip(" \ufffd"))
        self._anchor = next(plain, None)
        self._anchor_text = "" if self._anchor is None else self.backend.decode([self._anchor])

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Ids of a text. `bos`: with what the tokenizer's own settings put around a text, which may be nothing."""
        with guarded(f"the tokenizer of {self.folder} fails on the text"):
            try:
                if not isinstance(text, str):  # a pair of texts
                    raise TypeError
                # `backend.encode` would hold Python's lock all the while, a second for a book.
                return self.backend.encode_batch_fast([text], add_special_tokens=bos)[0].ids
            except (TypeError, UnicodeError):
                raise UserError("the text is no valid Unicode (it holds half of a surrogate pair); correct it, or read "
                                "it with errors='replace'") from None

    def decode(self, ids: Iterable[int], continues: bool = False) -> str:
        """The text of ids; special tokens are left out. continues: a leading space belongs to the text, which the ids
        continue; else it is dropped if encoding put it there."""
        stream = self.stream(continues)
        return stream.push(ids) + stream.finish()

    def stream(self, continues: bool = False) -> "TextStream":
        """A decoder fed piece by piece; the pieces joined equal `decode` of all ids."""
        return TextStream(self, continues)

    def token_bytes(self, i: int) -> bytes:
        """What an id adds to a text that it does not begin. Empty for special tokens and for ids without a name."""
        if i not in self._bytes:
            with guarded(f"the tokenizer of {self.folder} fails on id {i}"):
                self._bytes[i] = self._find_bytes(i)
        return self._bytes[i]

    def _find_bytes(self, i: int) -> bytes:
        token = self.token_of.get(i)
        if token is None or i in self.special_ids:
            return b""
        if self._byte_of_char:
            known = all(char in self._byte_of_char for char in token)  # or it is an added token, spelled as it is
            return bytes(self._byte_of_char[char] for char in token) if known else token.encode()
        if self._byte_fallback and (match := BYTE_PIECE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self._anchor is None:
            return self.backend.decode([i]).encode()
        return self.backend.decode([self._anchor, i]).removeprefix(self._anchor_text).encode()

    def first_bytes(self, i: int) -> bytes:
        """What an id adds to a text that it begins, but for the spaces that `TextStream` strips."""
        if self._plain_start or i not in self.token_of or i in self.special_ids:
            return self.token_bytes(i)
        with guarded(f"the tokenizer of {self.folder} fails on id {i}"):
            return self.backend.decode([i]).encode()

    def apply_chat_template(self, messages: list[dict], template: str | None = None,
                            variables: dict | None = None) -> list[int]:
        """Ids of a conversation, ready for the model's answer.

        Args:
            messages: dicts with "role" and "content", and whatever else the template reads, such as "tool_calls".
            template: Jinja text; None takes the folder's own.
            variables: what the template reads besides the messages, such as {"enable_thinking": False}.
        """
        if not messages or not all(isinstance(message, dict) and "role" in message for message in messages):
            raise UserError('messages must be a list of {"role": ..., "content": ...}, at least one')
        if variables is not None and not isinstance(variables, dict):
            raise UserError(f"chat_template_kwargs ({variables!r}) must be a dict; try {{\"enable_thinking\": False}}")
        variables = {"tools": None, "documents": None, **(variables or {})}
        source = self.chat_template(variables["tools"]) if template is None else template
        if source is None:
            others = ", ".join(map(shown, self.chat_templates()))
            but = f"but {others}" if others else "(a base model?)"
            raise UserError(f"{self.folder} has no chat template {but}; give one (chat_template, or --chat-template "
                            "FILE), or a plain prompt")
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            text = chat_environment().from_string(source).render({
                "messages": messages, "add_generation_prompt": True, **self.special_tokens, **variables})
        except Exception as error:  # a template is a program of others: it may divide by zero, or recurse
            raise UserError(f"the chat template rejects the messages: {one_line(error)}") from None
        return self.encode(text, bos=False)  # a template spells its own bos

    def chat_template(self, tools=None) -> str | None:
        """The folder's template, of several the one named `default`; with tools, `tool_use`, if there is one."""
        templates = self.chat_templates()
        return templates.get("tool_use" if tools is not None and "tool_use" in templates else "default")

    def chat_templates(self) -> dict[str, str]:
        """By name: of chat_template.jinja and additional_chat_templates/NAME.jinja; without these, what
        chat_template.json holds, or tokenizer_config.json."""
        more = sorted((self.folder / "additional_chat_templates").glob("*.jinja"))
        files = {"default": self.folder / "chat_template.jinja", **{path.stem: path for path in more}}
        found = {name: read_text(path) for name, path in files.items() if path.exists()}
        for path in () if found else (self.folder / "chat_template.json", self.folder / "tokenizer_config.json"):
            template = read_optional_json(path).get("chat_template")
            if isinstance(template, list):  # of objects, each with its name
                template = {str(one.get("name")): one.get("template") for one in template if isinstance(one, dict)}
            found = template if isinstance(template, dict) else {"default": template} if template else {}
            if not all(isinstance(text, str) for text in found.values()):
                raise UserError(f"{path} has a chat_template that is no text; download it again")
            if found:
                return found
        return found

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
    return (isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes, bytearray)) and len(prompt) > 0
            and all(isinstance(item, dict) for item in prompt))


class TextStream:
    """Ids in, text out as soon as it is valid: never half of a character, nothing ever taken back.

    The cost of a token does not depend on how many went before.
    """

    def __init__(self, tokenizer: Tokenizer, continues: bool = False):
        self.tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_strip = 0 if continues else tokenizer._num_strip  # spaces that encoding puts before a text
        self._begun = continues

    def push(self, ids: int | Iterable[int]) -> str:
        """The text that these ids complete; may be empty."""
        found = bytearray()
        for i in [ids] if isinstance(ids, int) else ids:
            found += self.tokenizer.token_bytes(i) if self._begun else self.tokenizer.first_bytes(i)
            self._begun = self._begun or bool(found)
        return self._strip(self._utf8.decode(found))

    def finish(self) -> str:
        """What is left of a character that was never completed: U+FFFD, or nothing."""
        return self._strip(self._utf8.decode(b"", True))

    def _strip(self, text: str) -> str:
        while self._num_strip and text:
            if not text.startswith(" "):
                self._num_strip = 0
                break
            text, self._num_strip = text[1:], self._num_strip - 1
        return text


def byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one visible character: itself where it is visible, else from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


def chat_environment():
    """A sandbox for templates from strangers, with the functions that transformers gives to chat templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what a training loss counts; for us, its content."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str):
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment
