"""Every option that a user can set, each written down once: its name, default, check and help.

`Settings` say how a hierarchy is built, `Placement` where and how it runs, `Sampling` from which distribution it draws.
`load`, `Engine.generate`, the command line's flags and their help are made from these fields. The command line reads
its flags by this before it imports PyTorch, which takes seconds: neither this module nor `tree.py` imports it at once.
"""

import dataclasses
import inspect
import math
import re
import textwrap
from argparse import Action, ArgumentError, BooleanOptionalAction
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .errors import UserError, not_known
from .tree import FOLLOWERS, TokenTree

if TYPE_CHECKING:
    import torch

MOST_ROWS = 512  # of a block with leaves, or of a tree
QUERIES = 64  # of a KV head, that a GPU's attention takes at a time; and rows that weights are read once for
CPU_ROWS = 4  # a CPU gives a row the same bits in blocks of any multiple of this number of rows, see cpu.py
Check = Callable[[str, object], None]  # (name, value); raises UserError


class ViewKind(NamedTuple):
    """How a view is chosen."""

    unit: str | None  # what is selected beside the sink and the newest tokens: a "chunk", by its mean key; a "token"
    renews: bool  # again and again; or once, by the prompt's last queries
    follows: bool = False  # in each step and layer, by the query that is about to read it


# Of the retrieval level's view; more of them in cache/views.py.
VIEWS = {"retrieval": ViewKind("chunk", renews=True), "query": ViewKind("chunk", renews=True, follows=True),
         "snapkv": ViewKind("token", renews=False), "streaming": ViewKind(None, renews=False)}


def option(default, help: str, check: Check | None = None, *, flag: str | None = "", more: dict | None = None,
           **argparse):
    """A field.

    Args:
        check: of a value that is not None. argparse: more for `add_argument`.
        flag: on the command line; "": the field's name; None: there is none.
    """
    return dataclasses.field(default=default, metadata={"help": help, "check": check, "flag": flag,
                                                        "argparse": argparse, **(more or {})})


def is_whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def must(be: str, holds: Callable[[object], bool]) -> Check:
    """A check. be: what a value must be, for the message."""

    def check(name: str, value) -> None:
        if not holds(value):
            raise UserError(f"{name} ({value!r}) must be {be}")

    return check


def whole(at_least: int, usual: int | str) -> Check:
    return must(f"a whole number, at least {at_least}; try {usual}", lambda x: is_whole(x) and x >= at_least)


def natural(default: int | None, at_least: int, usual: int, help: str, **more):
    """A field that is a whole number."""
    return option(default, help, whole(at_least, usual), type=int, **more)


def number(in_range: Callable[[float], bool], wanted: str) -> Check:
    return must(wanted, lambda x: isinstance(x, (int, float)) and in_range(x))


def one_of(*values) -> Check:
    return must(" or ".join(map(repr, values)), lambda x: x in values)


def as_numbers(value):
    """A setting, or a list of one a prompt, without the types of NumPy and PyTorch."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {as_numbers(key): as_numbers(one) for key, one in value.items()}
    return [as_numbers(one) for one in value] if isinstance(value, (list, tuple)) else value


def _number_or_text(value: str) -> int | float | str:
    """Of the command line. Whether it is what it must be, the field's check says."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(value)
    return value


