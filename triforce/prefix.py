"""A document whose keys and values are computed once, for any number of questions about it."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import prefix_file
from .drafting.ngram import NgramMeter
from .errors import UserError
from .hf.tokenizer import is_messages
from .host import check_process, not_pickled, own_settings
from .kv.prefix import PrefixStore
from .parallel import Group, agreed
from .prefix_file import PrefixReader
from .prefix_path import as_path, holds_something

if TYPE_CHECKING:
    from .engine import Engine


class Keeping(NamedTuple):
    """Where a prefill is kept while it is done."""

    path: str | Path
    every: int  # tokens

    @contextlib.contextmanager
    def begun(self, tokens: list[int], identity: dict, group: Group | None) -> Iterator[PrefixReader | None]:
        """The file open for reading, if it is there, is not empty, and has the beginning of these tokens.

        Raises:
            UserError: it has something else.
        """
        path = as_path(self.path)
        if not agreed(group, holds_something(path)):
            yield None
            return
        with PrefixReader(path) as reader:
            prefix_file.check(reader.about, identity, path)
            if reader.tokens != tokens[: len(reader.tokens)]:
                same = common_length(reader.tokens, tokens)
                raise UserError(f"{path} keeps another document: of its {len(reader.tokens):,} tokens, the first "
                                f"{same:,} are those of this one; choose another name, or remove it")
            yield reader


class Prefix:
    """A document with its keys and values: `Engine.prefill` and `Engine.open` return it, `prefix=` takes it.

    Attributes:
        tokens: ids of the whole document.
        messages: what it was made of, or None; questions about messages go through the chat template.
        store: keys and values of the first `num_shared` tokens, whole flush intervals. Each conversation computes the
            few that remain. None: the document is shorter than a flush interval.
    """

    __reduce__ = not_pickled("a prefix", "save it, and open the file with the other engine")

    def __init__(self, engine: "Engine", tokens: list[int], store: PrefixStore | None):
        self.engine, self.tokens, self.store = engine, tokens, store
        self.messages: list[dict] | None = None
        self.chat_template: str | None = None
        self.chat_template_kwargs: dict | None = None
        self.num_read = 0  # tokens of it that a prefill found in a file
        self.part_of: int | None = None  # tokens of the document whose prefill goes on, where these are a part of it
        self._meter: NgramMeter | None = None

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
        return 0 if self.store is None else self.store.nbytes + sum(one.nbytes for one in self.store.packed or ())

    def meter(self) -> NgramMeter:
        """What looking up is good for in the tokens that are held: gone through once, for all that is asked."""
        if self._meter is None:
            self._meter = NgramMeter(self.tokens[: self.num_shared])
        return self._meter

    @own_settings()
    def save(self, path: str | Path) -> None:
        """Writes the document with its keys and values to a file, which `Engine.open` opens again.

        The file is safetensors with checksums. It is written beside its name and then renamed, so whatever happens,
        the name stands for the old file or for the new one. Every rank calls this.

        Raises:
            UserError: the file cannot be written, or the disk is too small.
        """
        engine, config = self.engine, self.engine.target.config
        check_process()
        prefix_file.write(path, self.about, self.tokens, self._layer, num_layers=config.n_layer,
                          n_kv_head=config.n_kv_head * config.num_shards, length=self.num_shared,
                          head_dim=config.head_dim, dtype=engine.target.dtype, heads=engine.caches.heads,
                          group=engine.target.group)

    @property
    def about(self) -> dict:
        """What a file says beside the tokens, and their keys and values."""
        part_of = {} if self.part_of is None else {"part_of": self.part_of}
        return {**self.engine.identity(), **part_of, **storable(
            messages=self.messages, chat_template=self.chat_template, chat_template_kwargs=self.chat_template_kwargs)}

    def is_kept(self, path: str | Path) -> bool:
        """Whether all of it was read from this file, so that there is nothing to write. Every rank calls this."""
        group, kept = self.engine.target.group, False
        if agreed(group, self.num_read == self.num_shared > 0):
            with PrefixReader(path) as reader:
                kept = reader.tokens == self.tokens and reader.about == self.about
        return agreed(group, kept)

    def _layer(self, i: int) -> tuple[Tensor, Tensor]:
        """K and V of layer i, [K, S, D] each, wherever they lie."""
        if self.store is None:
            config = self.engine.target.config
            return (torch.zeros(config.n_kv_head, 0, config.head_dim, dtype=self.engine.target.dtype),) * 2
        return self.store.whole_layer(i, self.num_shared)

    def part(self, length: int) -> "Prefix":
        """The first `length` tokens, a whole number of flush intervals, with the same storage."""
        if length == self.num_shared:
            return self
        return Prefix(self.engine, self.tokens[:length], self.store.part(length))

    def is_same(self, other: "Prefix | None") -> bool:
        """Whether both hold the same keys and values, in the same place."""
        return (other is not None and self.num_shared == other.num_shared
                and (self.store is other.store or self.store.k is other.store.k))

    def ids(self, question, chat_template_kwargs: dict | None = None) -> list[int]:
        """Ids of the document and a question about it.

        Text and ids are encoded apart, and follow the document's ids. With messages, the question ends the user's last
        message, or is a message of its own, and the chat template joins them. A list of messages is the whole
        conversation, which begins with those of the prefix.

        Args:
            chat_template_kwargs: in place of the prefix's. None: the prefix's.

        Raises:
            UserError: the question is of the wrong kind; messages do not begin with those of the prefix.
        """
        engine, template = self.engine, self.chat_template
        variables = self.chat_template_kwargs if chat_template_kwargs is None else chat_template_kwargs
        if is_messages(question):
            if self.messages is None:
                raise UserError("the prefix was made of text; give the question as text or ids")
            if not begins_with(question, self.messages):
                raise UserError("the messages do not begin with those of the prefix; give the question as text, or "
                                "add messages to prefix.messages")
            return engine.encode_prompt(question, template, variables)
        if self.messages is None:
            if chat_template_kwargs is not None:
                raise UserError("the prefix was made of text, which no chat template reads; drop chat_template_kwargs")
            if isinstance(question, str):
                return self.tokens + (engine.tokenizer_or_raise().encode(question, bos=False) if question else [])
            return self.tokens + engine.encode_prompt(question)
        if not isinstance(question, str):
            raise UserError("the prefix was made of messages; give the question as text")
        return engine.encode_prompt(asked(self.messages, question), template, variables)


def begins_with(messages: Sequence[dict], before: list[dict]) -> bool:
    """Whether a conversation goes on from another, whose last message may have become longer, as by `asked`."""
    *earlier, last = as_lists(before)
    *same, here = as_lists(messages[: len(before)])
    if same != earlier or {**here, "content": None} != {**last, "content": None}:
        return False
    mine, content = here.get("content"), last.get("content")
    if isinstance(content, str) and isinstance(mine, str):
        return mine.startswith(content)
    if isinstance(content, list) and isinstance(mine, list):
        return mine[: len(content)] == content
    return mine == content


def as_lists(value):
    """With lists in place of tuples, at any depth, as a file gives them back."""
    if isinstance(value, (list, tuple)):
        return [as_lists(one) for one in value]
    return {name: as_lists(one) for name, one in value.items()} if isinstance(value, dict) else value


def storable(**about) -> dict:
    """What a file gives back of these.

    Raises:
        UserError: JSON cannot say one of them.
    """
    for name, value in about.items():
        try:
            about[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError) as error:
            raise UserError(f"a file cannot hold these {name}: {error}; give texts, numbers, lists and dicts of "
                            "them") from None
    return about


def asked(messages: list[dict], question: str) -> list[dict]:
    """Messages that end with a question of the user.

    Raises:
        UserError: the last message is the user's, and its content is neither a text nor a list of parts.
    """
    *before, last = messages
    if last.get("role") != "user":
        return [*messages, {"role": "user", "content": question}]
    content = last.get("content")
    if isinstance(content, str):
        content = f"{content}\n\n{question}"
    elif isinstance(content, (list, tuple)):
        content = [*content, {"type": "text", "text": f"\n\n{question}"}]
    else:
        raise UserError(f"a question follows the last message, and its content ({content!r}) is neither a text nor a "
                        "list of parts")
    return [*before, {**last, "content": content}]


def common_length(*texts: Sequence[int]) -> int:
    """How many tokens these texts begin with in common."""
    shortest = min(map(len, texts))
    first = texts[0][:shortest]
    if all(text[:shortest] == first for text in texts[1:]):
        return shortest
    low, high = 0, shortest  # slices compare at the speed of C
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if all(text[:middle] == first[:middle] for text in texts[1:]) else (low, middle)
    return low


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts part; None where one of them begins with the other."""
    length = common_length(one, other)
    return None if length == min(len(one), len(other)) else length


def check_prefix(prefix, engine: "Engine", chat_template: str | None = None) -> None:
    """Raises UserError for what is no prefix of this engine's, and for a template that is given beside it."""
    if not isinstance(prefix, Prefix):
        raise UserError("prefix must be what this engine's `prefill` or `open` returned; give a text to `prefill`")
    if prefix.engine is not engine:
        raise UserError("this prefix is another engine's, which has its keys and values; ask that engine, or save the "
                        "prefix, and open the file with this one")
    if chat_template is not None:
        raise UserError("a prefix keeps the template that it was made with; give the template to `prefill`")
