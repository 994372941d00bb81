"""`triforce serve`: a checkpoint behind OpenAI's interface, for clients that have one already.

One thread owns the engine. Requests that wait and begin with the same document, or that fit one batch, are answered
side by side; one that comes later waits for the group that runs. Documents that were asked about are held, the least
recently used go first.

Over HTTP: /v1/models, /v1/completions, /v1/chat/completions, /health. Errors have OpenAI's form and the library's
words.
"""

import asyncio
import contextlib
import hmac
import json
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import accumulate

from .cli.main import count
from .cli.request import from_json
from .config import Sampling, names_of, parse_size, split
from .engine.buffers import MOST_ROWS
from .engine.engine import Engine
from .engine.loading import load
from .engine.output import Generation, special_ids, stop_strings
from .engine.prompt_cache import SHARED_FROM, Prefix, common_length
from .errors import Parser, UserError
from .hf.tokenizer import is_messages

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as error:
    raise UserError(f"the server needs Starlette and uvicorn ({error}); pip install 'triforce[serve]'") from None

SAMPLING = names_of(Sampling)
KNOWN = {*SAMPLING, "model", "max_tokens", "max_completion_tokens", "stop", "n", "stream", "stream_options", "logprobs",
         "top_logprobs", "messages", "prompt", "chat_template_kwargs"}
# What says nothing about an answer; and what may be given only with a value that asks for nothing.
SILENT = {"user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"}
NEUTRAL = {"frequency_penalty": (0,), "presence_penalty": (0,), "best_of": (1,), "echo": (False,), "suffix": ("",),
           "tools": ([],), "tool_choice": ("none", "auto"), "response_format": ({"type": "text"},)}
OPENAI = {"temperature": 1.0, "top_p": 1.0}  # where neither a request nor the checkpoint says otherwise
MOST_LOGPROBS = 20
GATHER = 0.05  # seconds that an idle engine waits for more requests beside the first
STOPPING = "the server is stopping", 503, "server_error"


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, message: str, status: int = 400, kind: str = "invalid_request_error", param: str | None = None):
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param

    def response(self) -> JSONResponse:
        return JSONResponse({"error": self.body()}, self.status)

    def body(self) -> dict:
        return {"message": str(self), "type": self.kind, "param": self.param, "code": None}


@dataclass(eq=False)
class Job:
    """A text to write: what is asked for, and where the pieces go."""

    ids: list[int]
    limit: int
    stop: tuple[str, ...]
    logprobs: int | None
    sampling: dict  # a value for each field of `Sampling`
    send: Callable[[object], None]  # of a piece (str), the result (Generation) or an error; from any thread
    streams: bool  # somebody wants the pieces
    is_cancelled: threading.Event = field(default_factory=threading.Event)
    cached: int = 0  # tokens of the prompt that were held before it came


