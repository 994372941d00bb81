"""`triforce serve`, by the client of OpenAI and by plain HTTP, on a socket of this machine."""

import json
import random
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from conftest import make_engine, random_prompt, refused

import triforce
from triforce import UserError, serve
from triforce.engine.output import Generation, Stats
from triforce.serve import Answers, Documents, Job, Listening, Refused, Server

DOCUMENTS = ["".join(f"Item {n}: the {word} has the number {n * k % 97}.\n" for n, word in enumerate(
    ["apple", "river", "stone", "cloud", "paper"] * 12)) for k in (3, 5, 7)]
QUESTIONS = ["The apple", "The river has", "A stone", "Item 7", "Paper and", "Where is"]


@pytest.fixture(scope="module")
def served():
    """(engine, answers, address)."""
    engine = triforce.load("tiny", device="cpu", max_batch_size=2, sampling="coupled")
    answers = Answers(engine, 200, Documents(engine, 2**30))
    server = Server(answers, "tiny", "a key", most_tokens=64, most_choices=4, most_bytes=2**20)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    listening = Listening(answers, server.app, "127.0.0.1", port)
    thread = threading.Thread(target=listening.run)
    thread.start()
    while not listening.started:
        time.sleep(0.02)
    yield engine, answers, f"http://127.0.0.1:{port}"
    listening.should_exit = True
    thread.join(20)
    assert not thread.is_alive() and not answers.is_alive()


@pytest.fixture
def client(served):
    return openai.OpenAI(base_url=f"{served[2]}/v1", api_key="a key", max_retries=0)


def alone(engine, prompt, count, **how):
    """What the engine itself answers."""
    return engine.generate(prompt, count, **{"temperature": 0.0, **how})


def test_a_completion_is_the_engines_answer(served, client):
    engine = served[0]
    for prompt in ("The sea", engine.tokenizer.encode("The sea")):
        found = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
        result = alone(engine, "The sea", 12)
        assert found.choices[0].text == result.text and found.choices[0].finish_reason == result.finish_reason
        asked = len(engine.tokenizer.encode("The sea"))
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (asked, len(result.tokens))
    assert [one.id for one in client.models.list()] == ["tiny"]


def test_what_a_request_may_ask_for(served, client):
    """Several prompts, samples by seed, an end of its own, a bias, log-probabilities."""
    engine, how = served[0], {"model": "tiny", "max_tokens": 10}
    # A list of one value is that value, and no mistake of its neighbours in the batch.
    for prompt in ("a", ["a", "b"]):
        asked = {"prompt": prompt, "n": 2, "max_tokens": 2}
        assert post(served, "/v1/completions", {**asked, "temperature": [0.5]})[0] == 200
        assert post(served, "/v1/completions", {**asked, "temperature": [0.5, 0.6]})[0] == 400
    found = client.completions.create(prompt=["The sea", "One, two"], n=2, seed=5, temperature=0.8, top_p=0.9, **how)
    texts = [engine.generate(prompt, 10, seed=seed, temperature=0.8, top_p=0.9).text
             for prompt in ("The sea", "One, two") for seed in (5, 6)]
    assert [one.text for one in found.choices] == texts and [one.index for one in found.choices] == [0, 1, 2, 3]
    free = alone(engine, "The sea", 10)
    end = free.text[4:7]
    cut = client.completions.create(prompt="The sea", stop=[end, "never"], temperature=0, **how).choices[0]
    assert cut.text == free.text[: free.text.index(end)] and cut.finish_reason == "stop"
    banned = free.tokens[0]
    other = client.completions.create(prompt="The sea", logit_bias={str(banned): -100}, temperature=0, **how)
    assert other.choices[0].text == alone(engine, "The sea", 10, logit_bias={banned: -100}).text != free.text
    told = client.completions.create(prompt="The sea", logprobs=2, temperature=0, **how).choices[0].logprobs
    want = alone(engine, "The sea", 10, logprobs=2)
    assert told.token_logprobs == pytest.approx([one.model_logprob for one in want.logprobs], abs=1e-4)
    assert "".join(told.tokens) == want.text and all(len(one) == 2 for one in told.top_logprobs)
    face = client.completions.create(prompt="\N{GRINNING FACE}", logprobs=20, temperature=0, **how)
    likely = face.choices[0].logprobs.top_logprobs  # bytes that are no text among them
    assert all(len(one) == 20 for one in likely) and any(x.startswith("bytes:\\x") for one in likely for x in one)
    more = client.completions.create(prompt="The sea", temperature=0, extra_body={"top_k": 3, "min_p": 0.1}, **how)
    assert more.choices[0].text == free.text


