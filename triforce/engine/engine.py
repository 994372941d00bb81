"""Runs a pair of models: prompt to prefill, to rounds, to text. Knows nothing of the command line.

    Engine.stream -> Session.round -> DecodeBatch.round -> Hierarchy.round -> Verifier.check -> Transformer.forward

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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..cache.blocks import prefill_blocks
from ..cache.kv_cache import KVCache
from ..config import Placement, Sampling, Settings, as_count, as_numbers, check_logprobs, one_of, split, takes
from ..decode.batch import DecodeBatch, Models
from ..decode.plan import AUTOREGRESSION, ONE_ROW, PADDED, DraftPlan, Padding
from ..errors import NotFinite, TooLong, UserError
from ..hf.fingerprint import files_of, model_fingerprint, model_name, tokenizer_fingerprint, weights_fingerprint
from ..hf.tokenizer import Tokenizer, is_messages
from ..model import Transformer
from ..parallel import agreed
from ..render import Bar, in_notebook, notebook_bars
from ..runtime.host import belongs_here, check_process, is_forked, not_pickled, own_settings
from ..runtime.streams import ComputeStream
from ..runtime.threads import Threads
from . import finite, memory
from .buffers import Buffers
from .conversation import Chat
from .keep import WAYS, cut
from .output import Generation, special_ids, stop_ids, stop_strings
from .prompt_cache import OF_PROMPT, Prefix, asked, check_prefix, check_room, common_length, opened, storable
from .prompt_cache_folder import PromptCacheFolder
from .prompt_cache_path import check_target, holds_something
from .session import Call, Session, Stream

log = logging.getLogger("triforce")
MOST_ANSWERS = 2**16  # of a call: the host holds them all


class Engine:
    """See `triforce.load`, which makes one from checkpoints. Without a tokenizer prompts are ids and texts empty.

    Args:
        drafting: the target's weights for the retrieval level, quantized say. None: the target itself.
        settings, placement: as users give them; see config.py.
        eos_ids: ids that end a text.
        folder: of the checkpoint. Saved prefixes identify the model by it; None: by the weights.
        compute_stream: the stream on which the weights were read. None: a new one.
        defaults: sampling values of the checkpoint, which stand for those of `Sampling` that a call does not give.
    """

    __reduce__ = not_pickled("an engine", "load one in each process that needs it")

    @own_settings()
    def __init__(self, target: Transformer, tokenizer: Tokenizer | None, draft: Transformer | None = None, *,
                 drafting: Transformer | None = None, settings: Settings | None = None,
                 placement: Placement | None = None, eos_ids: Sequence[int] = (), folder: Path | None = None,
                 compute_stream: ComputeStream | None = None, defaults: dict[str, float] | None = None):
        self.defaults, self.eos_ids = defaults or {}, tuple(eos_ids)
        self.target, self.tokenizer, self.draft, self.drafting = target, tokenizer, draft, drafting
        self.device = target.device
        self.compute_stream = compute_stream or ComputeStream(target.device)
        placement = replace(placement or Placement(), device=target.device).resolve()
        known = [one.vocab_size for one in (target.config, draft and draft.config, tokenizer) if one is not None]
        vocab_size = agreed(target.group, min(known))  # a rank without the draft does not know its vocabulary
        models, cache_dir = Models(target, draft, drafting, placement.draft_ranks), placement.cache_dir
        kept = None if cache_dir is None else PromptCacheFolder(self, cache_dir, placement.cache_dir_size)
        self.buffers = Buffers(models, settings or Settings(), placement, vocab_size, self.compute_stream.cuda,
                               partial(Prefix, self), kept)
        self.threads = Threads(target.device, interval=self.settings.flush_interval, dtype=target.dtype)
        self._serving: Session | None = None  # whom the state belongs to
        self._folder, self._identity = folder and Path(folder).absolute(), None
        self._files = folder and files_of(self._folder)
        belongs_here()

    def __repr__(self) -> str:
        return (f"<triforce.Engine: {self.target.config.architecture}, {self.num_parameters / 1e6:,.1f}M parameters, "
                f"{self.target.dtype_name} on {self.device}>")

    @property
    def settings(self) -> Settings:
        """Resolved."""
        return self.buffers.settings

    @property
    def placement(self) -> Placement:
        """Resolved."""
        return self.buffers.placement

    @property
    def vocab_size(self) -> int:
        """Ids that all models and the tokenizer know."""
        return self.buffers.vocab_size

    @property
    def num_parameters(self) -> int:
        """Of the whole target, over all ranks."""
        return self.target.config.num_parameters * self.target.config.num_shards

    def generate(self, prompt, max_new_tokens: int = 256, *, prefix: Prefix | None = None,
                 num_samples: int | None = None, **options) -> "Generation | list":
        """Continues one prompt, or each of a list of prompts.

        Args:
            prompt: text (the tokenizer adds its own bos), a list of ids (taken as they are), a list of messages
                {"role", "content"} (the chat template applies), or a list of such prompts, answered by a list.
            max_new_tokens: exactly this number, unless the text ends before.
            prefix: the document that the prompts are questions about, see `prefill`. Its keys and values are read once
                for all prompts, and only the questions are computed.
            num_samples: continuations of each prompt; each result is then a list of them. Their seeds are seed, seed +
                1, ..., counted on from prompt to prompt; a prompt with a seed of its own counts from that.
            options: see `stream`; those of `Sampling` may be lists, one value a prompt.

        Raises:
            UserError: an empty prompt, one too long for the model or the memory, a sampling value out of range.
        """
        many = _is_batch(prompt)
        prompts = list(prompt) if many else [prompt]
        count = 1 if num_samples is None else as_count("num_samples", num_samples, 8)
        with notebook_bars(options, len(prompts) * count * as_count("max_new_tokens", max_new_tokens, 256)):
            call = self._call(prompts, max_new_tokens, prefix=prefix, count=count, **options)
            sessions: list[Session] = []
            with self.compute_stream.lock:
                for _ in self._answer(call, sessions, watched=call.on_decode is not None):
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
        as_count("keep_every", keep_every, 65_536)
        group, rendered_at, reader = self.target.group, None, None
        messages = list(document) if is_messages(document) else None
        about = {"messages": messages, "chat_template": chat_template, "chat_template_kwargs": chat_template_kwargs}
        with contextlib.ExitStack() as stack:
            if keep is not None:  # before hours of work
                check_target(keep)
                storable(**about)
                if agreed(group, holds_something(keep)):
                    reader = stack.enter_context(opened(keep, self))
            if messages is None:
                ids = self.encode_prompt(document, chat_template, chat_template_kwargs)
            else:  # a template that names the day gets the day of the beginning
                begun = None if reader is None else reader.about["rendered_at"]
                rendered_at = begun or agreed(group, datetime.now().isoformat(timespec="seconds"))
                ids = self.encode_beginning(messages, chat_template, chat_template_kwargs, rendered_at)
            self.check_len(len(ids), 1)
            held = 0 if reader is None else len(reader.tokens)
            if held and (same := common_length(reader.tokens, ids)) < held:
                raise UserError(f"{keep} keeps another document: of its {held:,} tokens, the first {same:,} are those "
                                "of this one; choose another name, or remove it")
            if keep is not None and held < len(ids):
                check_room(keep, self, len(ids))

            def save(part: Prefix) -> None:
                part.part_of, part.rendered_at = len(ids), rendered_at
                part.save(keep)

            with self.working():
                self._end_stream()
                prefix = self.buffers.compute(ids, self.threads.between(on_progress), reader,
                                              None if keep is None else keep_every, save)
                if prefix.store is not None:
                    self.buffers.pack(prefix.store)  # here, so that no question waits for it
            prefix.tell(**about, rendered_at=rendered_at)
            all_read = reader is not None and prefix.num_read == prefix.num_shared > 0
            if keep is not None and not agreed(group, all_read and reader.tokens == ids
                                               and reader.about == prefix.about):
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
                                "prefill was broken off; go on with it by keep= (--save-prefix and --save-every)")
            self.check_len(len(reader.tokens), 1, len(reader.tokens))
            with self.working():
                self._end_stream()
                prefix = self.buffers.compute(reader.tokens, reader=reader, length=reader.layout.length)
            prefix.tell(*(reader.about[name] for name in OF_PROMPT))
            return prefix

    @own_settings()
    def identity(self) -> dict:
        """The fingerprints of model and tokenizer that a saved prefix must share with this engine, and a name."""
        if self._identity is None:
            folder, place, tokenizer = self._folder, self.placement, self.tokenizer
            # A folder that was written to since `load` may hold another model than this engine.
            is_as_read = self._files and files_of(folder) == self._files
            self._identity = {
                "model": (model_fingerprint(folder, place.max_seq_len, place.weights) if is_as_read else
                          weights_fingerprint(self.target)),
                "tokenizer": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
                "name": model_name(folder, self.target.config.architecture, self.num_parameters)}
        return self._identity

    def chat(self, prefix: Prefix | None = None, **options) -> Chat:
        """A conversation, about a document if there is a prefix.

        With a chat template, a turn is a message of the user. Without one, or over a prefix made of text, the user's
        text stands between empty lines, and the answer continues it.

        Args:
            options: `system`, a text that the conversation begins with; `chat_template`; and what `stream` takes, for
                all turns.
        """
        return Chat(self, prefix, **options)

    def check_options(self, options: dict) -> None:
        """Raises UserError for what a turn of a conversation cannot be given."""
        if "num_samples" in options:
            raise UserError("num_samples is no option of a conversation, which goes on with one answer; drop it")
        for name in options.keys() & {"prefix", "chat_template"}:
            raise UserError(f"{name} is no option of a turn, but of the chat; drop it, or give it to `Engine.chat`")
        split(options, Sampling, what="option of a turn", known=generate_options())

    @takes(Sampling)
    def stream(self, prompt, max_new_tokens: int = 256, *, prefix: Prefix | None = None, stop=None,
               stop_token_ids=None, ignore_eos: bool = False, speculate: bool = True, one_row: bool = False,
               logprobs: int | None = None, keep: str | None = None, chat_template: str | None = None,
               chat_template_kwargs: dict | None = None, on_prefill=None, on_decode=None, **options) -> Stream:
        """Continues one prompt, piece by piece: iterate over the text, then read `.result`. Without a tokenizer pieces
        are empty, one a round. Of a list of prompts, iterate over (number of the prompt, text), read `.results`, and
        end one by `.cancel(number)`.

        Args:
            max_new_tokens: exactly this number, unless the text ends before; of several prompts also a list.
            prefix: what the prompt is a question about; see `prefill`.
            options: OPTIONS
            stop: a string or several; the text ends before the first that appears. A special token, such as
                "<|eot_id|>", is a stop id.
            stop_token_ids: ids that end the text as an end-of-text token does, with ignore_eos too: the token is kept
                in `tokens`, and is no part of `text`.
            ignore_eos: go on after an end-of-text token.
            speculate: False: one token at a time; if greedy in the padded steps of speculation: the same bits, slower.
            one_row: with speculate=False: unpadded steps, the fastest autoregression; same distribution, other bits.
            logprobs: fills `Generation.logprobs`: an entry a token, with this number (0 too) of the most probable
                tokens. Each round then waits for the device a second time, and runs the output layer once more.
            keep: the part to keep of a prompt that is too long for the model or max_seq_len beside max_new_tokens: the
                "start", the "end", or "both", half of it each. A bos at its start is kept. Tokens of a chat template
                are cut like others. None: such a prompt is an error.
            chat_template: a Jinja template in place of the checkpoint's.
            chat_template_kwargs: what the template reads besides the messages: {"enable_thinking": False} for Qwen3,
                {"tools": [...]}.
            on_prefill: called with the share of the prefill that is done.
            on_decode: called after each round with the number of new tokens, of all prompts together.
        """
        if "num_samples" in options:
            raise UserError("stream gives one answer to each prompt; generate takes num_samples")
        several = _is_batch(prompt)
        if on_prefill is None and in_notebook():
            on_prefill = Bar("prefill", 100, "%")
        call = self._call(list(prompt) if several else [prompt], max_new_tokens, prefix=prefix, stop=stop,
                          stop_token_ids=stop_token_ids, ignore_eos=ignore_eos, speculate=speculate, one_row=one_row,
                          logprobs=logprobs, keep=keep, chat_template=chat_template,
                          chat_template_kwargs=chat_template_kwargs, on_prefill=on_prefill, on_decode=on_decode,
                          **options)
        sessions: list[Session] = []
        return Stream(self._answer(call, sessions), sessions, call, several)

    def logits(self, tokens, last: int | None = None, prefix: Prefix | None = None) -> Tensor:
        """Logits after every token, or after the last ones: [B, S] ids (list or tensor) -> [B, S, V] float32, V as in
        the checkpoint.

        Args:
            last: how many tokens at the end get logits, [B, last, V]: the others take no time or memory. They equal
                those of None but for rounding.
            prefix: of `prefill`, which is not computed again: rows begin with its tokens and get logits after it, so
                `last` must be given.

        Raises:
            UserError: rows of different lengths, ids outside the vocabulary, more than fit the model, last above S,
                rows that do not begin with the prefix.
        """
        try:
            rows = [_as_ids(row) for row in tokens]
        except (TypeError, UserError):
            rows = []
        if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
            raise UserError(f"logits takes [B, S] ids, S at least 1, and got rows of {[len(row) for row in rows]} ids; "
                            "put the ids of one text into a list of their own: [[5, 6, 7]]")
        self._check_ids([token for row in rows for token in row])
        length = len(rows[0])
        self.check_len(length, 0)
        last = length if last is None else as_count("last", last, length)
        if last > length:
            raise UserError(f"last ({last}) must be at most {length}, the ids of a row; leave it out for all of them")
        if prefix is not None:
            check_prefix(prefix, self)
        shared = None if prefix is None else prefix.store
        base = 0 if shared is None else shared.lens[0]
        if base and not (all(row[:base] == prefix.tokens[:base] for row in rows) and last <= length - base):
            raise UserError(f"each row must begin with the prefix's {base} tokens, and last ({last}) must be at most "
                            f"the {length - base} tokens after them; leave prefix out")
        with self.working(), torch.inference_mode():
            cache = KVCache(self.target.config, self.target.rope, batch=1, capacity=length, block_size=1,
                            flush_interval=1, chunk_size=0, shared=shared, device=self.device, dtype=self.target.dtype)
            blocks = prefill_blocks(cache, range(1), base, length, self.settings.prefill_chunk_size)
            hidden = (self.target.prefill(row[None, base:], blocks)[:, length - base - last :]
                      for row in torch.tensor(rows, device=self.device))  # [1, S or last, dim] each
            found = torch.cat([self.target.output(one).float() for one in hidden])
        if found.is_cuda:  # its memory is kept until this thread's own stream is done with it
            found.record_stream(torch.cuda.current_stream(self.device))
        return found

    @contextlib.contextmanager
    def working(self):
        """Within, this thread alone computes on this engine."""
        with self.holding_still(), self.threads.working():
            yield

    @contextlib.contextmanager
    def holding_still(self):
        """Within, what this engine holds of its last text does not change: other threads of this program wait. The
        program's settings of PyTorch are out of force."""
        check_process()
        with self.compute_stream.lock, self.compute_stream.used(), own_settings():
            yield

    def encode_prompt(self, prompt, chat_template: str | None = None, chat_template_kwargs: dict | None = None,
                      rendered_at: str | None = None) -> list[int]:
        """Ids of a prompt in any of the forms that `generate` takes. rendered_at: the time that the chat template is
        told, see `Prefix`; None: the present one."""
        if not isinstance(chat_template, (str, type(None))):
            raise UserError(f"chat_template ({reprlib.repr(chat_template)}) must be a text in Jinja; read its file")
        if (chat_template, chat_template_kwargs) != (None, None) and not is_messages(prompt):
            raise UserError("chat_template and chat_template_kwargs are for messages; drop them, or give messages")
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
        """The ids with which all prompts begin that ask a question after these messages."""
        rendered_at = rendered_at or datetime.now().isoformat()  # the same for both
        rendered = [self.encode_prompt(asked(messages, question), chat_template, chat_template_kwargs, rendered_at)
                    for question in ("a?", "The b.")]
        return rendered[0][: common_length(*rendered)]

    def _call(self, prompts, max_new_tokens: int, *, count: int = 1, prefix=None, stop=None, stop_token_ids=None,
              ignore_eos=False, speculate=True, one_row=False, logprobs=None, keep=None, chat_template=None,
              chat_template_kwargs=None, on_prefill=None, on_decode=None, **options) -> Call:
        """Checks everything. count: samples of each prompt, which is encoded once."""
        check_process()
        defaults = {name: value for name, value in self.defaults.items() if name not in options}
        [sampling], _ = split({**defaults, **options}, Sampling, what="option of generate", known=generate_options())
        if as_numbers(sampling.temperature) == 0:  # the others do not change the most probable token
            defaults = {name: value for name, value in defaults.items() if name == "temperature"}
        limits, stops, ends = as_numbers(max_new_tokens), stop_strings(stop), stop_ids(stop_token_ids)
        limits = limits if isinstance(limits, list) else [limits] * len(prompts)
        limits = [as_count("max_new_tokens", one, 256) for one in limits]
        if len(limits) != len(prompts):
            raise UserError(f"max_new_tokens has {len(limits)} values for {len(prompts)} prompts; give one a prompt")
        one_of(None, *WAYS)("keep", keep)
        check_logprobs(logprobs := as_numbers(logprobs), self.vocab_size)
        for name, value in (("ignore_eos", ignore_eos), ("speculate", speculate), ("one_row", one_row)):
            one_of(True, False)(name, value)
        if one_row and speculate:
            raise UserError("one_row needs speculate=False: an unpadded step checks no drafted tokens")
        if ends:
            self._check_ids(ends, "stop_token_ids: ")
        if stops:
            ends += special_ids(stops, self.tokenizer_or_raise())
        if prefix is not None:
            check_prefix(prefix, self, chat_template)
            if keep is not None:
                raise UserError("keep says which part of a prompt is left; a prefix is kept whole: drop one of them")
        if len(prompts) * count > MOST_ANSWERS:
            raise UserError(f"{len(prompts) * count:,} answers are more than the {MOST_ANSWERS:,} of one call; ask for "
                            "fewer at a time (--num-samples, or prompts)")
        ids, dropped = self._encoded(prompts, limits, prefix, keep, chat_template, chat_template_kwargs)
        ids, dropped, limits = ([one for one in each for _ in range(count)] for each in (ids, dropped, limits))
        sampling = sampling.rows(len(prompts), count, lambda: agreed(self.target.group, random.getrandbits(32)),
                                 self.vocab_size)
        return Call(ids=ids, prefix=prefix, limits=limits, sampling=sampling, stops=stops,
                    eos_ids=(*ends, *(() if ignore_eos else self.eos_ids)),
                    plan=None if speculate else ONE_ROW if one_row else AUTOREGRESSION, on_prefill=on_prefill,
                    on_decode=on_decode, logprobs=logprobs, dropped=dropped, defaults=defaults)

    def _encoded(self, prompts, limits: list[int], prefix: Prefix | None, keep: str | None, chat_template,
                 chat_template_kwargs) -> tuple[list[list[int]], list[int]]:
        """Ids of each prompt, and how many of them did not fit."""
        ids, dropped = [], []
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            room = self.room(limit)
            try:
                whole = (self.encode_prompt(prompt, chat_template, chat_template_kwargs) if prefix is None else
                         prefix.ids(prompt, chat_template_kwargs))
                one = whole if room < 1 else cut(whole, room, keep, getattr(self.tokenizer, "bos_id", None))
                self.check_len(len(one), limit, 0 if prefix is None else len(prefix))
            except UserError as error:
                raise type(error)(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None
            ids.append(one)
            dropped.append(len(whole) - len(one))
        return ids, dropped

    def _answer(self, call: Call, sessions: list[Session], watched: bool = True) -> Iterator[tuple[int, str]]:
        """Yields (index of a prompt, piece of text), group by group: a group runs side by side. sessions: gets the
        sessions, which have the results. watched: somebody has the turn after each round; else pieces are missing."""
        # Names of this function: those of the module may be gone when Python ends, and closes what is left.
        is_ending, not_finite = sys.is_finalizing, NotFinite
        with self.working():
            size = self.buffers.rows(call.ids, call.max_new_tokens, call.prefix)
        for first in range(0, len(call.ids), size):
            group = call.part(first, min(first + size, len(call.ids)), sum(one.num_tokens for one in sessions))
            sessions.append(session := Session(group, self.tokenizer, self.device))
            explain = None
            try:
                for row, piece in self._decode(session, watched):
                    yield first + row, piece
            except not_finite as error:
                explain = partial(finite.explain, self.target, error.count)
            except (RuntimeError, MemoryError) as error:
                if not memory.ran_out(error):
                    raise
                explain = partial(memory.shortage, str(error) or type(error).__name__)
            finally:
                if not is_ending() and not is_forked():  # a Python that ends imports nothing
                    with self.holding_still():
                        session.close()
            if explain is not None:  # here no traceback holds on to the buffers
                self.release()
                with self.working():
                    error = explain()
                raise error
            self.buffers.keep()

    def _decode(self, session: Session, watched: bool) -> Iterator[tuple[int, str]]:
        """Prefill and rounds of one group."""
        call = session.call
        with self.working():
            if call.is_cancelled.is_set():  # while it waited
                return
            self._end_stream()
            self._serving = session
            session.state = self.prepare(call.ids, call.max_new_tokens, self.threads.between(call.on_prefill),
                                         call.plan, call.prefix, **vars(call.sampling))
            if self._serving is not session:  # on_prefill has begun another: the DecodeBatch has tokens of two prompts
                self.buffers.release()
        while not session.done and not call.is_cancelled.is_set():
            with self.working():
                if self._serving is not session or self.buffers.state is not session.state or session.state is None:
                    raise UserError("another generation has begun on this engine, or its caches were freed; finish or "
                                    "close a stream first, or load a second engine")
                pieces = session.round()
                while not (watched or session.done):  # to leave and come back takes longer than all else between
                    self.threads.review()
                    session.round()
            if call.on_decode is not None:
                call.on_decode(session.num_tokens)
            yield from (piece for piece in pieces if piece[1] or self.tokenizer is None)

    def release(self) -> None:
        """Frees the buffers of the last call."""
        with self.holding_still():
            self._end_stream()
            self.buffers.release()

    def _end_stream(self) -> None:
        """A stream that was left behind lets go of the caches. Its statistics cover its own rounds."""
        if self._serving is not None:
            self._serving.close()

    def prepare(self, ids: list[list[int]], max_new_tokens: int, on_prefill=None, plan: DraftPlan | None = None,
                prefix: Prefix | None = None, **sampling) -> DecodeBatch:
        """A DecodeBatch with the prompts prefilled, ready for rounds. If it already holds just these, it is rewound.
        plan: what all rounds follow, None: chosen round by round; sampling: the fields of `Sampling`."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        # Nothing here holds on to the caches of the call before: they are freed before others are planned.
        state = self.buffers.find(ids, max_new_tokens, prefix, on_prefill)
        state.params.set(**sampling)
        # Greedy output and coupled draws promise equal bits, so their steps are padded. Steps that draft or check are
        # padded, too, where rows cost next to nothing, as on a GPU, or where each shape is compiled.
        same_bits, compiles = state.params.uses.greedy or self.settings.coupled, self.placement.compile is True
        pads = compiles or self.device.type != "cpu"
        padding = Padding(plain=same_bits, drafts=same_bits or pads, inner=pads)
        # One text has one compiled shape. Several gain a seventh where a step that checks nothing is not padded. Ranks
        # pad: the tokens of a rank that has gone astray should show it, not the shapes that it sends.
        if self.target.group is not None or compiles and state.batch == 1:
            padding = PADDED
        if plan == AUTOREGRESSION and not padding.drafts:  # the step that would check drafts, without them
            plan = ONE_ROW
        # Asked before `fill`, which forgets the prompts.
        begin = state.rewind if state.prompts == ids else state.begin
        self.buffers.fill(state, ids, on_prefill)
        begin(max_new_tokens, plan, padding)
        state.prompts = ids
        return state

    def tokenizer_or_raise(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError("this engine has no tokenizer; give prompts as lists of ids, and no stop strings")
        return self.tokenizer

    def _check_ids(self, ids: list[int], where: str = "") -> None:
        bad = next((one for one in (max(ids), min(ids)) if not 0 <= one < self.vocab_size), None)
        if bad is not None:
            raise UserError(f"{where}token id {bad} is outside the vocabulary of {self.vocab_size}; ids go from 0 to "
                            f"{self.vocab_size - 1}")

    def room(self, max_new_tokens: int) -> int:
        """How many tokens a prompt may have beside `max_new_tokens` new ones."""
        return (self.placement.max_seq_len or self.target.config.max_len) - max_new_tokens

    def check_len(self, prompt_len: int, max_new_tokens: int, document: int = 0) -> None:
        """Raises TooLong if these tokens do not fit the model, or max_seq_len. document: tokens of the prompt that are
        a prefix, which cannot be cut."""
        limit = self.room(0)
        if (excess := prompt_len + max_new_tokens - limit) > 0:
            name = "max_seq_len" if self.placement.max_seq_len else f"the model's {self.target.config.limit_name}"
            left, part = prompt_len - document - excess, "question" if document else "prompt"
            ways = [f"cut the {part} by {excess} tokens to {left}"] * (left > 0)
            ways += [f"ask for at most {limit - prompt_len} new ones"] * (limit > prompt_len)
            raise TooLong(f"a prompt of {prompt_len} tokens and {max_new_tokens} new ones exceed {name} ({limit}); "
                          f"{' or '.join(ways) or 'shorten it, and ask for fewer new ones'}")


def _is_batch(prompt) -> bool:
    if isinstance(prompt, (list, tuple)):
        return len(prompt) > 0 and (isinstance(prompt[0], (str, list, tuple)) or getattr(prompt[0], "ndim", 0) == 1)
    return getattr(prompt, "ndim", 0) == 2


def generate_options() -> frozenset[str]:
    """What `Engine.generate` takes by name."""
    names = inspect.signature(Engine.stream).parameters.keys() | inspect.signature(Engine.generate).parameters.keys()
    return frozenset(names - {"self", "prompt", "options"})


def _as_ids(prompt) -> list[int]:
    """A list of whole numbers from a list, a tuple, a tensor or an array of one dimension."""
    try:
        return [operator.index(token) for token in as_numbers(prompt)]
    except (TypeError, RecursionError):
        raise UserError("a prompt is text, a list of whole numbers (ids), or a list of messages {role, content}; "
                        f"this one is {reprlib.repr(prompt)}") from None

