"""`triforce.generate` keeps the engine that fits the call; `python -m triforce` ends as its command does."""

import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from conftest import python, refused
from transformers import AutoModelForCausalLM

import triforce
from triforce import UserError, api
from triforce.api import drawn_from
from triforce.hf.folders import TINY


class Loaded:
    def __init__(self, checkpoint, loading):
        self.checkpoint, self.loading = checkpoint, loading

    def generate(self, prompt, **options):
        return self, prompt, options


def test_the_engine_is_kept_for_calls_that_want_the_same(monkeypatch):
    monkeypatch.setattr(api, "load", lambda checkpoint, **loading: Loaded(checkpoint, loading))
    monkeypatch.setattr(api, "_kept", {})
    first, prompt, options = api.generate("a", gamma=3, chunk_size=4, temperature=0.5)
    assert (first.checkpoint, first.loading) == ("tiny", {"gamma": 3, "chunk_size": 4})
    assert (prompt, options) == ("a", {"temperature": 0.5})
    assert api.generate("b", chunk_size=4, gamma=3, seed=1)[0] is first  # whatever is asked of it, in any order
    seen = weakref.ref(first)
    for other in ({"gamma": 4, "chunk_size": 4}, {"gamma": 4, "chunk_size": 8}, {"gamma": 4},
                  {"checkpoint": str(TINY / "draft"), "gamma": 4}):
        last, first = first, api.generate("a", **other)[0]
        assert first is not last and first.loading.items() <= other.items()
        assert first.checkpoint == other.get("checkpoint", "tiny")
    del last
    gc.collect()
    assert seen() is None  # one at a time


def test_the_module_ends_with_the_status_of_the_command():
    done = python("-m", "triforce", "--prompt", "", "--device", "cpu")
    assert done.returncode == 2 and "prompt is empty" in done.stderr


SCRIPT = """
import sys, torch, triforce
from triforce.config import Settings
from triforce.engine.memory import plan_memory
from triforce.decode.batch import Sizes
engine = triforce.load("tiny", device="cpu")
models = engine.target.config, engine.draft.config
for options in ({}, dict(sampling="coupled", tree_size=512), dict(retrieval=False)):
    for device in map(torch.device, ("cpu", "cuda")):
        for more in ({}, {"shared": 1024}, {"resident_layers": 1}):
            settings = Settings(**options).resolve(device, offload="resident_layers" in more)
            sizes = Sizes(batch=1, capacity=4096, budget=512, vocab_size=64, **more)
            assert plan_memory(*models, settings, sizes, torch.float16, device)
print([name for name in ("sympy", "torch._inductor", "torch._dynamo") if name in sys.modules])
stream = engine.stream("Call me", 200)
print(next(stream) != "")
"""


def test_no_plan_imports_the_compiler_and_a_stream_that_is_open_at_the_end_leaves_nothing(tmp_path):
    """Python closes it when nothing can be imported any more."""
    done = python("-c", SCRIPT, env={**os.environ, "TRIFORCE_CACHE": str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\nTrue\n", "")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and not path.stat().st_size]


def test_mistakes_are_found_before_anything_is_loaded(monkeypatch):
    with pytest.raises(UserError, match=r"checkpoint \(16\) .* max_new_tokens="):  # a number in its place
        api.generate("a", 16)
    monkeypatch.setattr(api, "load", lambda *args, **more: pytest.fail("loaded"))
    monkeypatch.setattr(api, "_kept", {})
    refused("gama", api.generate, "a", gama=3)


def test_threads_that_call_at_once_share_one_engine(monkeypatch):
    loaded, ready = [], threading.Barrier(4)

    def load(checkpoint, **loading):
        time.sleep(0.2)  # so that the others come meanwhile
        loaded.append(Loaded(checkpoint, loading))
        return loaded[-1]

    monkeypatch.setattr(api, "load", load)
    monkeypatch.setattr(api, "_kept", {})
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda i: (ready.wait(), api.generate(f"{i}", gamma=3))[1], range(4)))
    assert len(loaded) == 1
    assert [(engine, prompt) for engine, prompt, _ in got] == [(loaded[0], f"{i}") for i in range(4)]


@pytest.mark.slow
def test_a_script_for_transformers_gets_its_answers():
    """Ids in and out, greedy tokens those of transformers: a batch that is filled up on the left, ends of its own."""
    theirs = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)
    engine = triforce.load("tiny", device="cpu", dtype="float32", sampling="coupled")
    short, long = (engine.tokenizer.encode(text) for text in ("The sea", "Call me Ishmael. Some years ago, I"))
    ids = torch.tensor([[0] * (len(long) - len(short)) + short, long])
    mask = torch.tensor([[0] * (len(long) - len(short)) + [1] * len(short), [1] * len(long)])
    ours = triforce.AsTransformers(engine)
    how = {"max_new_tokens": 12, "do_sample": False, "num_beams": 1, "use_cache": True, "temperature": 1.0}
    found = ours.generate(ids, attention_mask=mask, **how)
    want = theirs.generate(ids, attention_mask=mask, pad_token_id=0, **how)
    assert found.shape == (2, len(long) + 12) and torch.equal(found, want)
    end = found[1, len(long) + 3].item()
    one = ours.generate(ids[1:], eos_token_id=[end], pad_token_id=7, return_dict_in_generate=True, **how).sequences
    assert one[0, -1] == end and one.shape[1] <= len(long) + 4
    engine.defaults = {}  # as of a checkpoint that says nothing
    drawn = [ours.generate(ids[1:], max_new_tokens=12, do_sample=True, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    wide = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}  # transformers' own, whatever `Engine.generate` has
    assert drawn[0][0, len(long) :].tolist() == engine.generate(long, 12, seed=1, **wide).tokens
    assert drawn_from(SimpleNamespace(defaults={"temperature": 0.0, "top_k": 9})) == {**wide, "top_k": 9}
    for wrong in ({"num_beams": 2}, {"length_penalty": 2.0}):
        refused(next(iter(wrong)), ours.generate, ids, **{**how, **wrong})