def test_a_stream(served, client):
    """Pieces that join to the answer, a reason at the end, usage where asked for; the last line is [DONE]."""
    engine = served[0]
    result = alone(engine, "Once upon a time", 40)
    chunks = list(client.completions.create(model="tiny", prompt="Once upon a time", max_tokens=40, temperature=0,
                                            stream=True, stream_options={"include_usage": True}))
    assert "".join(one.choices[0].text for one in chunks if one.choices) == result.text
    assert sum(bool(one.choices) and bool(one.choices[0].text) for one in chunks) > 2
    assert chunks[-2].choices[0].finish_reason == result.finish_reason
    assert chunks[-1].usage.completion_tokens == len(result.tokens)
    body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "stream": True}
    assert post(served, "/v1/completions", body)[1].strip().splitlines()[-1] == "data: [DONE]"


def post(served, path, body, key="a key"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(served[2] + path, data, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("argv, says", [
    (["--api-key", ""], "--api-key or --host is empty"), (["--host", ""], "would let everybody in"),
    (["--set", "group=1"], "--set group is not for a server"),
    ([], "drop torchrun"), (["--set", "checkpoint=x"], "--set checkpoint is not for a server")])
def test_what_no_server_starts_with(argv, says, monkeypatch):
    monkeypatch.setattr(serve, "load", lambda *args, **how: pytest.fail("loaded"))
    monkeypatch.setenv("WORLD_SIZE", "2" if says.endswith("torchrun") else "1")
    refused(says, serve.main, [*argv, "--port", "0"])


@pytest.mark.parametrize("body, status, says", [
    (b"no json", 400, "no JSON object"), ({"model": "other", "prompt": "a"}, 404, "model 'other' is not here"),
    ({"prompt": ""}, 400, "prompt is missing or empty"), ({"prompt": "a", "max_tokens": 65}, 400, "from 1 to 64"),
    ({"prompt": "a", "n": 5}, 400, "from 1 to 4"), ({"prompt": ["a"] * 5}, 400, "more than 4 answers"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature (-1) must be"),
    ({"prompt": "a", "stop": [3]}, 400, "stop ([3]) must be"), ({"prompt": "a", "tools": [{}]}, 400, "tools ([{}])"),
    ({"prompt": "a", "logit_bias": {"99999999": 1}}, 400, "99999999"),
    ({"prompt": [10**9]}, 400, "outside the vocabulary"), ({"prompt": "a " * 2**20}, 413, "larger than 1048576 bytes"),
    ({"prompt": "a", "stream": True, "stream_options": 1}, 400, "stream_options (1) is not supported"),
    ({"prompt": "a", "stream": "false"}, 400, "stream ('false')"),
    ({"prompt": "a", "max_tokens": 0}, 400, "from 1 to 64"),
    ({"prompt": "a", "temperature": True}, 400, "temperature (True)"),
    ({"prompt": "a", "logit_bias": {"²": 1}}, 400, "logit_bias"),
    ({"prompt": "a", "messages": []}, 400, "messages ([])"),
    ({"prompt": "a", "n": 2, "seed": 2**63 - 1}, 400, "seed (9223372036854775808)"),
    (rb'{"prompt": "a", "\ud800": 1}', 400, "ud800 (1) is not supported"),
    ({"prompt": "a", "stream": True, "stream_options": {"include_usage": "no"}}, 400, "'no'}) is not supported"),
    (f'{{"prompt": {"[" * 900}5{"]" * 900}}}'.encode(), 400, "a prompt is text, a list of whole numbers"),
    ({"prompt": "a", "colour": "red"}, 400, "colour ('red') is not supported")])
def test_what_is_refused(served, body, status, says):
    """In OpenAI's form, with the library's words; the server goes on."""
    found, text = post(served, "/v1/completions", body)
    assert found == status and says in json.loads(text)["error"]["message"]
    fine = {"prompt": "a", "max_tokens": 2, "frequency_penalty": 0, "user": "x"}
    assert post(served, "/v1/completions", fine)[0] == 200


def test_a_mistake_is_told_before_it_is_queued(served, monkeypatch):
    """There it would end the answers beside it."""
    monkeypatch.setattr(served[1], "submit", lambda jobs: pytest.fail("queued"))
    assert post(served, "/v1/completions", {"prompt": "a", "n": 2, "seed": 2**63 - 1})[0] == 400


def test_who_wants_no_pieces_gets_none(served):
    """So who waits for the whole answer is asked whether its client is still there."""
    engine, answers, _ = served
    got, law = [], {"temperature": 0.0, "top_p": 1.0, "seed": 0}
    answers.submit([Job(engine.tokenizer.encode("The sea"), 9, (), None, law, got.append, False)])
    while not got:
        time.sleep(0.02)
    assert [one.text for one in got] == [alone(engine, "The sea", 9).text]
    assert post(served, "/v1/chat/completions", {"messages": [5]})[0] == 400


def test_a_port_that_is_taken(served, command):
    for port in (served[2].rpartition(":")[2], "99999"):
        said = command("serve", "--port", port, status=2)
        assert "choose another --port" in said.err and len(said.err.splitlines()) == 1 and said.out == ""


@pytest.mark.parametrize("flags, asked", [
    (["--draft", "none", "--set", "max_batch_size=8"], {"draft": False, "max_batch_size": 8, "cache_dir": None}),
    (["--set", "draft=none", "--cache-dir", "a"], {"draft": False, "max_batch_size": 4, "cache_dir": "a"}),
    (["--draft", "b", "--set", "budget=512"], {"draft": "b", "max_batch_size": 4, "cache_dir": None, "budget": 512})])
def test_how_a_server_loads(monkeypatch, command, flags, asked):
    """--set has the last word; limits are at least 1."""
    found = []

    def load(checkpoint, **options):
        found.append(options)
        raise UserError("enough")

    monkeypatch.setattr(serve, "load", load)
    assert command("serve", "--port", "0", *flags, status=2).err == "error: enough\n" and found == [asked]
    assert "--max-tokens" in command("serve", "--max-tokens", "0", status=2).err


def test_keys_and_health(served):
    assert post(served, "/v1/completions", {"prompt": "a"}, key="another")[0] == 401
    for path, status in (("/v1/nothing", 404), ("/v1/models", 405)):
        said = post(served, path, {})
        assert said[0] == status and path in json.loads(said[1])["error"]["message"]
    with urllib.request.urlopen(served[2] + "/health", timeout=20) as reply:
        assert json.loads(reply.read()) == {"status": "ok"}


def test_a_chat(served, client):
    """The embedded pair has no chat template, and says so; a template's text is the engine's own."""
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
    engine = served[0]
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine.tokenizer), "chat_template", lambda self, tools=None: template)
        messages = [{"role": "user", "content": "Where is the sea?"}]
        result = alone(engine, messages, 12)
        how = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
        found = client.chat.completions.create(logprobs=True, top_logprobs=1, **how).choices[0]
        assert found.message.content == result.text and len(found.logprobs.content) == len(result.tokens)
        pieces = [one.choices[0].delta.content or "" for one in client.chat.completions.create(stream=True, **how)]
        assert "".join(pieces) == result.text
        parts = [{"type": "text", "text": "Where is "}, {"type": "text", "text": "the sea?"}]
        how["messages"] = [{"role": "user", "content": parts}]
        assert client.chat.completions.create(**how).choices[0].message.content == result.text
        parts[1] = {"type": "image_url", "image_url": {"url": "x"}}
        with pytest.raises(openai.BadRequestError, match="a part that is no text"):
            client.chat.completions.create(**how)


@pytest.mark.slow
def test_many_clients_over_three_documents(served, client, watched):
    """In random order, some of whom go away: each answer is the engine's own; documents are computed once, and held;
    no thread and no job is left over."""
    engine, answers, _ = served
    cases = [(document, question) for document in range(3) for question in QUESTIONS]
    random.Random(0).shuffle(cases)
    limits = [random.Random(n).randint(4, 20) for n in range(len(cases))]
    threads, prefilled = threading.active_count(), watched(type(engine), "prefill", lambda self, ids, **more: len(ids))
    sizes = watched(Answers, "_answer", lambda self, group: len(group))

    def ask(number):
        document, question = cases[number]
        how = {"model": "tiny", "prompt": DOCUMENTS[document] + question, "temperature": 0}
        how["max_tokens"] = limits[number]
        if number % 6 == 5:
            stream = client.completions.create(stream=True, **how)
            next(iter(stream))
            stream.close()
            return None
        if number % 2:
            return "".join(one.choices[0].text for one in client.completions.create(stream=True, **how))
        return client.completions.create(**how).choices[0].text

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, range(len(cases))))
    again = [client.completions.create(model="tiny", prompt=document + "Once more", max_tokens=2).usage
             for document in DOCUMENTS]
    assert len(prefilled) == 3 and max(sizes) > 2
    assert all(one.prompt_tokens_details.cached_tokens > 512 for one in again)
    for (document, question), limit, one in zip(cases, limits, found, strict=True):
        assert one is None or one == alone(engine, DOCUMENTS[document] + question, limit).text
    deadline = time.time() + 10
    while (answers._waiting or threading.active_count() > threads + 2) and time.time() < deadline:
        time.sleep(0.1)
    assert not answers._waiting