class Answers(threading.Thread):
    """The thread that owns the engine. most_waiting: jobs."""

    def __init__(self, engine: Engine, most_waiting: int, documents: "Documents"):
        super().__init__(name="triforce-answers", daemon=True)
        self.engine, self.most_waiting, self.documents = engine, most_waiting, documents
        self._waiting: deque[Job] = deque()
        self._changed, self._stops, self._begun = threading.Condition(), False, False

    def submit(self, jobs: list[Job]) -> None:
        with self._changed:
            if self._stops:
                raise Refused(*STOPPING)
            self._waiting = deque(job for job in self._waiting if not job.is_cancelled.is_set())
            if len(self._waiting) + len(jobs) > self.most_waiting:
                raise Refused(f"{len(self._waiting)} answers wait and {self.most_waiting} may; try again later", 429,
                              "rate_limit_error")
            self._waiting += jobs
            self._changed.notify()

    def stop(self) -> None:
        """What runs and what waits ends with an error. A signal handler may call this."""
        with self._changed:
            self._stops = True
            self._changed.notify()

    def run(self) -> None:
        while group := self._next():
            self._try(group)
        for job in self._waiting:
            job.send(Refused(*STOPPING))

    def _try(self, group: list[Job], again: bool = True) -> None:
        """Answers a group, or says why not. Where memory is short, documents make room, and each is answered alone."""
        try:
            return self._answer(group)
        except Exception as error:  # of the engine, which goes on with the next group
            is_known = isinstance(error, (UserError, Refused))
            if self._begun or not (again and is_known and (len(group) > 1 or self.documents.held)):
                told = error if is_known else Refused(f"the engine failed: {error!r}", 500, "server_error")
                for job in group:
                    job.send(told)
                return
        self.documents.held.clear()  # here no traceback holds on to the group's own
        for job in group:
            self._try([job], False)

    def _next(self) -> list[Job]:
        """The job that waits longest, and others that can be answered beside it. Empty: the server stops."""
        with self._changed:
            if not self._waiting:
                self._changed.wait_for(lambda: self._waiting or self._stops)
                self._changed.wait_for(lambda: self._stops, GATHER)  # what comes at once is answered at once
            if self._stops:
                return []
            first, *rest = self._waiting
            alike = [job for job in rest if (job.stop, job.logprobs) == (first.stop, first.logprobs)]
            sharing = [job for job in alike if common_length(first.ids, job.ids) >= SHARED_FROM][: MOST_ROWS - 1]
            group = [first, *(sharing or alike[: self.engine.placement.max_batch_size - 1])]
            self._waiting = deque(job for job in self._waiting if job not in group)
            return group

    def _answer(self, group: list[Job]) -> None:
        jobs, self._begun = [job for job in group if not job.is_cancelled.is_set()], False
        if not jobs:
            return
        if self._stops:
            raise Refused(*STOPPING)
        document, cached = self.documents.of([job.ids for job in jobs])
        for job in jobs:
            job.cached = cached
        known = 0 if document is None else len(document)
        columns = {name: [job.sampling[name] for job in jobs] for name in jobs[0].sampling}
        stream = self.engine.stream([job.ids[known:] for job in jobs], [job.limit for job in jobs], prefix=document,
                                    stop=list(jobs[0].stop) or None, logprobs=jobs[0].logprobs, **columns)
        going = set(range(len(jobs)))
        try:
            for number, piece in stream:
                self._begun = True  # something may have been sent
                if piece and number in going and jobs[number].streams:
                    jobs[number].send(piece)
                for i in list(going):  # one may have ended in this round, and its last piece not have come yet
                    if jobs[i].is_cancelled.is_set() or self._stops:
                        stream.cancel(i)
                    if (end := stream.ended(i)) is not None:
                        going.discard(i)
                        jobs[i].send(self._told(end))
        finally:
            stream.close()
        for number in going:
            jobs[number].send(self._told(stream.results[number]))

    def _told(self, end: Generation | None) -> Generation | Refused:
        """An answer, unless the server's end cut it off."""
        return Refused(*STOPPING) if self._stops and (end is None or end.finish_reason == "interrupted") else end


