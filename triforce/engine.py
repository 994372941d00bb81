"""Runs a pair of models: prompt to prefill, to rounds, to text. Knows nothing of files or of the command line.

    Engine.stream -> State.round -> Speculator.round -> Transformer.forward

An Engine holds weights, tokenizer and settings, and the buffers of the conversation it last served, which the next
call takes over if they are large enough.
"""

import gc
import inspect
import logging
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import memory
from .cache import TargetCache
from .errors import UserError, not_known
from .generation import Generation, RowOutput, check_max_new_tokens, stop_strings
from .graphs import Compiler
from .model import Transformer
from .sampling import check_sampling
from .session import Session
from .state import Settings, State
from .tokenizer import Tokenizer

log = logging.getLogger("triforce")


class Engine:
    """See `triforce.load`, which makes one from checkpoints. Without a tokenizer prompts are ids and texts empty."""

    def __init__(self, target: Transformer, tokenizer: Tokenizer | None, draft: Transformer | None = None, *,
                 drafting: Transformer | None = None, settings: Settings | None = None,
                 budget: int | float | None = None, max_seq_len: int | None = None, max_batch_size: int = 1,
                 compile: bool | None = None, eos_ids: Sequence[int] = (), offload: bool | str = False,
                 num_resident_layers: int | None = None, resident_memory: int | None = None,
                 draft_ranks: Sequence[int] | None = None):
        self.target, self.tokenizer, self.draft, self.drafting = target, tokenizer, draft, drafting
        self.settings, self.budget = settings or Settings(), budget
        self.max_batch_size, self.eos_ids = max_batch_size, tuple(eos_ids)
        models = [target] if draft is None else [target, draft]
        self.vocab_size = min(model.config.vocab_size for model in models)
        if tokenizer is not None:
            self.vocab_size = min(self.vocab_size, tokenizer.vocab_size)
        self.vocab_size = self._agreed(self.vocab_size)  # a rank without the draft does not know its vocabulary
        self.draft_ranks = draft_ranks  # see State
        limit = target.config.max_len
        if max_seq_len is not None and (not isinstance(max_seq_len, int) or max_seq_len < 2):
            raise UserError(f"max_seq_len ({max_seq_len!r}) must be a whole number, at least 2")
        if max_seq_len is not None and max_seq_len > limit:
            raise UserError(f"max_seq_len ({max_seq_len}) exceeds the model's {self._limit_name()} ({limit}); "
                            f"use at most {limit}")
        self.max_seq_len = max_seq_len
        self.compile = target.device.type == "cuda" if compile is None else compile
        self.offload, self.num_resident_layers, self.resident_memory = offload, num_resident_layers, resident_memory
        self._state: State | None = None
        self._serving: Session | None = None  # whom the state belongs to

    def __repr__(self) -> str:
        config, dtype = self.target.config, str(self.target.dtype).removeprefix("torch.")
        drafts = [] if self.draft is None else [f"a model of {self.draft.config.num_parameters / 1e6:,.1f}M parameters"]
        drafts += ["retrieval"] * self.settings.retrieval + ["n-grams"] * self.settings.ngram
        return (f"<triforce.Engine: {config.architecture}, {config.num_parameters / 1e6:,.1f}M parameters, {dtype} on "
                f"{self.device}; drafts by {' and '.join(drafts) or 'nothing'}>")

    @property
    def device(self) -> torch.device:
        return self.target.device

    def generate(self, prompt, max_new_tokens: int = 256, **options) -> "Generation | list[Generation]":
        """Continues one prompt, or each of a list of prompts.

        Args:
            prompt: text (the tokenizer adds its own bos), a list of ids (taken as they are), a list of messages
                {"role", "content"} (the chat template applies), or a list of such prompts, answered by a list.
            max_new_tokens: exactly so many, unless the text ends before.
            options: see `stream`; temperature, top_p, top_k, min_p and seed may be lists, one value a prompt.

        Raises:
            UserError: an empty prompt, one too long for the model or the memory, a sampling value out of range.
        """
        many = _is_batch(prompt)
        pieces, sessions = self._serve(prompt if many else [prompt], max_new_tokens, **options)
        for _ in pieces:
            pass
        results = [result for session in sessions for result in session.results()]
        return results if many else results[0]

    def stream(self, prompt, max_new_tokens: int = 256, *, temperature: float = 0.6, top_p: float = 0.9,
               top_k: int | None = None, min_p: float | None = None, seed: int | None = None, stop=None,
               ignore_eos: bool = False, speculate: bool = True, **options) -> "Stream":
        """The same for one prompt, piece by piece: iterate for valid text, then read `.result`.

        Args:
            temperature: 0 is greedy. top_p, top_k, min_p: keep the most probable tokens only.
            seed: row i of a batch uses seed + i. None draws one; `stats.seed` tells it.
            stop: a string or several; the text ends before the first that appears.
            ignore_eos: go on after an end-of-text token.
            speculate: False: the same padded step one token at a time: the same greedy bits, only slower.
            one_row: with speculate=False, unpadded steps: the fastest autoregression; the same law, other bits.
            chat_template: a Jinja template in place of the checkpoint's.
            on_prefill: called with the share of the prefill that is done.
            on_decode: called after each round with the number of new tokens, of all prompts together.
        """
        if _is_batch(prompt):
            raise UserError("stream takes one prompt; generate takes a list")
        return Stream(*self._serve([prompt], max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k,
                                   min_p=min_p, seed=seed, stop=stop, ignore_eos=ignore_eos, speculate=speculate,
                                   **options))

    @torch.inference_mode()
    def logits(self, tokens) -> Tensor:
        """Logits after every token: [B, S] ids (list or tensor) -> [B, S, V] float32, V as in the checkpoint."""
        rows = [_as_ids(row) for row in tokens]
        if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
            raise UserError(f"logits takes [B, S] ids, S at least 1; got rows of {[len(row) for row in rows]} ids")
        tokens = torch.tensor(rows, device=self.device)
        self._check_ids(tokens.flatten().tolist())
        self.check_len(tokens.shape[1], 0)
        size, length = self.settings.prefill_chunk_size, tokens.shape[1]
        cache = TargetCache(self.target.config, self.target.rope, batch=1, capacity=length, block_size=1,
                            flush_interval=1, chunk_size=0, device=self.device, dtype=self.target.dtype)
        blocks = cache.prefill_blocks(0, 0, length, size)
        return torch.cat([self.target.output(self.target.prefill(row[None], blocks)).float() for row in tokens])

    def encode_prompt(self, prompt, chat_template: str | None = None) -> list[int]:
        """Ids of a prompt in any of the forms that `generate` takes."""
        if isinstance(prompt, str):
            ids = self._tokenizer().encode(prompt) if prompt else []
        elif isinstance(prompt, (bytes, bytearray)):
            raise UserError("a prompt of bytes could be text or ids; decode it: prompt.decode()")
        elif isinstance(prompt, Sequence) and prompt and all(isinstance(item, dict) for item in prompt):
            ids = self._tokenizer().apply_chat_template(prompt, chat_template)
        else:
            ids = _as_ids(prompt)
        if not ids:
            raise UserError("the prompt is empty; give at least one token")
        self._check_ids(ids)
        return ids

    def _serve(self, prompts, max_new_tokens: int, *, temperature=0.6, top_p=0.9, top_k=None, min_p=None, seed=None,
               stop=None, ignore_eos=False, speculate=True, one_row=False, chat_template=None, on_prefill=None,
               on_decode=None, **unknown) -> tuple[Iterator[tuple[int, str]], list[Session]]:
        """Checks everything, then gives a generator of (index of the prompt, piece of text), and a list that gets the
        sessions whose results these are."""
        if unknown:
            known = list(inspect.signature(self._serve).parameters)[1:-1]
            raise UserError("; ".join(not_known(name, "option of generate", known) for name in unknown))
        max_new_tokens = check_max_new_tokens(max_new_tokens)
        if one_row and speculate:
            raise UserError("one_row needs speculate=False: an unpadded step checks no drafted tokens")
        stops = stop_strings(stop)
        if stops:
            self._tokenizer()
        ids = [self.encode_prompt(prompt, chat_template) for prompt in prompts]
        for prompt in ids:
            self.check_len(len(prompt), max_new_tokens)
        temperature, top_p, top_k, min_p, seed = map(as_numbers, (temperature, top_p, top_k, min_p, seed))
        if not isinstance(seed, (list, tuple)):
            begin = self._agreed(random.getrandbits(32)) if seed is None else seed
            if isinstance(begin, float) and begin.is_integer():
                begin = int(begin)
            seed = [begin + i for i in range(len(ids))] if isinstance(begin, int) else [begin] * len(ids)
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
        check_sampling(sampling, len(ids))
        request = Request(ids, max_new_tokens, sampling, () if ignore_eos else self.eos_ids, stops, speculate, one_row,
                          on_prefill, on_decode)
        sessions: list[Session] = []
        return self._answer(request, sessions), sessions

    def _answer(self, request: "Request", sessions: list[Session]) -> Iterator[tuple[int, str]]:
        """Group by group, of as many prompts as run side by side."""
        for first in range(0, len(request.ids), self.max_batch_size):
            group = request.part(slice(first, first + self.max_batch_size))
            outputs = [RowOutput(self.tokenizer, group.eos_ids, group.stops, group.max_new_tokens) for _ in group.ids]
            session, where = Session(group.ids, outputs, group.sampling["seed"], self.device), None
            sessions.append(session)
            try:
                for row, piece in self._decode(session, group):
                    yield first + row, piece
            except (RuntimeError, MemoryError) as error:
                if not memory.ran_out(error):
                    raise
                where = self.device if isinstance(error, torch.OutOfMemoryError) else "the host"
            finally:
                session.close()
            if where is not None:  # here, where no traceback holds on to the buffers any more
                session.state = None
                self.release()
                offload = "" if self.offload or self.device.type == "cpu" else "--offload, "
                raise UserError(f"{where} ran out of memory; leave more of it free, or ask for less: {offload}"
                                "a smaller --prefill-chunk-size, --max-seq-len, --budget or --batch-size")

    def _decode(self, session: Session, request: "Request") -> Iterator[tuple[int, str]]:
        """Prefill and rounds of one group."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._serving = session
        session.state = state = self.prepare(request.ids, request.max_new_tokens, request.on_prefill,
                                             request.speculate, **request.sampling)
        while not session.done:
            if self._state is None:
                raise UserError("the engine was released while this generation was under way; begin another one")
            if self._serving is not session or self._state is not state:
                raise UserError("another generation has begun on this engine and taken over its caches; finish or "
                                "close a stream first, or load a second engine")
            pieces = session.round(request.speculate, request.one_row)
            if request.on_decode is not None:
                request.on_decode(session.num_tokens)
            yield from (piece for piece in pieces if piece[1])

    def release(self) -> None:
        """Frees the buffers of the last conversation."""
        self._state = None
        gc.collect()  # compiled steps make reference cycles
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def prepare(self, ids: list[list[int]], max_new_tokens: int, on_prefill=None, speculate: bool = True,
                **sampling) -> State:
        """A State with the prompts prefilled, ready for rounds. If it already holds just these, it is rewound.

        Args:
            speculate: see `State.begin`.
            sampling: temperature, top_p, top_k, min_p, seed: see `SamplingParams.set`.
        """
        state = self._state_for(len(ids), max(map(len, ids)), max_new_tokens)
        state.params.set(specialize=not self.compile, **sampling)
        # Greedy output is promised to be the same bits; drawn tokens follow the same law from steps of any size.
        # Ranks pad: a rank that has gone astray is to be noticed by its tokens, not by the shapes that it sends.
        loose = not state.params.greedy and self.target.group is None
        state.set_padding(not loose, tight=loose and self.device.type == "cpu" and not self.compile)
        if state.prompts == ids:
            state.rewind(max_new_tokens, speculate)
            return state
        state.reset()
        for row, prompt in enumerate(ids):
            def report(share, row=row):
                on_prefill((row + share) / len(ids))
            state.prefill(row, prompt, on_prefill and report)
        state.begin(max_new_tokens, speculate)
        state.prompts = ids
        return state

    def _state_for(self, batch: int, prompt_len: int, max_new_tokens: int) -> State:
        settings = self.settings
        needed = prompt_len + max_new_tokens + settings.block_size
        if self.max_seq_len is not None:
            needed = self.max_seq_len + settings.block_size
        budget = self.resolve_budget(prompt_len)
        state = self._state
        if state is not None and state.batch == batch and state.capacity >= needed and state.budget == budget:
            return state
        capacity = -(-needed // 1024) * 1024 if self.max_seq_len is None else needed
        del state
        self.release()  # before the new ones are planned
        resident = self._plan(batch, capacity, budget)
        # The same bytes a second time: only where they are a small part of what is free.
        kv_bytes = memory.prefix_bytes(self.target.config, self.target.config.n_layer, batch=batch, capacity=capacity,
                                       itemsize=self.target.dtype.itemsize)
        pack = 8 * kv_bytes < (memory.available(self.device) or 0)
        with torch.inference_mode(False):  # buffers that may be written inside and outside of that mode
            self._state = State(self.target, self.draft, settings, batch=batch, capacity=capacity, budget=budget,
                                vocab_size=self.vocab_size, compiler=Compiler(self.compile, self.device),
                                drafting=self.drafting, num_resident_layers=resident, pack=pack,
                                draft_ranks=self.draft_ranks)
        return self._state

    def _plan(self, batch: int, capacity: int, budget: int) -> int | None:
        """Checks that everything fits. Returns how many layers of the KV cache stay on the device; None: all."""
        config, draft = self.target.config, None if self.draft is None else self.draft.config
        sizes = {"batch": batch, "capacity": capacity, "itemsize": self.target.dtype.itemsize}

        def parts(num_resident: int | None) -> list[memory.Part]:
            return memory.cache_parts(config, draft, self.settings, budget=budget, num_resident_layers=num_resident,
                                      **sizes)

        resident = None
        if self.offload:
            resident = self.num_resident_layers
            if resident is None and (self.offload == "auto" or self.resident_memory is not None):
                resident = memory.fitting_layers(config, parts(0), self.device, self.resident_memory, **sizes)
            resident = self._agreed(resident or 0)
        host = memory.host_part(config, 0 if resident is None else config.n_layer - resident, **sizes)
        of_no_use = ("--batch-size",) if batch == 1 else ()
        if self.device.type == "cpu":  # the same memory, wherever a layer lies
            memory.check([host, *parts(resident)], self.device, (*of_no_use, "--offload", "--num-resident-layers"))
        else:
            memory.check(parts(resident), self.device, of_no_use)
            memory.check([host], torch.device("cpu"), of_no_use)
        if resident is not None:
            log.info("KV cache: %d of %d layers on %s, %.2f GiB in host memory", resident, config.n_layer, self.device,
                     host.bytes / 2**30)
        return resident

    def resolve_budget(self, prompt_len: int) -> int:
        """Tokens of the view that drafts, for a prompt; 0 without one."""
        if not self.settings.has_view:
            return 0
        chunk, interval = self.settings.chunk_size, self.settings.flush_interval
        if self.budget is None:
            # Beside a verify that streams from the host, a dearer step that is right more often pays.
            share, most = (16, 8192) if self.offload else (32, 4096)
            budget = min(max(-(-prompt_len // share // 256) * 256, 1024), most)
        elif isinstance(self.budget, float):
            budget = max(int(self.budget * prompt_len), interval + 2 * chunk)
        else:
            return self.budget
        return max(-(-budget // chunk) * chunk, interval + 2 * chunk)

    def _agreed(self, value):
        """With several ranks, rank 0's value."""
        return value if self.target.group is None else self.target.group.agree(value)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError("this engine has no tokenizer; give prompts as lists of ids, and no stop strings")
        return self.tokenizer

    def _limit_name(self) -> str:
        config = self.target.config
        return "sliding window" if config.max_len < config.max_position_embeddings else "positions"

    def _check_ids(self, ids: list[int]) -> None:
        largest, smallest = max(ids), min(ids)
        if smallest < 0 or largest >= self.vocab_size:
            bad = largest if largest >= self.vocab_size else smallest
            raise UserError(f"token id {bad} is outside the vocabulary of {self.vocab_size}; ids go from 0 to "
                            f"{self.vocab_size - 1}")

    def check_len(self, prompt_len: int, max_new_tokens: int) -> None:
        """Raises UserError if so many tokens do not fit the model, or max_seq_len."""
        limit = self.target.config.max_len
        what = f"the model's {self._limit_name()} ({limit})"
        if self.max_seq_len is not None:
            limit, what = self.max_seq_len, f"max_seq_len ({self.max_seq_len})"
        if prompt_len + max_new_tokens > limit:
            excess, ways = prompt_len + max_new_tokens - limit, []
            if prompt_len > excess:
                ways.append(f"cut the prompt by {excess} tokens to {prompt_len - excess} (--prompt-len)")
            if limit > prompt_len:
                ways.append(f"ask for at most {limit - prompt_len} new ones")
            remedy = " or ".join(ways) or f"cut the prompt below {limit} tokens and ask for fewer new ones"
            raise UserError(f"a prompt of {prompt_len} tokens and {max_new_tokens} new ones exceed {what}; {remedy}")


