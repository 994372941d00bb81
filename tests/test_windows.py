"""Layers that see the newest keys alone: what they compute, on every level, beyond the window."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import VOCAB, bits, bits_of_rows, make_engine, make_state, random_prompt, run_rounds, slow
from families import build, config_json, save
from reference import dense_logits
from transformers import AutoConfig, Gemma3Config, Gemma3ForConditionalGeneration

import triforce
from triforce import UserError, attention
from triforce.config import Settings
from triforce.decode.batch import Sizes
from triforce.decode.plan import AUTOREGRESSION, DraftPlan
from triforce.engine.logprobs import logits_of
from triforce.engine.memory import plan_memory
from triforce.engine.prompt_cache import layout_of
from triforce.engine.prompt_cache import opened as opened_file
from triforce.engine.prompt_cache_file import write
from triforce.hf.checkpoint import load_model
from triforce.hf.config import config_from_hf
from triforce.model import ModelConfig, Transformer

WINDOW = 40
KINDS = {"some": (0, 2), "all": (0, 1, 2)}


def models_of(kind: str, dtype=torch.float32, std: float = 0.2):
    """A draft whose layers have windows, too."""
    make = {"max_position_embeddings": 8192, "sliding_window": WINDOW}
    target = ModelConfig(VOCAB, 32, 3, 4, 2, 8, 48, sliding_layers=KINDS[kind], **make)
    draft = ModelConfig(VOCAB, 16, 2, 2, 2, 8, 32, sliding_layers=(1,), **make)
    return [Transformer.random(config, seed=i, std=std, dtype=dtype) for i, config in enumerate((target, draft))]


@pytest.fixture(autouse=True)
def short_rings(monkeypatch):
    """A layer with a window keeps that, and two flush intervals: each text here goes around several times."""
    monkeypatch.setattr(triforce.cache.prefix, "BACK", 0)


@pytest.fixture(scope="module", params=["some", *slow("all")])
def models(request):
    return models_of(request.param)


@pytest.mark.parametrize("rows,keys,window", [(1, 1, 5), (3, 40, 7), (70, 100, 30), (1100, 1300, 33), (600, 600, 700)])
def test_attention_within_a_window(rows, keys, window, monkeypatch):
    q, k, v = (torch.randn(2, heads, n, 8) for heads, n in ((4, rows), (2, keys), (2, keys)))
    at, key = torch.arange(keys - rows, keys)[:, None], torch.arange(keys)
    seen = (key <= at) & (key > at - window)
    counts, masked = [], attention.masked
    monkeypatch.setattr(attention, "masked", lambda q, k, *rest, **how: counts.append(k.shape[2]) or masked(
        q, k, *rest, **how))
    out, lse = attention.windowed(q, k, v, window)
    assert all(count % 8 == 0 for count in counts[1:])  # or no fused kernel takes them; the first may begin the text
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    scores = (q @ k.transpose(2, 3) / 8**0.5).masked_fill(~seen, float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-5, rtol=1e-4)


FAMILIES = {"Gemma 3": {}, "Gemma 3 270M": {}, "OLMo 3": {"rope_theta": 300.0}, "Mistral 0.1": {}, "Ministral": {},
            "Phi-3-mini-4k": {},
            "Qwen2.5": {"use_sliding_window": True, "max_window_layers": 1},
            "Qwen3": {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            "SmolLM3": {"use_sliding_window": True}, "gpt-oss": {}}


@pytest.mark.parametrize("family", [*list(FAMILIES)[::2], *slow(*list(FAMILIES)[1::2])])
def test_a_family_equals_transformers_beyond_its_window(family, tmp_path):
    more = {**FAMILIES[family], "sliding_window": WINDOW}
    theirs = build(family, **more)
    folder = save(theirs, {**config_json(family), **more}, tmp_path / "model")
    engine = make_engine(load_model(folder, dtype=torch.float32), flush_interval=16, budget=48, prefill_chunk_size=64)
    assert engine.target.config.sliding_layers
    ids = torch.randint(3, 96, (1, 150))
    with torch.inference_mode():
        expected = theirs(ids).logits
        wide = build(family, **{**more, "sliding_window": 4096})(ids).logits
    assert (wide - expected).abs().max() > 0.1  # the window matters
    torch.testing.assert_close(dense_logits(engine.target, ids)[0], expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(engine.logits(ids)[0], expected[0], atol=1e-4, rtol=1e-4)
    said = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False,
                           eos_token_id=None, pad_token_id=0)[0, 150:].tolist()
    for speculate in (True, False):
        answer = engine.generate(ids[0].tolist(), 40, temperature=0.0, ignore_eos=True, speculate=speculate)
        assert answer.tokens == said


def test_of_a_gemma_that_sees_images_the_text_model_loads(tmp_path):
    """Its published config leaves out what its class has by default; its weights have names of their own."""
    text = {key: value for key, value in config_json("Gemma 3").items() if key not in ("architectures", "model_type")}
    images = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}
    theirs = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=images, image_token_index=95))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.15)
    theirs.eval().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())  # what stands outside is not the text model's
    assert config["text_config"].pop("rms_norm_eps") == 1e-6  # its class's own
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    ids = torch.randint(3, 90, (1, 100))
    with torch.inference_mode():
        expected = theirs(ids).logits[0]
    model = load_model(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(dense_logits(model, ids)[0], expected, atol=1e-4, rtol=1e-4)
    left_out = {**config_json("Gemma 3"), "num_attention_heads": None, "num_key_value_heads": None}
    whole = config_from_hf({"model_type": "gemma3", "text_config": left_out})
    assert (whole.n_head, whole.n_kv_head) == (8, 4)


@pytest.mark.parametrize("levels,gamma,interval", [("triforce", 6, 16), ("retrieval", 4, 16), ("draft", 3, 64), *slow(
    ("ngram", 6, 16), ("query", 4, 16), ("streaming", 4, 16))])
def test_greedy_bits_and_dense_logits(models, levels, gamma, interval):
    """A tail of 64 tokens is longer than the window."""
    target, draft = models
    prompt = random_prompt(600)
    how = {"capacity": 2048, "flush_interval": interval}
    expected = bits(make_state(target, None, [prompt], retrieval=False, **how), 90)[:2]
    state = make_state(target, draft if levels in ("triforce", "draft") else None, [prompt], **how,
                       retrieval=levels != "draft", ngram=levels == "ngram", gamma=gamma,
                       draft_cache=levels if levels in ("query", "streaming") else None)
    tokens, hashes, rejected, _ = bits(state, 90)
    exact = levels != "draft" and len(target.config.sliding_layers) == 3  # a view's level sees what the full one does
    assert (tokens, hashes) == expected and state.num_flushes and (exact or rejected["full"] >= 5)
    count = len(state.last_round.rows[0].tokens)
    logits = dense_logits(target, torch.tensor([state.texts()[0]]))[0]
    found = logits_of(state.hierarchy.outer)[0, :count]
    torch.testing.assert_close(found, logits[-1 - count : -1], atol=1e-4, rtol=1e-4)


def test_a_view_level_sees_the_window_too(models):
    """Where all layers have one, a level over a view is the full level: all that it drafts is kept."""
    target, _ = models
    state = make_state(target, None, [random_prompt(600)], capacity=2048, gamma=6)
    for _ in range(20):
        state.round()
    rate = state.hierarchy.acceptance_rates()[0]["full"]
    assert rate == 1 if len(target.config.sliding_layers) == 3 else 0.1 < rate < 1


def test_rows_side_by_side_and_over_a_shared_prefix(models):
    """The shared part ends within the window of the first tokens behind it. Padding is longer than a ring."""
    prompts = [random_prompt(300) + random_prompt(count, seed=count) for count in (31, 250, 13)]
    alone = [bits(make_state(models[0], None, [prompt], retrieval=False, capacity=1024), 40)[0]
             for prompt in prompts]
    for base in (0, 288):
        found = [bits_of_rows(make_state(*models, prompts, base=base, capacity=1024), 40, plan=plan)
                 for plan in (AUTOREGRESSION, DraftPlan(6, "model", True, 2, 3), DraftPlan(3, "model"))]
        assert found[0] == found[1] == found[2]
        state = make_state(models[0], None, prompts, retrieval=False, base=base, capacity=1024)
        for _ in range(20):
            state.round()
        for row, text in enumerate(state.texts()):
            torch.testing.assert_close(logits_of(state.hierarchy.outer)[row, 0],
                                       dense_logits(models[0], torch.tensor([text]))[0, -2], atol=1e-4, rtol=1e-4)
        assert [[token for token, _ in row] for row in found[0]] == alone


@pytest.mark.parametrize("how", [{}, {"tree_size": 64, "block_size": 16}, *slow({"leaves": 1}, {"compile": True})],
                         ids=str)
def test_a_seeds_text(models, how):
    engine = make_engine(*models, **{"flush_interval": 16, "chunk_size": 4, "budget": 64, "sampling": "coupled", **how})
    prompt = random_prompt(500)
    for temperature in (0.0, 1.0):
        texts = [engine.generate(prompt, 40, temperature=temperature, seed=3, speculate=on) for on in (True, False)]
        assert texts[0].tokens == texts[1].tokens and texts[0].stats.target_forwards < 40


@pytest.mark.parametrize("window", [4, *slow(12)])
def test_paths_of_a_tree_are_cut_by_a_window(window):
    """Of one that is shorter than a block."""
    config = ModelConfig(VOCAB, 32, 2, 4, 2, 8, 48, sliding_layers=(0,), sliding_window=window)
    target = Transformer.random(config, std=0.2)
    state = make_state(target, None, [random_prompt(200)], rule="coupled", tree_size=64, block_size=16, gamma=8)
    while len(state.texts()[0]) < 260:
        state.round()
    logits = dense_logits(target, torch.tensor([state.texts()[0]]))[0]
    assert logits[199:-1].argmax(-1).tolist() == state.texts()[0][200:]
    assert state.hierarchy.outer.totals[0, 0] >= 5


def test_what_a_draft_attends_to():
    """A layer with a window sees no more of what the draft keeps."""
    target, draft = models_of("some")
    prompts = [random_prompt(130), random_prompt(61, seed=1)]
    state = make_state(target, draft, prompts, retrieval=False, draft_window=512, gamma=3,
                       sampling={"temperature": 0.8}, prefill_chunk_size=37)
    texts = [list(prompt) for prompt in prompts]
    for turn in range(30):
        emitted = state.round(AUTOREGRESSION if turn % 7 == 3 else None)
        for row, text in enumerate(texts):
            if turn % 7 != 3:
                logits = dense_logits(draft, torch.tensor([text]))[0, -1]
                torch.testing.assert_close(state.hierarchy.outer.draft_probs[row, 0], (logits / 0.8).softmax(-1),
                                           atol=2e-5, rtol=1e-3)
            text += emitted[row]


def test_a_window_that_holds_all_that_a_draft_keeps_hides_nothing():
    """What it keeps is a text of its own: the sink lies right before the newest tokens."""
    laws = []
    for layers in ((), (0, 1)):
        config = ModelConfig(VOCAB, 16, 2, 2, 2, 8, 32, sliding_layers=layers, sliding_window=64 if layers else None)
        draft = Transformer.random(config, seed=1, std=0.3)
        state = make_state(models_of("some")[0], draft, [random_prompt(200)], retrieval=False, draft_window=24, gamma=3,
                           sampling={"temperature": 0.8})
        for _ in range(3):
            state.round(DraftPlan(3, "model"))
        laws.append(state.hierarchy.outer.draft_probs[0, :3].clone())
    torch.testing.assert_close(*laws, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("resident,query", [(0, False), (1, False), *slow((1, True), (0, True))])
def test_layers_that_see_all_keys_are_offloaded_and_the_others_are_not(resident, query):
    """The text and its bits stay, with speculation on and off; a view of what streams past is gathered."""
    config = replace(models_of("some")[0].config, n_layer=5, sliding_layers=(0, 2))
    target, prompt = Transformer.random(config, std=0.2), random_prompt(600)
    how = {"capacity": 2048, "flush_interval": 16, "piece_tokens": 100,
           "draft_cache": "query" if query else None}
    expected = run_rounds(make_state(target, None, [prompt], retrieval=False, capacity=2048), 90)[0]
    state = make_state(target, None, [prompt], **how, num_resident_layers=resident, gamma=4)
    offload, k = state.cache.prefix.offload, state.cache.prefix.k
    assert list(offload.host) == offload.layers == [1, 3, 4][resident:]
    assert [x.shape[2] for x in k] == [128, 2048 * resident, 128, 0, 0]
    tokens, hashes, rejected, _ = bits(state, 90)
    assert tokens == expected and state.num_flushes and rejected["full"] >= 5 and state.hierarchy.view.num_rebuilds
    state.rewind(90)
    assert bits(state, 90, plan=AUTOREGRESSION)[:2] == (tokens, hashes)


def test_a_document_in_host_memory(tmp_path):
    engine, twin = (make_engine(*models_of("some"), **MADE, **more) for more in (
        {"offload": True, "piece_tokens": 100}, {"reuse": False}))
    document, question = random_prompt(700), random_prompt(9, seed=1)
    book = engine.prefill(document)
    assert sorted(book.store.offload.host) == [1]
    book.save(tmp_path / "a.prefix")
    for one in (book, engine.open(tmp_path / "a.prefix")):
        said = [result.tokens for result in engine.generate([question, question[:4]], 60, prefix=one, **GREEDY)]
        assert said == [twin.generate(document + asked, 60, **GREEDY).tokens for asked in (question, question[:4])]


@pytest.mark.parametrize("family", ["llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "glm", "smollm3",
                                    "gemma3_text", "olmo3"])
def test_what_a_config_leaves_out_is_what_its_family_has(family):
    """By transformers' own classes. A window that is null is none."""
    theirs = AutoConfig.for_model(family)
    sizes = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 96, "vocab_size": 99, "max_position_embeddings": 65536, "use_sliding_window": True}
    sizes |= {"head_dim": 16, "max_window_layers": 0}
    ours = config_from_hf({"model_type": family, **sizes})
    window = getattr(AutoConfig.for_model(family, use_sliding_window=True), "sliding_window", None)
    assert (ours.norm_eps, ours.tie_word_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert ours.sliding_window == window
    assert config_from_hf({"model_type": family, **sizes, "sliding_window": None}).sliding_window is None


@pytest.mark.parametrize("more,says", [
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
    ({"rope_scaling": {"rope_type": "llama3", "short_factor": [1.0]}}, "^factor is missing")])
def test_what_changes_attention_is_refused(more, says):
    with pytest.raises(UserError, match=says):
        config_from_hf({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                        "intermediate_size": 96, "vocab_size": 99, **more})


# -- rings: a layer with a window keeps the newest tokens alone --------------------------------------------------------

MADE = {"flush_interval": 16, "chunk_size": 4, "budget": 64}
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def engines():
    """One that goes on from what it has, and one that computes each prompt anew."""
    return [make_engine(*models_of("some"), **MADE, **more) for more in ({}, {"reuse": False})]


def rings_of(engine) -> dict[int, int]:
    """Tokens that each layer of the batch's prefix keeps."""
    return {i: k.shape[2] for i, k in enumerate(engine.buffers.state.cache.prefix.k)}


@pytest.mark.parametrize("answer", [20, 200])
def test_a_text_goes_back(engines, answer):
    """Behind a short answer the rings still have what the text sees; behind a long one, what was kept as it began. In
    the middle of a long answer nothing has it, and the prompt is computed anew."""
    engine, twin = engines
    prompt = random_prompt(500)
    said = engine.generate(prompt, answer, **GREEDY).tokens
    assert rings_of(engine) == {0: 128, 1: engine.buffers.state.capacity, 2: 128}
    assert engine.generate(prompt, answer, **GREEDY).tokens == said == twin.generate(prompt, answer, **GREEDY).tokens
    for text, reused in (((prompt + said)[:-5], True), (prompt[:490], True), ((prompt + said)[:560], answer == 20),
                         (prompt[:300], False)):
        engine.generate(prompt, answer, **GREEDY)
        question = text + random_prompt(9, seed=5)
        result = engine.generate(question, 60, **GREEDY)
        assert result.tokens == twin.generate(question, 60, **GREEDY).tokens
        assert (result.stats.reused_tokens > 280) == reused, len(text)


def test_what_was_kept_of_another_text_is_forgotten(engines):
    """A turn that takes a part of the prompt back, and is itself taken back; or is broken off before it decodes."""
    engine, twin = engines
    prompt = random_prompt(500)
    engine.generate(prompt, 20, **GREEDY)
    other = prompt[:480] + random_prompt(40, seed=6)
    for text in (other, other[:500] + random_prompt(20, seed=7), prompt):
        assert engine.generate(text, 150, **GREEDY).tokens == twin.generate(text, 150, **GREEDY).tokens
    state = engine.buffers.state
    assert state.cache.prefix.holds(0, 490, kept=True) and not state.cache.prefix.holds(0, 490)
    state.truncate(0, 480)
    state.prefill(0, random_prompt(200, seed=8))
    assert not state.cache.prefix.holds(0, 490, kept=True)


def test_ctrl_c_while_a_text_goes_back(engines, monkeypatch):
    """Whatever is copied by then, the next call begins where it should."""
    engine, twin = engines
    prompt = random_prompt(500)
    said = engine.generate(prompt, 200, **GREEDY).tokens
    store, copied = engine.buffers.state.cache.prefix, []

    class Cut(KeyboardInterrupt):
        pass

    def rings(row, real=store.rings):
        for x in real(row):
            copied.append(x)
            if len(copied) == 3:
                raise Cut
            yield x

    monkeypatch.setattr(store, "rings", rings)
    with pytest.raises(Cut):
        engine.generate(prompt, 200, **GREEDY)
    monkeypatch.undo()
    assert len(copied) == 3 and engine.generate(prompt, 200, **GREEDY).tokens == said


def test_a_part_of_a_document_that_rings_have_lost():
    engine = make_engine(*models_of("some"), **MADE)
    book = engine.prefill(random_prompt(700))
    with pytest.raises(UserError, match="lost the first 592 of 688 tokens"):
        book.part(592)
    assert len(book.part(672)) == 672
    from triforce.serve import Documents

    documents, common = Documents(engine, 1e9), random_prompt(600)
    assert documents.of([common + random_prompt(90, seed=1)])[1] == 0
    for known in (0, 592):  # the held one is of no use to these; the new one is
        asked = [common + random_prompt(30, seed=seed) for seed in (2, 3)]
        document, cached = documents.of(asked)
        assert cached == known and document.num_shared == 592


@pytest.mark.parametrize("kind", ["some", *slow("all")])
def test_a_document_is_asked_saved_and_gone_on_with(kind, tmp_path):
    engine, twin = (make_engine(*models_of(kind), **MADE, **more) for more in ({"max_batch_size": 2}, {"reuse": False}))
    document, path = random_prompt(700), tmp_path / "a.prefix"
    book = engine.prefill(document)
    wide = Transformer.random(replace(engine.target.config, sliding_layers=()))
    assert book.nbytes < 0.6 * make_engine(wide, **MADE).prefill(document).nbytes
    book.save(path)
    before = [x.clone() for x in book.store.tensors()]
    opened = make_engine(*models_of(kind), **MADE).open(path)
    for one in (book, opened, engine.prefill(document, keep=path)):
        asked = [random_prompt(n, seed=n) for n in (9, 30)]
        for question, result in zip(asked, one.engine.generate(asked, 60, prefix=one, **GREEDY), strict=True):
            assert result.tokens == twin.generate(document + question, 60, **GREEDY).tokens
    assert all(torch.equal(*pair) for pair in zip(before, book.store.tensors(), strict=True))
    # As far back as its rings go; and a document that goes on behind the file's end, or begins like it.
    for text, read in ((document, 688), (document + random_prompt(100, seed=9), 688), (document[:300], 0)):
        with opened_file(path, engine) as reader:
            again = engine.buffers.compute(text, reader=reader)
        assert again.num_read == read
        question = again.tokens + random_prompt(9, seed=9)
        assert engine.generate(question[len(again):], 30, prefix=again, **GREEDY).tokens == twin.generate(
            question, 30, **GREEDY).tokens


def test_a_conversation_is_saved(tmp_path, tiny_engine):
    """Its own tokens follow those of the document: a file has the newest of both."""
    windows = {"sliding_layers": (0,), "sliding_window": 200}
    target = Transformer.random(replace(tiny_engine.target.config, **windows))
    engine, twin = (make_engine(target, **MADE, tokenizer=tiny_engine.tokenizer) for _ in range(2))
    chat = engine.chat(engine.prefill(random_prompt(400)), **GREEDY)
    chat.send("What of Ahab?", max_new_tokens=40)
    chat.save(tmp_path / "a.prefix")
    book = twin.open(tmp_path / "a.prefix")
    anew = make_engine(target, **MADE, reuse=False)
    question = random_prompt(9, seed=1)
    assert twin.generate(question, 60, prefix=book, **GREEDY).tokens == anew.generate(
        book.tokens + question, 60, **GREEDY).tokens


@pytest.mark.parametrize("firsts", [[9] * 3, [560, 0], [-1, 0, 560], [560, 3, 560], [700, 0, 560], ["a", 0, 1], "no",
                                    [560.0, 0, 560], [560, 0.0, 560]])
def test_a_files_windows_are_checked(firsts, tmp_path):
    engine = make_engine(*models_of("some"), **MADE)
    engine.prefill(random_prompt(700)).save(tmp_path / "a.prefix")
    data = (tmp_path / "a.prefix").read_bytes()
    begin = data.index(b'"firsts": "') + 11
    said = data[begin : data.index(b'"', begin)]
    assert json.loads(said) == [560, 0, 560]
    told = json.dumps(firsts, separators=(",", ":")).replace('"', "'").encode().ljust(len(said))[: len(said)]
    (tmp_path / "a.prefix").write_bytes(data.replace(said, told, 1))
    with pytest.raises(UserError, match="altered"):
        engine.open(tmp_path / "a.prefix")


@pytest.mark.parametrize("layers,firsts", [((0, 2), (672, 0, 672)), ((0, 2), (560, 16, 560)), ((), (100, 0, 0))])
def test_a_file_has_what_its_model_sees(layers, firsts, tmp_path):
    """One whose tensors fit what it says, and not the windows of the model."""
    config = replace(models_of("some")[0].config, sliding_layers=layers)
    engine = make_engine(Transformer.random(config), **MADE)
    book = engine.prefill(random_prompt(700))
    layout = replace(layout_of(engine, 700, 688), firsts=firsts)
    write(tmp_path / "a.prefix", layout, book.about, book.tokens, lambda i: torch.zeros(2, 2, layout.held(i), 8),
          range(2))
    with pytest.raises(UserError, match="altered"):
        engine.open(tmp_path / "a.prefix")


def test_a_plan_counts_rings(monkeypatch):
    """Gemma 3 4B at 131,072 tokens: about a sixth of the K/V of full layers, and what is kept as decoding begins."""
    monkeypatch.undo()
    layers = tuple(i for i in range(34) if i % 6 != 5)
    config = ModelConfig(262_144, 2560, 34, 8, 4, 256, 10_240, max_position_embeddings=131_072, sliding_window=1024,
                         sliding_layers=layers, sliding_theta=1e4)
    settings = Settings().resolve("cuda", has_model=False)
    sizes = Sizes(1, 131_072, 4096, 262_144)
    parts = {part.name: part.bytes for part in plan_memory(config, None, settings, sizes, torch.bfloat16,
                                                           torch.device("cuda")).parts}
    token = 2 * 4 * 256 * 2
    assert (parts["KV cache"], parts["sliding windows"]) == (token * 5 * 131_072, 2 * token * 29 * 2048)
    assert parts["KV cache"] + parts["sliding windows"] < 0.18 * 34 * 131_072 * token