class Documents:
    """What requests begin with, with keys and values: the least recently used go first, and come back from the files of
    the engine's cache_dir. most_bytes: of those that are held."""

    def __init__(self, engine: Engine, most_bytes: float):
        self.engine, self.most_bytes = engine, most_bytes
        self.held: list[Prefix] = []  # the most recently used last

    def of(self, prompts: list[list[int]]) -> tuple[Prefix | None, int]:
        """What all prompts begin with, and how many tokens of it were there before; None, 0 if that is short. A
        question is left of each prompt."""
        common = min(common_length(*prompts), *(len(ids) - 1 for ids in prompts))
        enough, unit = max(SHARED_FROM, common // 2), self.engine.settings.flush_interval
        if common < max(SHARED_FROM, unit):
            return None, 0
        ids = prompts[0][: common // unit * unit]  # none behind what is held: they may be another prompt's
        length, best = max(((one.held(common_length(one.tokens[: one.num_shared], ids) // unit * unit), i)
                            for i, one in enumerate(self.held)), default=(0, 0))
        if length >= enough:
            self.held.append(self.held.pop(best))
            return self.held[-1].part(length), length
        of_file = kept.find(ids)[0] if (kept := self.engine.buffers.kept) is not None else 0
        ids = ids[: of_file or common]
        self.held.append(made := self.engine.prefill(ids))
        while len(self.held) > 1 and sum(one.nbytes for one in self.held) > self.most_bytes:
            del self.held[0]
        return made, made.num_read


class Server:
    """The HTTP side, on one event loop. most_*: see the flags."""

    def __init__(self, answers: Answers, name: str, api_key: str | None, most_tokens: int, most_choices: int,
                 most_bytes: int):
        self.answers, self.engine, self.name, self.api_key = answers, answers.engine, name, api_key
        self.most_tokens, self.most_choices, self.most_bytes = most_tokens, most_choices, most_bytes

    @property
    def app(self) -> Starlette:
        post = [Route(path, self.guarded(handler), methods=["POST"]) for path, handler in (
            ("/v1/completions", self.completions), ("/v1/chat/completions", self.chat))]
        return Starlette(routes=[*post, Route("/v1/models", self.guarded(self.models)), Route("/health", self.health)],
                         exception_handlers=dict.fromkeys((404, 405), lambda request, error: Refused(
                             f"{request.method} {request.url.path}: {error.detail}", error.status_code).response()))

    def guarded(self, handler):
        async def answer(request: Request) -> Response:
            try:
                given = request.headers.get("authorization", "").removeprefix("Bearer ")
                if self.api_key and not hmac.compare_digest(given.encode(), self.api_key.encode()):
                    raise Refused("the API key is wrong; give the server's --api-key", 401, "authentication_error")
                return await handler(request)
            except (UserError, ClientDisconnect) as error:
                return Refused(str(error)).response()
            except Refused as error:
                return error.response()

        return answer

    async def health(self, request: Request) -> Response:
        is_alive = self.answers.is_alive()
        return JSONResponse({"status": "ok" if is_alive else "stopped"}, 200 if is_alive else 503)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.name, "object": "model", "created": 0,
                                                         "owned_by": "triforce"}]})

    async def completions(self, request: Request) -> Response:
        body = await self.body(request, {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"})
        prompt = body.get("prompt")
        several = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
        if not prompt:
            raise Refused("prompt is missing or empty; give a text, ids, or a list of these", param="prompt")
        prompts = await self.encoded(prompt if several else [prompt])
        return await self.respond(request, body, prompts, False, min(16, self.most_tokens), body.get("logprobs"))

    async def chat(self, request: Request) -> Response:
        body = await self.body(request, {"prompt"})
        messages, variables = body.get("messages"), body.get("chat_template_kwargs")
        if not isinstance(messages, list) or not is_messages(messages):
            raise Refused("messages is missing or empty; give a list of {role, content}", param="messages")
        prompts = await self.encoded([list(map(in_text, messages))], chat_template_kwargs=variables)
        usual = max(min(self.most_tokens, self.engine.room(len(prompts[0]))), 1)
        wants = body.get("logprobs", False)
        if not isinstance(wants, bool) or body.get("top_logprobs") and not wants:
            raise Refused(f"logprobs ({wants!r}) must be true or false, and true for top_logprobs", param="logprobs")
        logprobs = body.get("top_logprobs", 0) if wants else None
        return await self.respond(request, body, prompts, True, usual, logprobs)

    async def encoded(self, prompts: list, **how) -> list[list[int]]:
        """Ids of prompts, on another thread: a book takes a second."""
        return [await asyncio.to_thread(self.engine.encode_prompt, one, **how) for one in prompts]

    async def body(self, request: Request, others: set[str]) -> dict:
        """The fields of a request, those that are known. others: of the other way to ask."""
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self.most_bytes:
                raise Refused(f"the body is larger than {self.most_bytes} bytes (--max-body)", 413)
            parts.append(part)
        body = from_json(b"".join(parts))
        if not isinstance(body, dict):
            raise Refused("the body is no JSON object")
        # In ASCII, since an answer that names half of a surrogate pair could not be encoded.
        body = {ascii(name)[1:-1]: one for name, one in body.items() if one is not None and name not in SILENT}
        for name, value in body.items():
            kinds = {"stream": bool, "stream_options": dict}.get(name, object)
            wrong = name in SAMPLING and isinstance(value, bool) or not isinstance(value, kinds) or (
                name == "stream_options" and not isinstance(value.get("include_usage", False), bool))
            if wrong or name not in KNOWN - others and value not in NEUTRAL.get(name, ()):
                raise Refused(f"{name} ({value!r}) is not supported; leave it out", param=name)
        if body.get("model", self.name) != self.name:
            raise Refused(f"model {body['model']!r} is not here; there is {self.name!r}", 404, param="model")
        return body

    async def respond(self, request: Request, body: dict, prompts: list[list[int]], is_chat: bool, usual: int,
                      logprobs) -> Response:
        count, limit = body.get("n", 1), body.get("max_completion_tokens", body.get("max_tokens", usual))
        count, limit = self.number("n", count, self.most_choices), self.number("max_tokens", limit, self.most_tokens)
        if logprobs is not None:
            logprobs = self.number("logprobs", logprobs, MOST_LOGPROBS, 0)
        if len(prompts) * count > self.most_choices:
            raise Refused(f"{len(prompts)} prompts with n {count} are more than {self.most_choices} answers "
                          "(--max-choices)", param="n")
        stop = body.get("stop", [])
        stop = tuple(stop) if isinstance(stop, list) else (stop,)
        sampling = OPENAI | self.engine.defaults | {name: body[name] for name in SAMPLING if name in body}
        bias = sampling.get("logit_bias")
        if isinstance(bias, dict):
            sampling["logit_bias"] = {int(i) if i.isdecimal() and len(i) < 20 else i: one for i, one in bias.items()}
        # Checked here, and what was checked goes on: a mistake would end the answers beside it.
        special_ids(stop_strings(list(stop)), self.engine.tokenizer_or_raise())
        checked = split(sampling, Sampling, what="option")[0][0].rows(1, vocab_size=self.engine.vocab_size)
        drawn = {name: value for name, [value] in vars(checked).items()}
        loop, jobs, queue = asyncio.get_running_loop(), [], asyncio.Queue()
        for ids in prompts:
            self.engine.check_len(len(ids), limit)
            for seed in Sampling(seed=sampling.get("seed")).rows(1, count, lambda: uuid.uuid4().int % 2**32).seed:
                jobs.append(Job(ids, limit, stop, logprobs, drawn | {"seed": seed}, sender(loop, queue, len(jobs)),
                                body.get("stream", False)))
        self.answers.submit(jobs)
        shape = Shape(self.engine, self.name, is_chat, body)
        if body.get("stream"):
            return StreamingResponse(shape.events(jobs, queue), media_type="text/event-stream")
        with cancelling(jobs):
            return JSONResponse(shape.whole(jobs, await gathered(request, queue, len(jobs))))

    @staticmethod
    def number(name: str, value, most: int, least: int = 1) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise Refused(f"{name} ({value!r}) must be a whole number from {least} to {most}", param=name)
        return value


def sender(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue, i: int) -> Callable[[object], None]:
    """Puts (i, item) into the queue of a request. i: of its jobs."""
    def send(item) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody listens
            loop.call_soon_threadsafe(queue.put_nowait, (i, item))

    return send


@contextlib.contextmanager
def cancelling(jobs: list[Job]):
    """However it ends, nothing more is written for these jobs."""
    try:
        yield
    finally:
        for job in jobs:
            job.is_cancelled.set()


async def gathered(request: Request, queue: asyncio.Queue, count: int) -> list[Generation]:
    """The results of all jobs. A client that goes away ends them."""
    found = {}
    while len(found) < count:
        try:
            i, item = await asyncio.wait_for(queue.get(), 0.5)
        except TimeoutError:
            if await request.is_disconnected():
                raise Refused("the client is gone", 499) from None
            continue
        if isinstance(item, Exception):
            raise item
        found[i] = item
    return [found[i] for i in range(count)]


class Shape:
    """Answers in OpenAI's form."""

    def __init__(self, engine: Engine, model: str, is_chat: bool, body: dict):
        self.engine, self.is_chat = engine, is_chat
        self.wants_usage = (body.get("stream_options") or {}).get("include_usage", False)
        kind = "chat.completion" if is_chat else "text_completion"
        self.head = {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}", "object": kind,
                     "created": int(time.time()), "model": model}

    def whole(self, jobs: list[Job], results: list[Generation]) -> dict:
        choices = []
        for i, result in enumerate(results):
            text = {"message": {"role": "assistant", "content": result.text}} if self.is_chat else {"text": result.text}
            choices.append({"index": i, **text, "logprobs": self.logprobs(result), "finish_reason": reason(result)})
        return {**self.head, "choices": choices, "usage": usage(jobs, results)}

    async def events(self, jobs: list[Job], queue: asyncio.Queue) -> AsyncIterator[str]:
        """Server-sent events, as they come; the log-probabilities of an answer come with its end."""
        with cancelling(jobs):
            results, sent = {}, [0] * len(jobs)
            if self.is_chat:
                for i in range(len(jobs)):
                    yield self.event(i, {"role": "assistant", "content": ""})
            while len(results) < len(jobs):
                i, item = await queue.get()
                if isinstance(item, Exception):
                    told = item if isinstance(item, Refused) else Refused(str(item))
                    yield f"data: {json.dumps({'error': told.body()})}\n\n"
                    return
                text = item.text[sent[i] :] if isinstance(item, Generation) else item
                sent[i] += len(text)
                if text:
                    yield self.event(i, {"content": text} if self.is_chat else text)
                if isinstance(item, Generation):
                    results[i] = item
                    yield self.event(i, {} if self.is_chat else "", reason(item), self.logprobs(item))
            if self.wants_usage:
                every = list(results.values())
                yield f"data: {json.dumps({**self.chunk, 'choices': [], 'usage': usage(jobs, every)})}\n\n"
            yield "data: [DONE]\n\n"

    @property
    def chunk(self) -> dict:
        return {**self.head, "object": "chat.completion.chunk"} if self.is_chat else self.head

    def event(self, i: int, text, finish: str | None = None, logprobs=None) -> str:
        choice = {"index": i, "delta" if self.is_chat else "text": text, "logprobs": logprobs, "finish_reason": finish}
        return f"data: {json.dumps({**self.chunk, 'choices': [choice]})}\n\n"

    def logprobs(self, result: Generation) -> dict | None:
        if result.logprobs is None:
            return None
        spelled = self.engine.tokenizer_or_raise().token_bytes
        rows = [(spelled(token), one.model_logprob, [(spelled(other), value) for other, value in one.top])
                for token, one in zip(result.tokens, result.logprobs, strict=True)]
        if not self.is_chat:
            return {"tokens": [as_text(token) for token, _, _ in rows],
                    "token_logprobs": [value for _, value, _ in rows],
                    "top_logprobs": [{as_text(other): value for other, value in top} for _, _, top in rows],
                    "text_offset": [0, *accumulate(map(len, result.pieces))][:-1]}

        def entry(token: bytes, value: float) -> dict:
            return {"token": as_text(token), "logprob": value, "bytes": list(token)}

        return {"content": [{**entry(token, value), "top_logprobs": [entry(*one) for one in top]}
                            for token, value, top in rows]}


def in_text(message: dict) -> dict:
    """A message whose content is a text, where it is a list of parts that are texts."""
    if not isinstance(parts := message.get("content"), list):
        return message
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise Refused("content has a part that is no text; give texts alone", param="messages")
    return message | {"content": "".join(part["text"] for part in parts)}


def as_text(token: bytes) -> str:
    """As OpenAI names tokens: bytes that are no text of their own by their numbers, so that no two are alike."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def reason(result: Generation) -> str:
    return result.finish_reason if result.finish_reason in ("stop", "length") else "stop"


def usage(jobs: list[Job], results: list[Generation]) -> dict:
    """Tokens of all answers. A prompt counts once, however many answers it has."""
    prompts = {id(job.ids): job for job in jobs}.values()
    asked, written = sum(len(job.ids) for job in prompts), sum(len(result.tokens) for result in results)
    return {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written,
            "prompt_tokens_details": {"cached_tokens": sum(job.cached for job in prompts)}}


def main(argv: list[str] | None = None) -> int:
    """`triforce serve`."""
    p = Parser(prog="triforce serve", description="Serves a checkpoint by OpenAI's interface.")
    p.add_argument("--checkpoint", default="tiny", help="a folder or a repository id")
    p.add_argument("--draft", help="a draft model, ngram or none")
    p.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of load: budget=512")
    p.add_argument("--host", default="127.0.0.1", help="default: this machine alone")
    p.add_argument("--port", type=int, default=8000, help="default 8000")
    p.add_argument("--api-key", help="what clients must give; default: nothing")
    p.add_argument("--served-model-name", help="default: the checkpoint")
    p.add_argument("--cache-memory", default="8GB", help="memory for held documents (default 8GB)")
    p.add_argument("--cache-dir", help="a folder for files of documents (see also --set cache_dir_size=64GB)")
    p.add_argument("--max-batch-size", type=int, default=4, help="answers side by side that share nothing (default 4)")
    p.add_argument("--max-waiting", type=count, default=256, help="answers that may wait (default 256)")
    p.add_argument("--max-tokens", type=count, default=4096, help="of an answer, at most (default 4096)")
    p.add_argument("--max-choices", type=count, default=16, help="answers of a request, at most (default 16)")
    p.add_argument("--max-body", type=count, default=2**26, help="bytes of a request (default 64 MiB)")
    args = p.parse_args(argv)
    if "" in (args.api_key, args.host):
        raise UserError("--api-key or --host is empty, and would let everybody in; give one, or leave it out")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("triforce serve is one process; drop torchrun")
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    try:  # before the checkpoint is read
        place = socket.create_server((args.host, args.port), family=family)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot serve at {args.host}:{args.port}, {error}; choose another --port or --host") from None
    options = dict(one.partition("=")[::2] for one in args.set)
    for name, value in options.items():
        with contextlib.suppress(ValueError):
            options[name] = json.loads(value)
    for name in options.keys() & {"checkpoint", "group"}:
        raise UserError(f"--set {name} is not for a server, which is one process; --checkpoint names the model")
    options = {"draft": args.draft, "max_batch_size": args.max_batch_size, "cache_dir": args.cache_dir} | options
    options["draft"] = options["draft"] != "none" and options["draft"]
    engine = load(args.checkpoint, **options)
    engine.tokenizer_or_raise()
    answers = Answers(engine, args.max_waiting, Documents(engine, parse_size(args.cache_memory, "--cache-memory")))
    server = Server(answers, args.served_model_name or args.checkpoint, args.api_key, args.max_tokens,
                    args.max_choices, args.max_body)
    print(f"http://{args.host}:{args.port}/v1 serves {server.name}; Ctrl-C ends it", flush=True)
    Listening(answers, server.app, args.host, args.port).run([place])
    return 0


class Listening(uvicorn.Server):
    """The web server and, as long as it runs, the thread of the answers: Ctrl-C ends what is being written."""

    def __init__(self, answers: Answers, app: Starlette, host: str, port: int):
        super().__init__(uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=10))
        self.answers = answers

    def handle_exit(self, sig, frame) -> None:
        self.answers.stop()
        super().handle_exit(sig, frame)

    def run(self, sockets=None) -> None:
        self.answers.start()
        try:
            super().run(sockets)
        finally:
            self.answers.stop()
            self.answers.join()