@dataclass
class Request:
    """What a call asks for, checked."""

    ids: list[list[int]]
    max_new_tokens: int
    sampling: dict  # by name, a value for all prompts or a list of one a prompt
    eos_ids: tuple[int, ...]
    stops: list[str]
    speculate: bool
    one_row: bool
    on_prefill: Callable[[float], None] | None
    on_decode: Callable[[int], None] | None

    def part(self, rows: slice) -> "Request":
        """The same for some of the prompts."""
        sampling = {name: value[rows] if isinstance(value, (list, tuple)) else value
                    for name, value in self.sampling.items()}
        return replace(self, ids=self.ids[rows], sampling=sampling)


class Stream:
    """Iterates over the pieces of one generation's text.

    `result` is its Generation: all of it once the iteration has ended; after an early stop, or in between, what there
    is, with the finish_reason "interrupted"; None before the first piece was asked for.
    """

    def __init__(self, pieces: Iterator[tuple[int, str]], sessions: list[Session]):
        self._pieces, self._sessions = pieces, sessions

    def __iter__(self):
        return self

    def __next__(self) -> str:
        return next(self._pieces)[1]

    @property
    def result(self) -> Generation | None:
        return self._sessions[0].results()[0] if self._sessions else None

    def close(self) -> None:
        """Ends the generation early; the engine is ready for the next call."""
        self._pieces.close()


def _is_batch(prompt) -> bool:
    if isinstance(prompt, (list, tuple)):
        return len(prompt) > 0 and (isinstance(prompt[0], (str, list, tuple)) or getattr(prompt[0], "ndim", 0) == 1)
    return getattr(prompt, "ndim", 0) == 2


def as_numbers(value):
    """A setting, or a list of one a prompt, without the types of NumPy and PyTorch."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [as_numbers(one) for one in value] if isinstance(value, (list, tuple)) else value


def _as_ids(prompt) -> list[int]:
    """A list of whole numbers from a list, a tuple, a tensor or an array of one dimension."""
    try:
        return [operator.index(token) for token in (prompt.tolist() if hasattr(prompt, "tolist") else prompt)]
    except TypeError:
        raise UserError("a prompt is text, a list of whole numbers (ids), or a list of messages {role, content}; "
                        f"this one is of type {type(prompt).__name__}") from None

