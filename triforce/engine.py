"""Runs a pair of models: prompt to prefill, to rounds, to text. Knows nothing of files or of the command line.

    Engine.stream -> Session.round -> State.round -> Hierarchy.round -> Speculator.round -> Transformer.forward

An Engine holds weights, tokenizer and settings, and the buffers of the conversation it last served, which the next
call takes over if they are large enough.
"""

import contextlib
import inspect
import logging
import operator
import random
import reprlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import torch
from torch import Tensor

from . import finite, memory, prefix_file
from .caches import Caches, Models
from .chat import Chat
from .config import (
    Placement,
    Sampling,
    Settings,
    as_numbers,
    check_biases,
    check_logprobs,
    check_max_new_tokens,
    split,
    takes,
    whole,
)
from .errors import TooLong, UserError
from .finite import NotFinite
from .free_memory import check_answers
from .generation import Generation, RowOutput, special_ids, stop_ids, stop_strings
from .hf.fingerprint import model_fingerprint, model_name, tokenizer_fingerprint, weights_fingerprint
from .hf.tokenizer import Tokenizer, is_messages
from .host import belongs_here, check_process, is_forked, not_pickled, own_settings
from .keep import check_keep, cut
from .kv.blocks import prefill_blocks
from .kv.target import TargetCache
from .model import Transformer
from .parallel import agreed
from .plan import AUTOREGRESSION, ONE_ROW, PADDED, Padding, Plan
from .prefix import Keeping, Prefix, asked, check_prefix, common_length, opened, storable
from .prefix_path import check_target, holds_something
from .render import Bar, characters, in_notebook, notebook_bars, spans
from .session import Session
from .state import State
from .streams import ComputeStream
from .threads import Threads

log = logging.getLogger("triforce")