class Options:
    """What `Settings` and `Placement` share: fields are checked as they are made."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = as_numbers(getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            if value is not None and field.metadata["check"] is not None:
                field.metadata["check"](field.name, value)


@dataclass(frozen=True)
class Settings(Options):
    """How a hierarchy is built. Shapes follow from these, so a change builds new caches."""

    draft: str | Path | bool | Callable | None = option(
        None, "the draft model: a folder, a repository id, or 'tiny'; 'ngram': what followed the newest tokens before; "
        "False ('none' as a flag): nothing; in Python also a function that makes a `Drafter` of a `Tape`. Default: the "
        "pair's own for 'tiny', else no model; with gamma 'auto' n-grams may draft, too")
    retrieval: bool = option(
        True, "a middle level checks drafts over a part of the cache; --no-retrieval leaves it out",
        one_of(True, False), flag="--no-retrieval", action="store_false")
    budget: int | float | None = option(
        None, "tokens that drafts read, or a share of the prompt: 0.1. Default: 1/32 of the prompt, from 1024 to 4096, "
        "twice as many where prompts share 512 tokens; with offload 1/2, up to 1/2 of the weights (see the guide)",
        must("a number of tokens, or a fraction of the prompt above 0 and at most 1; try 4096 or 0.1",
             lambda x: isinstance(x, int) or isinstance(x, float) and 0 < x <= 1), type=_number_or_text)
    gamma: int | str = option(
        "auto", "tokens drafted for a check by the full cache, or 'auto' (default), chosen for each round; at most "
        "block_size - 1. The distribution is the same. A seed repeats a text only with a number, or coupled sampling",
        must("a whole number, at least 1, or 'auto'; try 6", lambda x: x == "auto" or is_whole(x) and x > 0),
        type=_number_or_text)
    gamma_inner: int | None = natural(
        None, 1, 2, "tokens drafted for a verify over the view (default: 2; with gamma 'auto' up to 4, on a CPU 3)")
    sampling: str = option(
        "rejection", "how drawn tokens are checked: rejection (default) accepts more; with coupled a seed gives the "
        "text of speculate=False, whatever drafts", one_of("rejection", "coupled"), choices=("rejection", "coupled"))
    leaves: int | None = natural(
        None, 0, 1, "with coupled sampling: runners-up that are checked beside each drafted token (default: 1 on a GPU "
        "for a batch of at most 2, where at most 4 query heads share a KV head; else 0)")
    leaves_inner: int | None = natural(None, 0, 3, "the same at the retrieval level (default: 3 on a GPU for 2 rows)")
    tree_size: int = option(
        0, "with coupled sampling: rows of a verify that checks a tree, at most 512, in steps of 4. No path is longer "
        "than block_size - 1. It pays where a verify is slow: with offload (default 0: chains, with leaves)",
        must(f"a whole number from 0 to {MOST_ROWS}; try 128", lambda x: is_whole(x) and 0 <= x <= MOST_ROWS), type=int)
    draft_cache: str | None = option(
        None, "tokens that the target drafts with: those that the newest (retrieval, the default), the pending one "
        "(query) or the prompt's end (snapkv) attend to, or the first and the newest (streaming)", one_of(*VIEWS))
    chunk_size: int = natural(8, 1, 8, "tokens that are retrieved together (default 8)")
    recent: float = option(
        0.25, "share of the view that goes to the newest tokens (default 0.25)",
        number(lambda x: 0 <= x < 1, "a share of the budget, at least 0 and below 1; try 0.25"), type=float)
    rebuild_interval: int | None = natural(None, 1, 64, "tokens between choices of the view (default: by device, rows)")
    block_size: int | None = natural(
        None, 1, 8, "rows of a full verify, leaves aside, on a CPU in steps of 4 (default: 8 on a CPU; on a GPU 64 "
        "with offload, else 16, or fewer for more than 4 rows or query heads of a KV head; 1 where nothing drafts)")
    flush_interval: int | None = natural(None, 1, 128, "tokens between flushes (default 128; on a GPU 256)")
    draft_sink: int = natural(4, 0, 4, "first tokens that a draft model keeps (default 4)")
    draft_window: int | None = natural(
        None, 1, 256, "newest tokens that a draft model attends to (default: 1/8 of its positions, from 256 to 4096)")
    prefill_chunk_size: int | None = natural(
        None, 1, 2048, "tokens prefilled at a time (default: 1024; on a GPU 8192, and multiples of 128 are fastest)")
    piece_tokens: int | None = natural(
        None, 1, 2048, "tokens of an offloaded layer copied at a time (default: 64 MiB); more than two: no CUDA graph")
    reuse: bool = option(
        True, "compute once what prompts of a call, and the last call's text, begin with in common; --no-reuse: never",
        one_of(True, False), flag="--no-reuse", action="store_false")
    auto: bool = option(False, "resolved from gamma", flag=None)
    ngram: bool = option(False, "resolved from draft and gamma", flag=None)

    DERIVED = frozenset({"auto", "ngram"})  # `resolve` sets them; nobody else does

    @property
    def coupled(self) -> bool:
        """Whether all levels draw by the same noise."""
        return self.sampling == "coupled"

    @property
    def tree(self) -> TokenTree:
        """The block of a full verify."""
        return TokenTree(self.block_size, self.leaves, self.tree_size)

    @property
    def runners_up(self) -> int:
        """Tokens that drafters note beside each drafted one."""
        return max(self.leaves, self.leaves_inner, FOLLOWERS - 1 if self.tree_size else 0)

    @property
    def inner_tree(self) -> TokenTree:
        """The block of the retrieval level, where something drafts for it."""
        return TokenTree(1 + self.gamma_inner, self.leaves_inner)

    @property
    def scored_chunk_size(self) -> int:
        """Tokens whose mean key is kept; 0: none is."""
        return self.chunk_size if self.retrieval and VIEWS[self.draft_cache].unit == "chunk" else 0

    def resolve(self, device: "torch.device | str" = "cpu", *, has_model: bool = True, offload: bool | str = False,
                max_batch_size: int = 1, query_group: int = 1, shared: bool = False) -> "Settings":
        """With every field decided. Raises UserError where they do not fit each other.

        Args:
            has_model: whether a draft model drafts (a drafter of the user's own is told by `draft`).
            query_group: query heads of the target that share a KV head.
            shared: the rows of a batch have a prefix in common, which is read once for all of them.
        """
        cuda, auto = str(device).startswith("cuda"), self.auto or self.gamma == "auto"
        ngram = self.ngram or self.draft == "ngram"
        drafts = self.retrieval or ngram or has_model or callable(self.draft)
        grows = self.coupled and cuda and drafts and max_batch_size <= 2  # where rows cost next to nothing
        # Beside fewer than 8 drafted and pending tokens, leaves would take more than they bring.
        beside = grows and not self.tree_size and 2 * query_group * 8 <= QUERIES
        leaves, block = int(beside) if self.leaves is None else self.leaves, self.block_size
        if block is None:
            each = (1 + leaves) * query_group
            block = self._usual_block(cuda, offload, max_batch_size, each, shared) if drafts else 1
        if block > 1 and not cuda:
            block = -(-block // CPU_ROWS) * CPU_ROWS
        most = 4 if cuda else 3  # a CPU's step takes longer for each row more
        made = replace(
            self, block_size=block, auto=auto, gamma=max(block - 1, 1) if self.gamma == "auto" else self.gamma,
            ngram=ngram or self.gamma == "auto" and drafts and self.draft is not False,
            gamma_inner=self.gamma_inner or min(most if auto else 2, max(block - 1, 1)),
            leaves=leaves, tree_size=-(-self.tree_size // CPU_ROWS) * CPU_ROWS,
            leaves_inner=grows * 3 if self.leaves_inner is None else self.leaves_inner,
            draft_cache=self.draft_cache or ("retrieval" if self.retrieval else "streaming"),
            # No round goes on past a flush, and on a GPU what was flushed takes a kernel more: flushes are to be rare.
            # A view of few tokens has no room for as many.
            flush_interval=self.flush_interval or (256 if cuda and not 1 < (self.budget or 1) < 512 else 128),
            prefill_chunk_size=self.prefill_chunk_size or (8192 if cuda else 1024))
        made._check_fit(drafts, offload)
        return made

    def _usual_block(self, cuda: bool, offload: bool | str, max_batch_size: int, each: int, shared: bool) -> int:
        """On a GPU weights are read once for the rows of all prompts, and up to 64 rows cost little more than one. So
        are keys for up to 64 queries of a KV head; a drafted token has `each`. Over a shared prefix the queries of all
        prompts count, and the kernel takes 128 at a time. A block aims at that, and has at least 4 rows up to 256
        queries, else 2."""
        if not cuda:
            return 8
        if offload:
            return 64
        wanted = 1 + max(gamma for gamma in (self.gamma, self.gamma_inner, 0) if isinstance(gamma, int))
        most = min(16, self.flush_interval or 16)
        block = max(QUERIES // max(max_batch_size, each), 4)
        if shared:
            queries = max_batch_size * each  # of a row of the block
            block = min(block, max(2 * QUERIES // queries, 4 if queries <= QUERIES else 2))
        return min(max(block, wanted), most)

    def _check_fit(self, drafts: bool, offload: bool | str) -> None:
        """Of fields that are decided: do they fit each other?"""
        block, interval, size, cache = self.block_size, self.flush_interval, self.tree_size, self.draft_cache
        rows, most = max(self.tree.rows, self.inner_tree.rows), block - 1
        beside = self.leaves or self.leaves_inner
        rules = (
            (block > interval,
             f"block_size ({block}) must be between 1 and flush_interval ({interval}); try {min(8, interval)}"),
            (drafts and block == 1, "block_size (1) leaves no room for a drafted token beside the pending one; use at "
             "least 2, or draft=False and retrieval=False (--draft none --no-retrieval)"),
            (drafts and self.gamma > most,
             f"gamma ({self.gamma}) must be between 1 and block_size - 1 ({most}); try --gamma {most}"),
            (drafts and self.gamma_inner > most,
             f"gamma_inner ({self.gamma_inner}) must be between 1 and block_size - 1 ({most}); try {min(2, most)}"),
            (beside and rows > MOST_ROWS, f"leaves ({self.leaves}) and leaves_inner ({self.leaves_inner}) make blocks "
             f"of {rows} rows, and {MOST_ROWS} are the most; try 1 and 3"),
            ((beside or size) and not self.coupled, f"leaves ({self.leaves}), leaves_inner ({self.leaves_inner}) and "
             f"tree_size ({size}) need sampling 'coupled', and it is 'rejection'; add --sampling coupled"),
            (size and not self.retrieval, f"tree_size ({size}) needs a retrieval level, which grows the tree; leave "
             "out one of tree_size and retrieval=False (--tree-size, --no-retrieval)"),
            (size and self.leaves, f"tree_size ({size}) and leaves ({self.leaves}) are two kinds of trees; drop one"),
            (0 < size < 2 * block, f"tree_size ({size}) must be at least twice block_size ({block}); try a "
             + (f"tree_size of {4 * block}" if 4 * block <= MOST_ROWS else "block_size of 64")),
            (cache != "streaming" and not self.retrieval, f"draft_cache ({cache!r}) is for a retrieval level, which "
             "retrieval=False (--no-retrieval) leaves out; drop one of them. A draft model keeps draft_window tokens"),
            (self.retrieval and offload and VIEWS[cache].unit == "token",
             f"draft_cache {cache!r} chooses from a cache on the device; use 'retrieval' or 'streaming' with offload"))
        for is_broken, told in rules:
            if is_broken:
                raise UserError(told)
        if self.retrieval:
            budget = self.budget if isinstance(self.budget, int) else interval + 2 * self.chunk_size
            split_view(budget, self.chunk_size, interval, self.recent)

    def view_tokens(self, prompt_len: int, offloaded: int = 0, room: int | None = None, sharing: int = 1) -> int:
        """Tokens of the view that drafts, for a prompt; 0 without one.

        Args:
            offloaded: of a cache in host memory, the tokens that there is memory for, see `memory.for_views`.
            room: tokens that a row can hold; a view that holds them all is large enough.
            sharing: rows that read one view of what they share. It keeps fewer tokens of each.
        """
        if not self.retrieval:
            return 0
        chunk, smallest = self.chunk_size, self.flush_interval + 2 * self.chunk_size
        whole = math.inf if room is None else max(-(-room // chunk) * chunk, smallest)
        if isinstance(self.budget, int):
            return min(self.budget, whole)
        if self.budget is None:
            # Beside a verify from the host, a dearer step that is right oftener pays, while it mostly reads weights.
            budget = -(-max(min(-(-prompt_len // 32), 4096), 1024) // 256) * 256 * min(sharing, 2)
            budget = max(budget, min(prompt_len // 2, offloaded) // 4096 * 4096)
        else:
            budget = int(self.budget * prompt_len)
        return min(max(-(-budget // chunk) * chunk, smallest), whole)

    def split_budget(self, budget: int, base: int, capacity: int) -> tuple[int, int]:
        """Tokens of the two views that a row reads: of what is its own, and of the `base` tokens that all rows share.

        The share `recent` of the budget is a row's own, and the rest is for what is shared. Whatever is shorter leaves
        its tokens to the other. A long row gets more, beyond the budget: such a part of the rest as its own tokens are
        of all. With a budget of 4,096 and `recent` 0.25, a row of 3,000 own tokens behind 9,000 shared ones reads
        1,024 + 3,072 * 3,000 / 12,000 = 1,792 own tokens, and 3,072 shared ones.
        """
        if not base:
            return budget, 0
        chunk, least, own = self.chunk_size, self.flush_interval + 2 * self.chunk_size, capacity - base
        newest = min(max(-(-int(budget * self.recent) // chunk) * chunk, least), max(own, least))
        common = min(max(budget - newest, 2 * chunk), base)
        part = newest + (budget - newest) * own // capacity
        return max(min(-(-part // chunk) * chunk, own), least), common


def split_view(budget: int, chunk_size: int, flush_interval: int, recent: float = 0.25) -> tuple[int, int]:
    """Splits a budget into (window_size, number of selected chunks): the share `recent` of it, the sink one chunk.
    Raises UserError where it is no multiple of chunk_size, or too small for a sink, a window and one chunk."""
    if chunk_size < 1 or flush_interval % chunk_size:
        raise UserError(f"chunk_size ({chunk_size}) must divide flush_interval ({flush_interval}); try 8")
    smallest = flush_interval + 2 * chunk_size
    if budget < smallest:
        raise UserError(f"budget ({budget}) must be at least {smallest}: a sink chunk of {chunk_size}, a recent window "
                        f"of {flush_interval} and one chunk of {chunk_size}")
    if rest := budget % chunk_size:
        raise UserError(f"budget ({budget}) must be a multiple of chunk_size ({chunk_size}); try {budget - rest}")
    most = (budget - 2 * chunk_size) // flush_interval  # leaves a sink chunk and a selected one
    window_size = min(max(int(budget * recent) // flush_interval, 1), most) * flush_interval
    return window_size, (budget - chunk_size - window_size) // chunk_size


@dataclass(frozen=True)
class Placement(Options):
    """Where a model runs, in what, and how much memory it may have."""

    device: "str | torch.device | None" = option(None, "cpu, cuda, cuda:1 (default: cuda if there is one)")
    dtype: "str | torch.dtype | None" = option(None, "float32, float16, bfloat16; default: config.json's, CPU: float32")
    compile: bool | None = option(
        None, "compile steps (up to a minute, later 15 s); pays from 10,000 new tokens on. Default: on a GPU recorded "
        "graphs; --interactive compiles. --no-compile: neither", one_of(True, False), action=BooleanOptionalAction)
    max_seq_len: int | None = natural(None, 2, 4096, "most tokens of prompt and output (default: as needed)")
    max_batch_size: int = natural(1, 1, 8, "prompts that run side by side; more are served group by group", flag=None)
    offload: bool | str = option(
        False, "keep the KV cache, sliding windows aside, in pinned host memory; 'auto': what does not fit",
        one_of(True, False, "auto"), nargs="?", const=True, choices=["auto"], metavar="auto")
    num_resident_layers: int | None = natural(None, 0, 4, "of an offloaded cache, on the device (alias --on-chip)")
    resident_memory: int | str | None = option(None, "memory of the device for an offloaded cache, as bytes or 20GiB")
    weights: str | None = option(
        None, "'fp8': linear layers are rounded to a byte a weight, and all promises hold for the rounded model; GPUs "
        "from compute capability 8.9 on multiply so. 'wide': fp8 is widened. Default: as stored", one_of("fp8", "wide"))
    draft_dtype: str | None = option(
        None, "'fp8': the retrieval level drafts with an fp8 copy of the target, a byte a weight. The output stays "
        "exact. It needs a GPU of compute capability 8.9 or later", one_of("fp8"))
    draft_ranks: list[int] | None = option(
        None, "ranks of torchrun that share the draft, 0 among them. Default: each runs all of it", nargs="+", type=int,
        metavar="RANK")
    cache_dir: str | Path | None = option(
        None, "a folder for the keys and values of long prompts, which later prompts with the same beginning read")
    cache_dir_size: int | str = option("64GB", "bytes of all files in cache_dir; the newest stay (default 64GB)",
                                       lambda name, size: parse_size(size, name))

    @property
    def fills(self) -> bool:
        """Whether an offloaded cache has as many layers on the device as memory allows."""
        return self.num_resident_layers is None and (self.offload == "auto" or self.resident_memory is not None)

    def resolve(self) -> "Placement":
        """With device, compile and resident_memory decided. Raises UserError where fields clash or no device is."""
        device = find_device(self.device)
        if not self.offload and (self.num_resident_layers is not None or self.resident_memory is not None):
            raise UserError("num_resident_layers and resident_memory need offload; add offload=True (--offload)")
        if self.num_resident_layers is not None and self.resident_memory is not None:
            raise UserError("num_resident_layers and resident_memory were both given; give one")
        size = None if self.resident_memory is None else parse_size(self.resident_memory, "resident_memory")
        compiles = False if self.compile is None and device.type == "cpu" else self.compile
        return replace(self, device=device, compile=compiles, resident_memory=size)


def find_device(device) -> "torch.device":
    """Raises UserError where there is no such device."""
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise UserError(f"device {str(device)!r} is unknown; use 'cpu', 'cuda' or 'cuda:1'")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= count:
        raise UserError(f"device {found} was asked for, and PyTorch finds {count or 'no'} CUDA GPUs; use --device cpu, "
                        "another GPU, or a PyTorch that is built for yours")
    return found


def parse_size(size: int | str, name: str) -> int:
    """Bytes of a number, or of a text such as "20GiB" or "512 MB"."""
    if isinstance(size, int) and size >= 0:
        return size
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", str(size).lower())
    if match is None:
        raise UserError(f"{name} ({size!r}) must be a number of bytes or a size such as '20GiB'")
    amount, unit, binary = match.groups()
    if not unit and 0 < float(amount) < 2**20 and "b" not in str(size).lower():
        raise UserError(f"{name} ({size}) is a number of bytes, too few for anything; write '{str(size).strip()}GiB'")
    return int(float(amount) * (1024 if binary else 1000) ** " kmgt".index(unit or " "))


def per_row(default, neutral, dtype: str, help: str, in_range, wanted: str, type: type):
    """A field of `Sampling`. neutral: what None stands for; None: nothing, a number must be given."""
    return option(default, help, number(in_range, wanted), more={"neutral": neutral, "dtype": dtype}, type=type)


MOST_BIAS = 1e30  # divided by the least temperature, it is still a float32


def _check_bias(name: str, value) -> None:
    if not isinstance(value, dict):
        raise UserError(f"{name} ({value!r}) must be a dict, or one a prompt, from ids to numbers; try {{5: -100.0}}")
    for token, bias in value.items():
        if not is_whole(token):
            raise UserError(f"{name} has the id {token!r}, and ids are whole numbers; try {{5: -100.0}}")
        wanted = isinstance(bias, (int, float)) and (abs(bias) <= MOST_BIAS or bias == -math.inf)
        if not wanted or isinstance(bias, bool):
            raise UserError(f"{name} of token {token} ({bias!r}) must be a number from {-MOST_BIAS:g} to "
                            f"{MOST_BIAS:g}, or -inf, which forbids the token")


def check_biases(biases: list[dict[int, float]], vocab_size: int) -> None:
    """Of each row's logit_bias, checked by itself: raises UserError where it does not fit the vocabulary."""
    for bias in biases:
        for token in bias:
            if not 0 <= token < vocab_size:
                raise UserError(f"logit_bias: token id {token} is outside the vocabulary of {vocab_size}; ids go from "
                                f"0 to {vocab_size - 1}")
        if sum(value == -math.inf for value in bias.values()) == vocab_size:
            raise UserError(f"logit_bias forbids all {vocab_size} tokens of the vocabulary; leave one without -inf")


class _AddBias(Action):
    """ID=BIAS, once or several times, as a dict."""

    def __call__(self, parser, namespace, value, option=None):
        token, _, bias = value.partition("=")
        try:
            pair = {int(token): float(bias)}
        except ValueError:
            raise ArgumentError(self, f"{value!r} must be ID=BIAS, such as 5=-100 or 5=-inf") from None
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), **pair})


