"""Layers that see the newest keys alone: what they compute, on every level, beyond the window."""

import pytest
import torch
from conftest import VOCAB, bits, bits_of_rows, make_engine, make_state, random_prompt, slow
from families import build, config_json, save
from reference import dense_logits
from transformers import AutoConfig, Gemma3Config, Gemma3ForConditionalGeneration

import triforce
from triforce import UserError, attention
from triforce.decode.plan import AUTOREGRESSION, DraftPlan
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


FAMILIES = {"Gemma 3": {}, "Gemma 3 270M": {}, "OLMo 3": {}, "Mistral 0.1": {}, "Ministral": {}, "Phi-3-mini-4k": {},
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
    how = {"capacity": 2048, "keep_logits": True, "flush_interval": interval}
    expected = bits(make_state(target, None, [prompt], retrieval=False, **how), 90)[:2]
    state = make_state(target, draft if levels in ("triforce", "draft") else None, [prompt], **how,
                       retrieval=levels != "draft", ngram=levels == "ngram", gamma=gamma,
                       draft_cache=levels if levels in ("query", "streaming") else None)
    tokens, hashes, rejected, _ = bits(state, 90)
    exact = levels != "draft" and len(target.config.sliding_layers) == 3  # a view's level sees what the full one does
    assert (tokens, hashes) == expected and state.num_flushes and (exact or rejected["full"] >= 5)
    count = len(state.last_round.rows[0].tokens)
    logits = dense_logits(target, torch.tensor([state.texts()[0]]))[0]
    torch.testing.assert_close(state.hierarchy.outer.logits[0, :count], logits[-1 - count : -1], atol=1e-4, rtol=1e-4)


def test_a_view_level_sees_the_window_too(models):
    """Where all layers have one, a level over a view is the full level: all that it drafts is kept."""
    target, _ = models
    state = make_state(target, None, [random_prompt(600)], capacity=2048, gamma=6)
    for _ in range(20):
        state.round()
    rate = state.hierarchy.acceptance_rates()[0]["full"]
    assert rate == 1 if len(target.config.sliding_layers) == 3 else 0.1 < rate < 1


def test_rows_side_by_side_and_over_a_shared_prefix(models):
    """The shared part ends within the window of the first tokens behind it."""
    prompts = [random_prompt(300) + random_prompt(40 - 9 * seed, seed=seed) for seed in (1, 2, 3)]
    alone = [bits(make_state(models[0], None, [prompt], retrieval=False, capacity=1024, keep_logits=True), 40)[0]
             for prompt in prompts]
    for base in (0, 288):
        found = [bits_of_rows(make_state(*models, prompts, base=base, capacity=1024, keep_logits=True), 40, plan=plan)
                 for plan in (AUTOREGRESSION, DraftPlan(6, "model", True, 2, 3), DraftPlan(3, "model"))]
        assert found[0] == found[1] == found[2]
        state = make_state(models[0], None, prompts, retrieval=False, base=base, capacity=1024, keep_logits=True)
        for _ in range(20):
            state.round()
        for row, text in enumerate(state.texts()):
            torch.testing.assert_close(state.hierarchy.outer.logits[row, 0],
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


def test_a_conversation_goes_back(models):
    """All keys are kept, so a text that is taken back behind a window's length goes on as a new one."""
    engine, twin = (make_engine(*models, flush_interval=16, chunk_size=4, budget=64) for _ in range(2))
    prompt, how = random_prompt(500), {"temperature": 0.0, "max_new_tokens": 30}
    engine.generate(prompt, **how)
    shorter = prompt[:300] + random_prompt(20, seed=4)
    assert engine.generate(shorter, **how).tokens == twin.generate(shorter, **how).tokens


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


def test_offload_is_refused(tmp_path):
    theirs = build("Mistral 0.1")
    folder = save(theirs, {**config_json("Mistral 0.1"), "sliding_window": 40}, tmp_path / "model")
    with pytest.raises(UserError, match="2 of this one see the newest 40; leave out --offload"):
        triforce.load(folder, offload=True, device="cpu", draft=False)


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