def test_too_many_wait_and_an_end():
    """More than may wait get status 429, and one that the server's end cuts off is an error. Who is gone waits not."""
    engine = triforce.load("tiny", device="cpu")
    answers = Answers(engine, 1, Documents(engine, 0))
    got, begun = [], threading.Event()

    def send(item):
        got.append(item)
        begun.set()

    ids = engine.tokenizer.encode("Once upon a time")
    law = {"temperature": 0.0, "top_p": 1.0, "seed": 0}
    jobs = [Job(ids, 2000, (), None, law, send, True) for _ in range(4)]
    with pytest.raises(Refused, match="0 answers wait and 1 may"):
        answers.submit(jobs[:2])
    answers.submit(jobs[3:])
    jobs[3].is_cancelled.set()
    answers.submit(jobs[:1])
    answers.start()
    assert begun.wait(60)
    answers.stop()
    answers.join(60)
    assert not answers.is_alive() and len(got) > 1 and all(isinstance(one, str) for one in got[:-1])
    assert isinstance(got[-1], Refused) and (got[-1].status, str(got[-1])) == (503, "the server is stopping")
    with pytest.raises(Refused, match="stopping"):
        answers.submit(jobs[2:3])


def test_what_fails_side_by_side_is_answered_alone(monkeypatch):
    """Where memory is short for a group, say. What does not fit alone gets the error, and documents make room."""
    engine = triforce.load("tiny", device="cpu", max_batch_size=3)
    answers, got, sizes = Answers(engine, 9, Documents(engine, 2**30)), {}, []
    answers.documents.held.append(engine.prefill(list(range(5, 700))))
    stream = engine.stream

    def short(prompts, *args, **how):
        sizes.append((len(prompts), len(answers.documents.held)))
        if len(prompts) > 1 or len(prompts[0]) > 60:
            raise UserError("this needs more")
        return stream(prompts, *args, **how)

    monkeypatch.setattr(engine, "stream", short)
    law, done = {"temperature": 0.0, "top_p": 1.0, "seed": 0}, threading.Semaphore(0)
    answers.submit([Job(list(range(9, 9 + 30 * n)), 3, (), None, law,
                        lambda item, n=n: (got.update({n: item}), done.release()), False) for n in (1, 2, 3)])
    answers.start()
    assert all(done.acquire(timeout=60) for _ in range(3))
    answers.stop()
    answers.join(60)
    assert str(got[3]) == "this needs more" and not any(isinstance(got[n], Exception) for n in (1, 2))
    assert [len(got[n].tokens) for n in (1, 2)] == [3, 3]
    assert sizes == [(3, 1), (1, 0), (1, 0), (1, 0)]