@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from. Each field is one value, or a list of one a prompt."""

    temperature: float = per_row(
        0.6, None, "float32", "0 is greedy. Default: the checkpoint's, or else 0.6 (alias --temp)",
        lambda x: 0 <= x <= 1e30, "0 (greedy) or a positive number, at most 1e30", float)
    top_p: float | None = per_row(
        0.9, 1.0, "float32", "keep the most probable tokens of this mass. Default: the checkpoint's, or else 0.9",
        lambda x: 0 < x <= 1, "above 0 and at most 1; 1 keeps every token", float)
    top_k: int | None = per_row(
        None, 0, "int64", "keep this number of the likeliest tokens (default: the checkpoint's)",
        lambda x: 0 <= x < 2**31 and int(x) == x, "a whole number from 0; 0 keeps every token", int)
    min_p: float | None = per_row(
        None, 0.0, "float32", "keep tokens of at least this chance, relative to the best (default: the checkpoint's)",
        lambda x: 0 <= x < 1, "at least 0 and below 1; 0 keeps every token", float)
    seed: int | None = per_row(
        None, 0, "int64", "of the random numbers; row i of a batch uses seed + i (default: drawn, and told). It "
        "repeats a text with coupled sampling, or with a number for gamma",
        lambda x: -(2**63) <= x < 2**63 and int(x) == x, "a whole number of at most 64 bits", int)
    logit_bias: dict | None = option(
        None, "added to the logits, before the temperature: {id: number} (on the command line ID=BIAS, may be "
        "repeated); -inf forbids a token. Output follows the biased distribution exactly",
        _check_bias, more={"neutral": {}, "dtype": None}, action=_AddBias, metavar="ID=BIAS")

    def rows(self, prompts: int, count: int = 1, draw: Callable[[], int] | None = None,
             vocab_size: int | None = None) -> "Sampling":
        """With lists of a checked value for each of `count` samples of each prompt, neutral where it is None.

        Args:
            draw: makes a seed where none is given. Seeds then count up among the samples that one stands for; without
                `draw` these have the same.
            vocab_size: what a logit_bias has to fit; None: nobody knows.

        Raises:
            UserError: a value is out of range, of the wrong kind, or a list of the wrong length.
        """
        columns, size = {}, prompts * count
        for field in dataclasses.fields(self):
            name, about, value = field.name, field.metadata, as_numbers(getattr(self, field.name))
            counts = name == "seed" and draw is not None
            if isinstance(value, list) and len(value) not in (prompts, size):
                raise UserError(f"{name} has {len(value)} values for {prompts} prompts and {size} answers; give one "
                                "value, one a prompt, or one an answer")
            values = value if isinstance(value, list) else [value]
            values = [(draw() if counts else about["neutral"]) if one is None else one for one in values]
            for one in values:
                about["check"](name, one)
            each = size // len(values)
            columns[name] = [int(one) + i if counts else one for one in values for i in range(each)]
            if counts:
                about["check"](name, max(columns[name]))
        if vocab_size is not None:
            check_biases(columns["logit_bias"], vocab_size)
        return Sampling(**columns)


def names_of(*classes: type) -> frozenset[str]:
    """The options that these classes take."""
    return frozenset(field.name for one in classes for field in dataclasses.fields(one)) - Settings.DERIVED


def split(options: dict, *classes: type, what: str, known: Iterable[str] = ()) -> tuple[list, dict]:
    """An instance of each class, made of its options; and the options that belong to none of them, but are `known`.
    Raises UserError for others. what: an option is, for the message."""
    known = names_of(*classes) | set(known)
    for name in options:
        if name in names_of(Settings, Placement) - known:
            raise UserError(f"{name} is no {what}; give it to triforce.load, whose engine has it for all answers")
        if name not in known:
            raise UserError(not_known(name, what, known))
    made = [one(**{name: options[name] for name in names_of(one) & options.keys()}) for one in classes]
    return made, {name: value for name, value in options.items() if name not in names_of(*classes)}


def takes(*classes: type):
    """A decorator: the function's `**options` are the fields of these classes, in its signature and its docstring."""

    def decorate(function):
        own = inspect.signature(function)
        fields = [field for one in classes for field in dataclasses.fields(one) if field.name in names_of(one)]
        options = [inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default,
                                     annotation=field.type) for field in fields]
        function.__signature__ = own.replace(parameters=[*list(own.parameters.values())[:-1], *options])
        indent = re.search(r"( *)options: OPTIONS", function.__doc__)[1]
        lines = [textwrap.fill(f"{field.name}: {field.metadata['help']}.", 118, initial_indent=indent,
                               subsequent_indent=indent + "    ") for field in fields]
        function.__doc__ = function.__doc__.replace(indent + "options: OPTIONS", "\n".join(lines))
        return function

    return decorate


def check_logprobs(k, vocab_size: int | None = None) -> None:
    """Raises UserError unless it is None, or a number of tokens from 0 to the vocabulary."""
    if k is not None:
        whole(0, 5)("logprobs", k)
        if vocab_size is not None and k > vocab_size:
            raise UserError(f"logprobs ({k}) must be at most {vocab_size}, the size of the vocabulary; try 5")


def as_count(name: str, value, usual: int) -> int:
    """The whole number, at least 1, that a value must be. Raises UserError if it is not."""
    value = as_numbers(value)
    whole(1, usual)(name, value)
    return value