class Engine:
    """See `triforce.load`, which makes one from checkpoints. Without a tokenizer prompts are ids and texts empty.

    Args:
        drafting: the target's weights for the retrieval level, quantized say. None: the target itself.
        settings, placement: as users give them; see config.py.
        eos_ids: ids that end a text.
        folder: of the checkpoint, by which saved prefixes know the model. None: they know it by its weights.
        compute_stream: that the weights were read on. None: one of its own.
        defaults: sampling values of the checkpoint, which stand for those of `Sampling` that a call does not give.
    """

    __reduce__ = not_pickled("an engine", "load one in each process that needs it")

    @own_settings()
    def __init__(self, target: Transformer, tokenizer: Tokenizer | None, draft: Transformer | None = None, *,
                 drafting: Transformer | None = None, settings: Settings | None = None,
                 placement: Placement | None = None, eos_ids: Sequence[int] = (), folder: Path | None = None,
                 compute_stream: ComputeStream | None = None, defaults: dict[str, float] | None = None):
        self.defaults = defaults or {}
        self.target, self.tokenizer, self.draft, self.drafting = target, tokenizer, draft, drafting
        settings, placement = settings or Settings(), placement or Placement()
        self.placement = replace(placement, device=target.device).resolve()
        self.eos_ids = tuple(eos_ids)
        models = [target] if draft is None else [target, draft]
        self.vocab_size = min(model.config.vocab_size for model in models)
        if tokenizer is not None:
            self.vocab_size = min(self.vocab_size, tokenizer.vocab_size)
        self.vocab_size = agreed(target.group, self.vocab_size)  # a rank without the draft does not know its vocabulary
        limit, longest = target.config.max_len, placement.max_seq_len
        if longest is not None and longest > limit:
            raise UserError(f"max_seq_len ({longest}) exceeds the model's {target.config.limit_name} ({limit}); "
                            f"use at most {limit}")
        self.compute_stream = compute_stream or ComputeStream(target.device)
        self.caches = Caches(self, Models(target, draft, drafting), settings)
        self.threads = Threads(target.device, interval=self.settings.flush_interval, dtype=target.dtype)
        self._serving: Session | None = None  # whom the state belongs to
        self._num_prepared = 0  # calls of `prepare`
        self._folder, self._identity = folder, None
        belongs_here()

    def __repr__(self) -> str:
        config, dtype = self.target.config, self.target.dtype_name
        drafts = [] if self.draft is None else [f"a model of {self.draft.config.num_parameters / 1e6:,.1f}M parameters"]
        if self.settings.retrieval:
            drafts.append(f"a {self.settings.draft_cache} view")
        drafts += ["a drafter of the user's"] * callable(self.settings.draft) + ["n-grams"] * self.settings.ngram
        return (f"<triforce.Engine: {config.architecture}, {self.num_parameters / 1e6:,.1f}M parameters, {dtype} on "
                f"{self.device}; drafts by {', '.join(drafts) or 'nothing'}>")

    @property
    def settings(self) -> Settings:
        """Resolved."""
        return self.caches.settings

    @property
    def num_parameters(self) -> int:
        """Of the whole target, over all ranks."""
        return self.target.config.num_parameters * self.target.config.num_shards

    @property
    def device(self) -> torch.device:
        return self.target.device

    def generate(self, prompt, max_new_tokens: int = 256, *, prefix: Prefix | None = None,
                 num_samples: int | None = None, **options) -> "Generation | list":
        """Continues one prompt, or each of a list of prompts.

        Args:
            prompt: text (the tokenizer adds its own bos), a list of ids (taken as they are), a list of messages
                {"role", "content"} (the chat template applies), or a list of such prompts, answered by a list.
            max_new_tokens: exactly so many, unless the text ends before.
            prefix: the document that the prompts are questions about, see `prefill`. Its keys and values are read once
                for all prompts, and only the questions are computed.
            num_samples: continuations of each prompt; each result is then a list of so many. They have the seeds seed,
                seed + 1, ..., counted on from prompt to prompt; those of a prompt with a seed of its own count from it.
            options: see `stream`; those of `Sampling` may be lists, one value a prompt.

        Raises:
            UserError: an empty prompt, one too long for the model or the memory, a sampling value out of range.
        """
        many = _is_batch(prompt)
        prompts = list(prompt) if many else [prompt]
        count = 1 if num_samples is None else as_numbers(num_samples)
        whole(1, 8)("num_samples", count)
        with notebook_bars(options, len(prompts) * count * check_max_new_tokens(max_new_tokens)):
            pieces, sessions, _ = self._serve(prompts, max_new_tokens, prefix=prefix, count=count, **options)
            with self.compute_stream.lock:
                for _ in pieces:
                    pass
        results = [result for session in sessions for result in session.results()]
        if num_samples is not None:
            results = [results[first : first + count] for first in range(0, len(results), count)]
        return results if many else results[0]

    def prefill(self, document, *, chat_template: str | None = None, chat_template_kwargs: dict | None = None,
                on_progress=None, keep: str | Path | None = None, keep_every: int = 65_536) -> Prefix:
        """Computes the keys and values of a document, for any number of questions, samples or conversations about it.

        Args:
            document: text, ids or a list of messages, as `generate` takes them. With messages, a question ends the last
                message, if it is the user's; the tokens that all rendered prompts begin with are computed.
            chat_template, chat_template_kwargs: see `stream`. Questions use them; a question may bring other kwargs.
            on_progress: called with the share of the work that is done.
            keep: a file that the prefix is saved to after about every `keep_every` tokens, and at the end. If the file
                exists and has the beginning of this document, the prefill continues from it: so an interrupted one
                is not lost, and a long one may be done in parts.

        Returns:
            a `Prefix`, which holds the memory for as long as it lives.

        Raises:
            UserError: an empty document, or one too long for the model or the memory; a file to keep it in that holds
                another one.
        """
        whole(1, 65_536)("keep_every", keep_every)
        messages = list(document) if is_messages(document) else None
        if keep is not None:  # before hours of work
            check_target(keep)
            storable(messages=messages, chat_template=chat_template, chat_template_kwargs=chat_template_kwargs)
        rendered_at = None
        if messages is None:
            ids = self.encode_prompt(document)
        else:
            rendered_at = agreed(self.target.group, datetime.now().isoformat(timespec="seconds"))
            if keep is not None and agreed(self.target.group, holds_something(keep)):
                with opened(keep, self) as reader:  # a template that names the day is told that of the beginning
                    rendered_at = reader.about["rendered_at"] or rendered_at
            ids = self.encode_beginning(messages, chat_template, chat_template_kwargs, rendered_at)
        self.check_len(len(ids), 1)
        with self._computing():
            self._end_stream()
            prefix = self.caches.compute(ids, self.threads.between(on_progress),
                                         None if keep is None else Keeping(keep, keep_every, rendered_at))
            if prefix.store is not None:
                self.caches.pack(prefix.store)  # here, so that no question waits for it
        prefix.messages, prefix.chat_template = messages, chat_template
        prefix.chat_template_kwargs, prefix.rendered_at = chat_template_kwargs, rendered_at
        if keep is not None and not prefix.is_kept(keep):
            prefix.save(keep)
        return prefix

    @own_settings()
    def open(self, path: str | Path) -> Prefix:
        """A document that `Prefix.save` wrote, in this process or another: on another device, offloaded or not, by
        another number of ranks. Keys and values of another dtype are converted. Every rank calls this.

        Raises:
            UserError: there is no such file; it is damaged; it belongs to another model or tokenizer; the prefill that
                kept it was broken off; it does not fit the memory.
        """
        with opened(path, self) as reader:
            if (part_of := reader.about["part_of"]) is not None:
                raise UserError(f"{path} has {len(reader.tokens):,} of the {part_of:,} tokens of its document, whose "
                                "prefill was broken off; begin that again with the same file (keep=, or --save-prefix "
                                "and --save-every), and it goes on from there")
            self.check_len(len(reader.tokens), 1, len(reader.tokens))
            if (dtype := prefix_file.DTYPES[reader.layout.dtype]) != self.target.dtype:
                log.info("%s was saved in %s; its keys and values are converted to %s", path,
                         str(dtype).removeprefix("torch."), self.target.dtype_name)
            with self._computing():
                self._end_stream()
                prefix = self.caches.read(reader)
            for name in ("messages", "chat_template", "chat_template_kwargs", "rendered_at"):
                setattr(prefix, name, reader.about[name])
            return prefix

    @own_settings()
    def identity(self) -> dict:
        """What a saved prefix must have in common with this engine: fingerprints of the model and of the tokenizer. And
        the name of the model, for who reads that they differ."""
        if self._identity is None:
            folder, longest = self._folder, self.placement.max_seq_len
            self._identity = {
                "model": (weights_fingerprint(self.target) if folder is None else
                          model_fingerprint(folder, longest, self.placement.weights)),
                "tokenizer": None if self.tokenizer is None else tokenizer_fingerprint(self.tokenizer),
                "name": model_name(folder, self.target.config.architecture, self.num_parameters)}
        return self._identity

    def chat(self, prefix: Prefix | None = None, **options) -> Chat:
        """A conversation, about a document if there is a prefix.

        With a chat template, a turn is a message of the user. Without one, or over a prefix made of text, what is said
        stands between empty lines, and the answer continues it.

        Args:
            options: `system`, a text that the conversation begins with; `chat_template`; and what `stream` takes, for
                all turns.
        """
        return Chat(self, prefix, **options)

    def check_options(self, options: dict) -> None:
        """Raises UserError for a name that is no option of `stream`."""
        known = generate_options()
        split({name: value for name, value in options.items() if name not in known}, Sampling,
              what="option of a turn", known=known)

    @takes(Sampling)
    def stream(self, prompt, max_new_tokens: int = 256, *, prefix: Prefix | None = None, stop=None,
               stop_token_ids=None, ignore_eos: bool = False, speculate: bool = True, one_row: bool = False,
               logprobs: int | None = None, keep: str | None = None, chat_template: str | None = None,
               chat_template_kwargs: dict | None = None, on_prefill=None, on_decode=None, **options) -> "Stream":
        """Continues one prompt, piece by piece: iterate over the text, then read `.result`. Without a tokenizer pieces
        are empty, one a round.

        Args:
            prefix: what the prompt is a question about; see `prefill`.
            options: OPTIONS
            stop: a string or several; the text ends before the first that appears. One that is a special token, as
                "<|eot_id|>", is a stop id.
            stop_token_ids: ids that end the text as an end-of-text token does, with ignore_eos too: the token is kept
                in `tokens`, and is no part of `text`.
            ignore_eos: go on after an end-of-text token.
            speculate: False: one token at a time, in the padded steps of speculation: the same greedy bits, slower.
            one_row: with speculate=False: unpadded steps, the fastest autoregression; same distribution, other bits.
            logprobs: fills `Generation.logprobs`: an entry a token, with so many of the most probable tokens; 0: with
                none of these. Each round then waits for the device a second time, and runs the output layer once more.
            keep: which part is kept of a prompt that is too long for the model or max_seq_len beside max_new_tokens:
                the "start", the "end", or "both", half of it each. A bos at its start is kept. Tokens of a chat
                template are cut like others. None: such a prompt is an error.
            chat_template: a Jinja template in place of the checkpoint's.
            chat_template_kwargs: what the template reads besides the messages: {"enable_thinking": False} for Qwen3,
                {"tools": [...]}.
            on_prefill: called with the share of the prefill that is done.
            on_decode: called after each round with the number of new tokens, of all prompts together.
        """
        if _is_batch(prompt) or "num_samples" in options:
            raise UserError("stream gives one answer to one prompt; generate takes a list, and num_samples")
        if on_prefill is None and in_notebook():
            on_prefill = Bar("prefill", 100, "%")
        return Stream(*self._serve([prompt], max_new_tokens, prefix=prefix, stop=stop, stop_token_ids=stop_token_ids,
                                   ignore_eos=ignore_eos, speculate=speculate, one_row=one_row, logprobs=logprobs,
                                   keep=keep, chat_template=chat_template,
                                   chat_template_kwargs=chat_template_kwargs, on_prefill=on_prefill,
                                   on_decode=on_decode, **options))

    def logits(self, tokens, last: int | None = None) -> Tensor:
        """Logits after every token, or after the last ones: [B, S] ids (list or tensor) -> [B, S, V] float32, V as in
        the checkpoint.

        Args:
            last: only after so many tokens at the end, [B, last, V]: the output layer is not run for the others, nor is
                there memory for their logits. Equal to those of None but for rounding.

        Raises:
            UserError: rows of different lengths, ids outside the vocabulary, more than fit the model, last above S.
        """
        if isinstance(tokens, str) or not _is_sequence(tokens) or not all(map(_is_sequence, tokens)):
            raise UserError("logits takes [B, S] ids, a list of rows; put the ids of one text into a list of their "
                            "own: [[5, 6, 7]], or [engine.encode_prompt(text)]")
        rows = [_as_ids(row) for row in tokens]
        if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
            raise UserError(f"logits takes [B, S] ids, S at least 1; got rows of {[len(row) for row in rows]} ids")
        self._check_ids([token for row in rows for token in row])
        size, length = self.settings.prefill_chunk_size, len(rows[0])
        self.check_len(length, 0)
        if last is not None:
            whole(1, 1)("last", last := as_numbers(last))
            if last > length:
                raise UserError(f"last ({last}) must be at most {length}, the number of ids in a row; leave it out for "
                                "all of them")
        first = 0 if last is None else length - last
        with self._computing(), torch.inference_mode():
            cache = TargetCache(self.target.config, self.target.rope, batch=1, capacity=length, block_size=1,
                                flush_interval=1, chunk_size=0, device=self.device, dtype=self.target.dtype)
            blocks = prefill_blocks(cache, range(1), 0, length, size)
            tokens = torch.tensor(rows, device=self.device)
            hidden = (self.target.prefill(row[None], blocks)[:, first:] for row in tokens)  # [1, S or last, dim] each
            found = torch.cat([self.target.output(one).float() for one in hidden])
        return self.compute_stream.hand_out(found)

    def explain_not_finite(self, tokens: list[int]) -> UserError:
        """What to tell of logits that are not finite after these tokens: which part of the model, and which position,
        they come from. Takes a prefill, slowly, and the room of one. Every rank calls this."""
        self.release()
        with self._computing():
            cache = self.caches.allocate(-(-len(tokens) // self.settings.flush_interval) * self.settings.flush_interval)
            found = finite.origin(self.target, cache, tokens, self.settings.prefill_chunk_size)
        return finite.explain(self.target, found, len(tokens))

    @contextlib.contextmanager
    def working(self):
        """Within, this thread of the program computes on this engine, and no other does."""
        with self.holding_still(), self.threads.working():
            yield

    @contextlib.contextmanager
    def _computing(self):
        """`working`, for what is no answer."""
        with self.working():
            self.caches.begin()
            yield

    @contextlib.contextmanager
    def holding_still(self):
        """Within, what this engine holds of its last text stays what it is: other threads of this program wait. What
        the program sets for PyTorch is out of force."""
        check_process()
        with self.compute_stream.alone(), own_settings():
            yield

    def encode_prompt(self, prompt, chat_template: str | None = None, chat_template_kwargs: dict | None = None,
                      rendered_at: str | None = None) -> list[int]:
        """Ids of a prompt in any of the forms that `generate` takes. rendered_at: the time that the chat template is
        told, see `Prefix`; None: the present one."""
        if isinstance(prompt, str):
            ids = self.tokenizer_or_raise().encode(prompt) if prompt else []
        elif isinstance(prompt, (bytes, bytearray)):
            raise UserError("a prompt of bytes could be text or ids; decode it: prompt.decode()")
        elif is_messages(prompt):
            if rendered_at is not None and isinstance(chat_template_kwargs, (dict, type(None))):
                now = datetime.fromisoformat(rendered_at).strftime
                chat_template_kwargs = {"strftime_now": now, **(chat_template_kwargs or {})}
            ids = self.tokenizer_or_raise().apply_chat_template(prompt, chat_template, chat_template_kwargs)
        else:
            ids = _as_ids(prompt)
        if not ids:
            raise UserError("the prompt is empty; give at least one token")
        self._check_ids(ids)
        return ids

    def encode_beginning(self, messages: list[dict], chat_template: str | None = None,
                         chat_template_kwargs: dict | None = None, rendered_at: str | None = None) -> list[int]:
        """Ids that all prompts begin with in which a question follows these messages."""
        rendered_at = rendered_at or datetime.now().isoformat()  # the same for both
        rendered = [self.encode_prompt(asked(messages, question), chat_template, chat_template_kwargs, rendered_at)
                    for question in ("a?", "The b.")]
        return rendered[0][: common_length(*rendered)]

    def _serve(self, prompts, max_new_tokens: int, *, count: int = 1, prefix=None, stop=None, stop_token_ids=None,
               ignore_eos=False, speculate=True, one_row=False, logprobs=None, keep=None, chat_template=None,
               chat_template_kwargs=None, on_prefill=None, on_decode=None,
               **options) -> tuple[Iterator[tuple[int, str]], list[Session], threading.Event]:
        """Checks everything, then gives a generator of (index of the prompt, piece of text), a list that gets the
        sessions whose results these are, and what ends the generation after the round that is under way, once it is
        set. count: samples of each prompt, which is encoded once."""
        check_process()
        defaults = {name: value for name, value in self.defaults.items() if name not in options}
        [sampling], _ = split({**defaults, **options}, Sampling, what="option of generate", known=generate_options())
        if as_numbers(sampling.temperature) == 0:  # the most probable token is the same with all others
            defaults = {name: value for name, value in defaults.items() if name == "temperature"}
        max_new_tokens = check_max_new_tokens(max_new_tokens)
        if one_row and speculate:
            raise UserError("one_row needs speculate=False: an unpadded step checks no drafted tokens")
        stops, ends = stop_strings(stop), stop_ids(stop_token_ids)
        check_logprobs(logprobs := as_numbers(logprobs), self.vocab_size)
        if ends:
            self._check_ids(ends, "stop_token_ids: ")
        if stops:
            ends += special_ids(stops, self.tokenizer_or_raise())
        check_keep(keep)
        for name, callback in (("on_prefill", on_prefill), ("on_decode", on_decode)):
            if callback is not None and not callable(callback):
                raise UserError(f"{name} ({callback!r}) must be a function of one number")
        if prefix is not None:
            check_prefix(prefix, self, chat_template)
            if keep is not None:
                raise UserError("keep says which part of a prompt is left; a prefix is kept whole: drop one of them")
        check_answers(len(prompts) * count, max_new_tokens)
        room, ids, lengths = self.room(max_new_tokens), [], []
        for index, prompt in enumerate(prompts):
            try:
                one = (self.encode_prompt(prompt, chat_template, chat_template_kwargs) if prefix is None else
                       prefix.ids(prompt, chat_template_kwargs))
                lengths += [len(one)] * count
                if keep is not None and room > 0:
                    one = cut(one, room, keep, getattr(self.tokenizer, "bos_id", None))
                self.check_len(len(one), max_new_tokens, 0 if prefix is None else len(prefix))
            except UserError as error:
                raise type(error)(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None
            ids += [one] * count
        sampling = sampling.repeated(len(prompts), count)
        sampling = sampling.with_seed(len(ids), lambda: agreed(self.target.group, random.getrandbits(32)))
        check_biases(sampling.columns(len(ids))["logit_bias"], self.vocab_size)
        plan = None if speculate else ONE_ROW if one_row else AUTOREGRESSION
        request = Request(ids, prefix, max_new_tokens, sampling, (*ends, *(() if ignore_eos else self.eos_ids)), stops,
                          plan, on_prefill, on_decode, logprobs,
                          [length - len(prompt) for length, prompt in zip(lengths, ids, strict=True)], defaults)
        sessions: list[Session] = []
        return self._answer(request, sessions), sessions, request.is_cancelled

    def _answer(self, request: "Request", sessions: list[Session]) -> Iterator[tuple[int, str]]:
        """Group by group, of as many prompts as run side by side."""
        with self.holding_still():
            self.caches.begin()
            size = self.caches.rows(request.ids, request.max_new_tokens, request.prefix)
        for first in range(0, len(request.ids), size):
            group = request.part(first, min(first + size, len(request.ids)), sum(one.num_tokens for one in sessions))
            outputs = [RowOutput(self.tokenizer, group.eos_ids, group.stops, group.max_new_tokens) for _ in group.ids]
            session = Session(group.ids, outputs, group.sampling.seed, self.device, group.logprobs,
                              group.dropped, group.defaults)
            where = tokens = None
            sessions.append(session)
            try:
                for row, piece in self._decode(session, group):
                    yield first + row, piece
            except NotFinite as error:
                tokens = error.tokens
            except (RuntimeError, MemoryError) as error:
                if not memory.ran_out(error):
                    raise
                where = self.device if isinstance(error, torch.OutOfMemoryError) else "the host"
                shortage = memory.shortage(error, self.device)
            finally:
                if not is_forked() and not sys.is_finalizing():  # when Python ends, nothing can be imported any more
                    with self.holding_still():
                        session.close()
            if tokens is not None:  # here, where no traceback holds on to the buffers any more
                raise self.explain_not_finite(tokens)
            if where is not None:
                self.release()
                offload = "" if self.placement.offload or self.device.type == "cpu" else "--offload, "
                scattered = "" if where == "the host" else memory.remedy_of_scatter()
                raise UserError(f"{where} ran out of memory{shortage}; leave more of it free, or ask for less: "
                                f"{offload}a smaller --prefill-chunk-size, --max-seq-len, --budget or --batch-size"
                                f"{scattered}")

    def _decode(self, session: Session, request: "Request") -> Iterator[tuple[int, str]]:
        """Prefill and rounds of one group."""
        with self.working():
            if request.is_cancelled.is_set():  # while it waited
                return
            self._end_stream()
            self._serving = session
            on_prefill = self.threads.between(request.on_prefill)
            session.state = self.prepare(request.ids, request.max_new_tokens, on_prefill, request.plan,
                                         request.prefix, goes_on=request.goes_on, **vars(request.sampling))
        while not session.done and not request.is_cancelled.is_set():
            with self.working():
                if self.caches.state is None:
                    raise UserError("the caches of this generation were freed while it was under way, by release(), "
                                    "prefill() or open(); begin another one")
                if self._serving is not session or self.caches.state is not session.state:
                    raise UserError("another generation has begun on this engine and taken over its caches; finish or "
                                    "close a stream first, or load a second engine")
                pieces = session.round()
            if request.on_decode is not None:
                request.on_decode(session.num_tokens)
            yield from (piece for piece in pieces if piece[1] or self.tokenizer is None)

    def release(self) -> None:
        """Frees the buffers of the last call."""
        with self.holding_still():
            self._end_stream()
            self.caches.release()

    def _end_stream(self) -> None:
        """One that is left behind lets go of the caches. Its statistics are those of its own rounds."""
        if self._serving is not None:
            self._serving.close()

    def prepare(self, ids: list[list[int]], max_new_tokens: int, on_prefill=None, plan: Plan | None = None,
                prefix: Prefix | None = None, goes_on: bool = False, **sampling) -> State:
        """A State with the prompts prefilled, ready for rounds. If it already holds just these, it is rewound.

        Args:
            plan: what all rounds follow; None: chosen round by round, or what the settings say.
            prefix: what the prompts begin with.
            goes_on: they belong to the same call as those before, so what is held now was not held before it.
            sampling: the fields of `Sampling`.
        """
        self._num_prepared = mine = self._num_prepared + 1
        self.caches.begin()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        # Nothing here holds on to the caches of the call before: they are freed before others are planned.
        state = self.caches.find(ids, max_new_tokens, prefix, on_prefill, goes_on)
        state.params.set(**sampling)
        padding = self._padding(state.params.greedy or self.settings.coupled)
        if plan == AUTOREGRESSION and not padding.drafts:  # the step that would check drafts, without them
            plan = ONE_ROW
        if state.prompts == ids:
            state.rewind(max_new_tokens, plan, padding)
            if not goes_on:
                state.reused = [len(one) - 1 for one in ids]
            return state
        self.caches.fill(state, ids, max_new_tokens, on_prefill)
        if self._num_prepared != mine:
            state.reset()  # it has tokens of two prompts
            raise UserError("another generation has begun on this engine within on_prefill; begin it afterwards, or "
                            "load a second engine")
        state.begin(max_new_tokens, plan, padding)
        state.prompts = ids
        return state

    def _padding(self, same_bits: bool) -> Padding:
        """Greedy output and coupled draws are promised to be the same bits; other drawn tokens follow the same law from
        steps of any size, and so do drafted ones.

        Ranks pad: a rank that has gone astray is to be noticed by its tokens, not by the shapes that it sends. So do
        compiled steps, since other shapes are compiled anew. On a GPU rows cost next to nothing.
        """
        if self.target.group is not None or self.placement.compile is True:
            return PADDED
        cheap = self.device.type != "cpu"
        return Padding(plain=same_bits, drafts=same_bits or cheap, inner=cheap)

    def resolve_budget(self, prompt_len: int, room: int | None = None, sharing: int = 1) -> int:
        """See `Settings.view_tokens`."""
        return self.settings.view_tokens(prompt_len, self.placement.offload, room, sharing)

    def tokenizer_or_raise(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError("this engine has no tokenizer; give prompts as lists of ids, and no stop strings")
        return self.tokenizer

    def _check_ids(self, ids: list[int], where: str = "") -> None:
        largest, smallest = max(ids), min(ids)
        if smallest < 0 or largest >= self.vocab_size:
            bad = largest if largest >= self.vocab_size else smallest
            raise UserError(f"{where}token id {bad} is outside the vocabulary of {self.vocab_size}; ids go from 0 to "
                            f"{self.vocab_size - 1}")

    def room(self, max_new_tokens: int) -> int:
        """How many tokens a prompt may have beside so many new ones."""
        longest = self.placement.max_seq_len
        return (self.target.config.max_len if longest is None else longest) - max_new_tokens

    def check_len(self, prompt_len: int, max_new_tokens: int, document: int = 0) -> None:
        """Raises TooLong if so many tokens do not fit the model, or max_seq_len. document: so many of the prompt are a
        prefix, which cannot be cut any more."""
        limit, longest = self.target.config.max_len, self.placement.max_seq_len
        what = f"the model's {self.target.config.limit_name} ({limit})"
        if longest is not None:
            limit, what = longest, f"max_seq_len ({longest})"
        if (excess := prompt_len + max_new_tokens - limit) > 0:
            left, part = prompt_len - document - excess, "question" if document else "prompt"
            ways = [f"cut the {part} by {excess} tokens to {left}"] if left > 0 else []
            if limit > prompt_len:
                ways.append(f"ask for at most {limit - prompt_len} new ones")
            raise TooLong(f"a prompt of {prompt_len} tokens and {max_new_tokens} new ones exceed {what}; "
                          f"{' or '.join(ways) or 'shorten it, and ask for fewer new ones'}")


@dataclass
class Request:
    """What a call asks for, checked."""

    ids: list[list[int]]
    prefix: Prefix | None
    max_new_tokens: int
    sampling: Sampling
    eos_ids: tuple[int, ...]
    stops: list[str]
    plan: Plan | None  # what all rounds follow; None: chosen
    on_prefill: Callable[[float], None] | None
    on_decode: Callable[[int], None] | None
    logprobs: int | None
    dropped: list[int]  # tokens of each prompt that did not fit
    defaults: dict[str, float]  # sampling values that the checkpoint chose
    goes_on: bool = False  # other prompts of the call came before these
    is_cancelled: threading.Event = field(default_factory=threading.Event)  # nobody wants more of it

    def part(self, start: int, stop: int, num_tokens: int) -> "Request":
        """The same for the prompts [start, stop). Progress is told of all of them.

        Args:
            num_tokens: new ones of those before.
        """
        rows, total = slice(start, stop), len(self.ids)
        tell_prefill, tell_decode = self.on_prefill, self.on_decode
        on_prefill = tell_prefill and (lambda share: tell_prefill((start + share * (stop - start)) / total))
        on_decode = tell_decode and (lambda count: tell_decode(num_tokens + count))
        return replace(self, ids=self.ids[rows], dropped=self.dropped[rows], sampling=self.sampling.part(rows),
                       on_prefill=on_prefill, on_decode=on_decode, goes_on=start > 0)


class Stream:
    """Iterates over the pieces of one generation's text.

    `result` is its Generation: all of it once the iteration has ended; after an early stop, or in between, what there
    is, with the finish_reason "interrupted"; None before the first piece was asked for. `spans` is the newest piece as
    (text, level) pairs: which level proposed what of it, see levels.py.
    """

    __reduce__ = not_pickled("a stream", "its result can be: stream.result")

    def __init__(self, pieces: Iterator[tuple[int, str]], sessions: list[Session], is_cancelled: threading.Event):
        self._pieces, self._sessions, self._is_cancelled = pieces, sessions, is_cancelled
        self._characters: Iterator[tuple[str, str]] | None = None
        self.spans: list[tuple[str, str]] = []

    def __iter__(self):
        return self

    def __next__(self) -> str:
        try:
            piece = next(self._pieces)[1]
        except ValueError:
            if inspect.getgeneratorstate(self._pieces) == inspect.GEN_CLOSED:
                raise
            raise UserError("another thread iterates over this stream; give each thread a stream of its own") from None
        if self._characters is None:
            [output] = self._sessions[0].outputs
            self._characters = characters(output.pieces, output.levels)
        self.spans = spans(self._characters, len(piece))
        return piece

    @property
    def result(self) -> Generation | None:
        return self._sessions[0].results()[0] if self._sessions else None

    def close(self) -> None:
        """Ends the generation early; the engine is ready for the next call. From a callback, or from another thread
        while a piece comes: the iteration ends after the prefill, or the pieces of the round, that is under way."""
        self.cancel()
        while inspect.getgeneratorstate(self._pieces) not in (inspect.GEN_RUNNING, inspect.GEN_CLOSED):
            try:
                self._pieces.close()
            except ValueError:  # it began to run meanwhile
                if inspect.getgeneratorstate(self._pieces) == inspect.GEN_CLOSED:
                    raise

    def cancel(self) -> None:
        """The generation ends with the round that is under way, once somebody goes on iterating or closes it."""
        self._is_cancelled.set()


def _is_batch(prompt) -> bool:
    if isinstance(prompt, (list, tuple)):
        return len(prompt) > 0 and (isinstance(prompt[0], (str, list, tuple)) or getattr(prompt[0], "ndim", 0) == 1)
    return getattr(prompt, "ndim", 0) == 2


def _is_sequence(x) -> bool:
    """Whether it has elements. A tensor or array of no dimension claims to have some, and does not."""
    return hasattr(x, "__iter__") and getattr(x, "ndim", 1) > 0


def generate_options() -> frozenset[str]:
    """What `Engine.generate` takes by name."""
    names = inspect.signature(Engine.stream).parameters.keys() | inspect.signature(Engine.generate).parameters.keys()
    return frozenset(names - {"self", "prompt", "options"})


def _as_ids(prompt) -> list[int]:
    """A list of whole numbers from a list, a tuple, a tensor or an array of one dimension."""
    try:
        return [operator.index(token) for token in (prompt.tolist() if hasattr(prompt, "tolist") else prompt)]
    except TypeError:
        what = f"is of type {type(prompt).__name__}"
        if isinstance(prompt, (list, tuple)):
            what = f"has {reprlib.repr(next(x for x in prompt if not hasattr(x, '__index__')))} in it"
        raise UserError("a prompt is text, a list of whole numbers (ids), or a list of messages {role, content}; "
                        f"this one {what}") from None