class Written:
    """A stream of a piece, and then of an error or an end."""

    def __init__(self, end):
        self.end, self.results = end, [end]

    def __iter__(self):
        yield 0, "a piece"
        if isinstance(self.end, Exception):
            raise self.end

    def ended(self, i):
        return None

    def cancel(self, i):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("end, told", [
    (UserError("memory ran out"), "memory ran out"), (RuntimeError("broken"), "the engine failed: RuntimeError"),
    (Generation("a piece", [5], "stop", Stats(1)), None)])
def test_what_was_begun_is_told_once(monkeypatch, end, told):
    """And an answer that is complete as the server ends is an answer."""
    engine = triforce.load("tiny", device="cpu")
    answers, got, calls, done = Answers(engine, 9, Documents(engine, 0)), [], [], threading.Event()

    def send(item):
        got.append(item)
        if isinstance(item, str) and told is None:
            answers.stop()
        if not isinstance(item, str):
            done.set()

    monkeypatch.setattr(engine, "stream", lambda *args, **how: calls.append(1) or Written(end))
    law = {"temperature": 0.0, "top_p": 1.0, "seed": 0}
    answers.documents.held.append(engine.prefill(list(range(5, 700))))
    answers.submit([Job([9, 10, 11], 3, (), None, law, send, True)])
    answers.start()
    assert done.wait(60)
    answers.stop()
    answers.join(60)
    assert got[0] == "a piece" and len(got) == 2 and len(calls) == 1
    assert got[1] is end if told is None else told in str(got[1])


