"""A document whose keys and values are computed once, for any number of questions about it."""

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cache.prefix import PrefixStore
from ..decode.drafters.ngram import NgramMeter
from ..errors import UserError
from ..hf.tokenizer import is_messages
from ..runtime.host import not_pickled
from . import prompt_cache_file
from .prompt_cache_file import Altered, Layout, PrefixReader

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger("triforce")
SHARED_FROM = 512  # tokens in common; fewer are not worth an attention of their own in every step, or a file
JOINTS = 16  # tokens: a template may join a question to the last ones of a document in another way

OF_PROMPT = {"messages": list, "chat_template": str, "chat_template_kwargs": dict, "rendered_at": str}
OF_DOCUMENT = {**OF_PROMPT, "part_of": int}
KINDS = {"model": str, "tokenizer": str, "name": str, **OF_DOCUMENT}  # of what a file says; any may be None


class Prefix:
    """A document with its keys and values: `Engine.prefill` and `Engine.open` return it, `prefix=` takes it.

    Attributes:
        tokens: ids of the whole document.
        messages: what it was made of, or None; questions about messages go through the chat template.
        store: keys and values of the first `num_shared` tokens, whole flush intervals. Each conversation computes the
            few that remain. None: the document is shorter than a flush interval.
        rendered_at: the local time (ISO 8601) that a chat template was told when the messages became tokens, and is
            told again with each question: templates name the day. None: it was made of text.
    """

    __reduce__ = not_pickled("a prefix", "save it, and open the file with the other engine")

    def __init__(self, engine: "Engine", tokens: list[int], store: PrefixStore | None):
        self.engine, self.tokens, self.store = engine, tokens, store
        self.num_read = 0  # tokens of it that a prefill found in a file
        self.part_of: int | None = None  # tokens of the document whose prefill goes on, where these are a part of it
        self._meter: NgramMeter | None = None
        self._has_warned = False  # that it does not serve its questions
        self.tell()

    def tell(self, messages: list[dict] | None = None, chat_template: str | None = None,
             chat_template_kwargs: dict | None = None, rendered_at: str | None = None) -> None:
        """Notes what the document was made of."""
        self.messages, self.chat_template, self.chat_template_kwargs = messages, chat_template, chat_template_kwargs
        self.rendered_at = rendered_at

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"<triforce.Prefix: {len(self):,} tokens, {self.nbytes / 2**30:.2f} GiB>"

    @property
    def num_shared(self) -> int:
        """Tokens whose keys and values are held."""
        return 0 if self.store is None else self.store.lens[0]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, on the device and on the host; of this rank, if several share the model. On a CPU
        with memory to spare they are held a second time, in its own layout."""
        return 0 if self.store is None else self.store.nbytes + sum(
            one.nbytes for one in (self.store.packed or {}).values())

    def meter(self) -> NgramMeter:
        """How likely looking up is right in the held tokens. One pass over them serves all questions."""
        if self._meter is None:
            self._meter = NgramMeter(self.tokens[: self.num_shared])
        return self._meter

    def save(self, path: str | Path) -> None:
        """Writes the document with its keys and values to a file, which `Engine.open` opens again.

        The file is safetensors with checksums. It is written beside its name and then renamed, so whatever happens,
        the name stands for the old file or for the new one. Every rank calls this. Raises UserError if the file cannot
        be written, or the disk is too small.
        """
        engine, length = self.engine, self.num_shared

        def layer(i: int) -> Sequence[Tensor]:
            if self.store is None:
                return [torch.zeros(len(engine.buffers.heads), 0, engine.target.config.head_dim)] * 2
            return self.store.whole_layer(i, length)

        with engine.holding_still():
            layout = layout_of(engine, len(self), length, self.store)
            prompt_cache_file.write(path, layout, self.about, self.tokens, layer, engine.buffers.heads,
                                    engine.target.group)

    @property
    def about(self) -> dict:
        """What a file says beside tokens, keys and values; see `KINDS`."""
        return self.engine.identity() | storable(**{name: getattr(self, name) for name in OF_DOCUMENT})

    def held(self, length: int) -> int:
        """`length`, the number of the first tokens, or 0 where layers with windows have not kept what follows them."""
        return length if self.store is not None and self.store.holds(0, length) else 0

    def part(self, length: int) -> "Prefix":
        """The first `length` tokens, a whole number of flush intervals, with the same storage. Raises UserError where
        they are not `held`."""
        if length == self.num_shared:
            return self
        if not self.held(length):
            raise UserError(f"windows have lost the first {length} of {self.num_shared} tokens; prefill these anew")
        return Prefix(self.engine, self.tokens[:length], self.store.part(length))

    def is_same(self, other: "Prefix | None") -> bool:
        """Whether both hold the same keys and values, in the same place."""
        return (other is not None and self.num_shared == other.num_shared
                and (self.store is other.store or self.store.k is other.store.k))

    def ids(self, question, chat_template_kwargs: dict | None = None) -> list[int]:
        """Ids of the document and a question about it.

        Text and ids are encoded apart, and follow the document's ids. With messages, the question ends the user's last
        message, or is a message of its own, and the chat template joins them. A list of messages is the whole
        conversation, which begins with those of the prefix. chat_template_kwargs: None takes the prefix's.
        """
        if self.messages is None:
            if is_messages(question) or chat_template_kwargs is not None:
                raise UserError("the prefix was made of text; ask by text or ids, and without chat_template_kwargs")
            if not isinstance(question, str):
                return self.tokens + self.engine.encode_prompt(question)
            return self.tokens + (self.engine.tokenizer_or_raise().encode(question, bos=False) if question else [])
        if isinstance(question, str):
            question = asked(self.messages, question)
        elif not is_messages(question) or not begins_with(question, self.messages):
            raise UserError("the prefix was made of messages, and this is no text, or messages that do not begin with "
                            "those of the prefix; give the question as text, or add messages to prefix.messages")
        variables = self.chat_template_kwargs if chat_template_kwargs is None else chat_template_kwargs
        ids = self.engine.encode_prompt(question, self.chat_template, variables, self.rendered_at)
        shared = min(common_length(ids, self.tokens), self.num_shared)
        if shared + JOINTS < self.num_shared and not self._has_warned:
            self._has_warned = True
            log.warning("%s of the document's %s tokens are computed anew with each question, since this chat template "
                        "with these chat_template_kwargs gives others from token %s on; make the document anew with "
                        "them", f"{len(self) - shared:,}", f"{len(self):,}", f"{shared:,}")
        return ids


def layout_of(engine: "Engine", num_tokens: int, length: int, store: PrefixStore | None = None) -> Layout:
    """The sizes of a file, at least. length: tokens that have keys and values, in a store; None: one yet to be made."""
    config, firsts = engine.target.config, ()
    [dtype] = (name for name, dtype in prompt_cache_file.DTYPES.items() if dtype == engine.target.dtype)
    if config.sliding_layers:
        firsts = tuple(max(length - config.sliding_window, 0) * (i in config.sliding_layers) if store is None else
                       store.first(i, length) for i in range(config.n_layer))
    return Layout(num_tokens, config.n_layer, config.n_kv_head * config.num_shards, length, config.head_dim, dtype,
                  firsts)


def check_room(path: str | Path, engine: "Engine", num_tokens: int) -> None:
    """Raises UserError if a document of `num_tokens` tokens cannot be written there. Every rank calls this."""
    nbytes = layout_of(engine, num_tokens, num_tokens).header("")[2]
    with prompt_cache_file.beside(path, nbytes, engine.target.group):
        pass


@contextlib.contextmanager
def opened(path: str | Path, engine: "Engine") -> Iterator[PrefixReader]:
    """A file, open for reading. Raises UserError if it is of another model or tokenizer, and as `PrefixReader` does."""
    with PrefixReader(path) as reader:
        about, mine = reader.about, engine.identity()
        altered = Altered(f"{path} is altered: it says what no document has; copy it again, or make it anew")
        if not _is_sound(about, len(reader.tokens)):
            raise altered
        for what in ("model", "tokenizer"):
            if about[what] != mine[what]:
                theirs, ours = (f"{one['name']}, {str(one[what])[:8]}" for one in (about, mine))
                raise UserError(f"{path} was made with another {what} ({theirs}) than this one ({ours}); open it with "
                                "the checkpoint, weights and max_seq_len that it was made with, or make it anew")
        layout, sizes = reader.layout, layout_of(engine, len(reader.tokens), reader.layout.length)
        is_late = len(layout.firsts) not in (0, len(sizes.firsts)) or any(
            first not in range(most + 1) for first, most in zip(layout.firsts, sizes.firsts, strict=False))
        sizes = replace(sizes, dtype=layout.dtype, firsts=layout.firsts)
        if is_late or layout != sizes or max(reader.tokens, default=0) >= engine.vocab_size:
            raise altered
        yield reader


def _is_sound(about: dict, num_tokens: int) -> bool:
    """Whether a document of `num_tokens` tokens may have these values, which may be of any kind."""
    if about.keys() != KINDS.keys() or not all(type(about[name]) in (kind, type(None)) for name, kind in KINDS.items()):
        return False
    with contextlib.suppress(ValueError):
        datetime.fromisoformat(about["rendered_at"] or "2000-01-01")
        part_of, messages = about["part_of"], about["messages"]
        return (part_of is None or part_of > num_tokens) and (messages is None or is_messages(messages))
    return False


def begins_with(messages: Sequence[dict], before: list[dict]) -> bool:
    """Whether a conversation goes on from another, whose last message may have become longer, as by `asked`."""
    # Tuples are lists, as a file gives them back.
    mine, theirs = (json.loads(json.dumps(list(one), default=repr)) for one in (messages[: len(before)], before))
    content = theirs[-1].get("content")
    if len(mine) == len(theirs) and isinstance(content, (str, list)) and type(mine[-1].get("content")) is type(content):
        mine[-1]["content"] = mine[-1]["content"][: len(content)]
    return mine == theirs


def storable(**about) -> dict:
    """These values as a file gives them back. Raises UserError if JSON cannot hold one of them."""
    for name, value in about.items():
        try:
            about[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError) as error:
            raise UserError(f"a file cannot hold these {name}: {error}; give texts, numbers, lists, dicts") from None
    return about


def asked(messages: list[dict], question: str) -> list[dict]:
    """Messages that end with a question of the user. Raises UserError for content that is no text or list of parts."""
    if not messages or messages[-1].get("role") != "user":
        return [*messages, {"role": "user", "content": question}]
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str):
        content = f"{content}\n\n{question}"
    elif isinstance(content, (list, tuple)):
        content = [*content, {"type": "text", "text": f"\n\n{question}"}]
    else:
        raise UserError(f"a question follows the last message, whose content ({content!r}) is neither a text nor parts")
    return [*before, {**last, "content": content}]


def common_length(*texts: Sequence[int]) -> int:
    """The number of equal tokens at the beginning of these texts."""
    low, high = 0, min(map(len, texts)) + 1  # slices compare at the speed of C
    while high - low > 1:
        middle = (low + high) // 2
        same = all(text[low:middle] == texts[0][low:middle] for text in texts[1:])
        low, high = (middle, high) if same else (low, middle)
    return low


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts part; None where one of them begins with the other."""
    length = common_length(one, other)
    return None if length == min(len(one), len(other)) else length


def check_prefix(prefix, engine: "Engine", chat_template: str | None = None) -> None:
    """Raises UserError for what is no prefix of this engine's, and for a template that is given beside it."""
    if not isinstance(prefix, Prefix) or prefix.engine is not engine:
        raise UserError("prefix must be what this engine's `prefill` or `open` returned; give a text to `prefill`. If "
                        "it is another engine's, save the prefix, and open the file with this one")
    if chat_template is not None:
        raise UserError("a prefix keeps the template that it was made with; give the template to `prefill`")