def test_documents_in_memory_and_in_files(tmp_path, pair):
    """The least recently used goes first, and comes back from its file, in another process's engine too; what another
    model wrote is left alone."""
    how = {"flush_interval": 16, "chunk_size": 4, "budget": 64, "max_seq_len": 2048, "cache_dir": tmp_path / "files"}
    engine = make_engine(*pair, **how)
    texts = [random_prompt(700, seed=seed) for seed in range(3)]
    documents = Documents(engine, 1)
    for text in texts:
        document, cached = documents.of([text, text[:690] + [1, 2, 3]])
        assert cached == 0 and len(document) == document.num_shared == 688 and document.tokens == text[:688]
        engine.generate(text[688:], 1, prefix=document)
    assert len(documents.held) == 1 and len(list((tmp_path / "files").iterdir())) == 3
    (tmp_path / "files/other.safetensors").write_bytes(b"no file of ours")
    again = Documents(make_engine(*pair, **how), 2**30)
    for one in (documents, again):
        document, cached = one.of([texts[0][:680] + [5, 6]])
        assert cached == len(document) == 672 and document.tokens == texts[0][:672]
        assert one.of([texts[0][:600]])[1] == 592
        short, none = one.of([texts[1][:300]])
        assert short is None and none == 0
    want = engine.generate(texts[0][:680] + [5, 6], 8, temperature=0.0).tokens
    found = again.engine.generate(texts[0][672:680] + [5, 6], 8, temperature=0.0, prefix=document).tokens
    assert found == want
