"""Layers with experts: every way to compute them gives the same numbers, and a row's bits follow from it alone."""

from dataclasses import replace

import pytest
import torch
from conftest import bits, bits_of_rows, make_engine, make_state, random_prompt, slow
from families import build, config_json, save
from torch.nn import functional as F
from transformers import GptOssConfig

import triforce
from triforce import UserError
from triforce.config import Settings
from triforce.decode.batch import Sizes
from triforce.decode.plan import AUTOREGRESSION, DraftPlan
from triforce.engine.memory import plan_memory
from triforce.experts import Experts
from triforce.hf.config import config_from_hf
from triforce.model import ModelConfig, RopeScaling, Transformer

CONFIG = ModelConfig(64, 32, 2, 4, 2, 8, 24, max_position_embeddings=8192, qk_norm=True, num_experts=16,
                     active_experts=2, weighs_anew=True, architecture="Qwen3MoeForCausalLM")
# As gpt-oss: biases, a clamped activation, layers with a window in turns, and sinks.
OSS = replace(CONFIG, qk_norm=False, qkv_bias=True, out_bias=True, mlp_bias=True, activation="clamped", sinks=True,
              sliding_layers=(0,), sliding_window=40)
FEW, MANY = 1, 12  # rows of a step: those of few copy the weights of the chosen, others read all


@pytest.fixture(scope="module", params=[CONFIG, OSS], ids=["Qwen3-MoE", "gpt-oss"])
def models(request):
    return (Transformer.random(request.param, seed=0, std=0.3),
            Transformer.random(ModelConfig(64, 16, 1, 2, 2, 8, 32), seed=1, std=0.3))


def by_definition(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """One row and one expert after the other, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    stacks = [[None if part is None else part.double() for part in (stack.weight.view(experts.count, -1, stack.weight
               .shape[1]), stack.bias)] for stack in (experts.gate_up, experts.down)]

    def product(stack: list, expert: int, row: torch.Tensor) -> torch.Tensor:
        weight, bias = stack
        return weight[expert] @ row + (0 if bias is None else bias.view(experts.count, -1)[expert])

    for b, m in torch.cartesian_prod(*map(torch.arange, x.shape[:2])).tolist():
        row = x[b, m].double()
        shares = F.linear(row, *(None if part is None else part.double() for part in (
            experts.router.weight, experts.router.bias))).softmax(0)
        chosen = shares.argsort(descending=True)[: experts.active]
        weights = shares[chosen] / (shares[chosen].sum() if experts.weighs_anew else 1)
        for weight, expert in zip(weights, chosen, strict=True):
            gate, up = product(stacks[0], expert, row).chunk(2)
            between = F.silu(gate) * up
            if experts.is_clamped:
                gate = gate.clamp(max=7)
                between = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
            out[b, m] += weight * product(stacks[1], expert, between)
    return out


@pytest.mark.parametrize("weighs_anew", [True, False])
@pytest.mark.parametrize("how", ["few", "many", "grouped", "prefill"])
def test_every_way_is_the_definition(models, monkeypatch, how, weighs_anew):
    experts, went = models[0].layers[0].mlp, []
    monkeypatch.setattr(experts, "weighs_anew", weighs_anew)
    monkeypatch.setattr(experts, "is_grouped", how == "grouped")
    monkeypatch.setattr(F, "grouped_mm", lambda *a, real=F.grouped_mm, **more: went.append(2) or real(*a, **more))
    monkeypatch.setattr(Experts, "_one_by_one", lambda *a, real=Experts._one_by_one: went.append(1) or real(*a))
    monkeypatch.setattr(Experts, "_mlp", lambda self, x, *chosen, real=Experts._mlp: went.append(
        getattr(chosen[0], "shape", 1) if chosen else "all") or real(self, x, *chosen))
    x = 4 * (torch.randn(1, FEW, 32) if how == "few" else torch.randn(2, MANY, 32))  # beyond where gates are clamped
    torch.testing.assert_close(experts(x, how == "prefill").double(), by_definition(experts, x), atol=1e-4, rtol=1e-4)
    assert went[0] == {"few": (FEW, 2), "many": "all", "grouped": 2, "prefill": 1}[how]
    assert how == "prefill" or len(went) == {"grouped": 2}.get(how, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 8, 64])
def test_a_rows_bits_follow_from_it_alone(models, rows, dtype):
    """Whatever experts the others choose; also where those that it did not choose overflow."""
    experts = Transformer.random(models[0].config, seed=0, std=0.3, dtype=dtype).layers[0].mlp
    x = torch.randn(2, rows, 32, dtype=dtype)
    y = experts(x)
    for seed in range(4):
        others = torch.randn(2, rows, 32, dtype=dtype, generator=torch.Generator().manual_seed(seed))
        others[0, 0] = x[0, 0]
        assert torch.equal(experts(others)[0, 0], y[0, 0])
    chosen = experts.router(x[:1, :1]).topk(experts.active).indices.flatten().tolist()
    with torch.no_grad():
        for n, one in enumerate(experts.gate_up.weight.view(experts.count, -1, 32)):
            one.mul_(1 if n in chosen else 1e4).mul_(1 if n in chosen or dtype == torch.float16 else 1e34)
    assert torch.equal(experts(x)[0, 0], y[0, 0]) and (rows == 1 or not experts(x).isfinite().all())


@pytest.mark.parametrize("levels,gamma", [("triforce", 6), *slow(("retrieval", 6), ("draft", 3), ("ngram", 6),
                                                                  ("query", 4))])
def test_greedy_bits_do_not_depend_on_drafting(models, levels, gamma):
    target, draft = models
    prompt = random_prompt(600)
    plain = bits(make_state(target, None, [prompt], retrieval=False, capacity=2048), 90)[:2]
    state = make_state(target, draft if levels in ("triforce", "draft") else None, [prompt], capacity=2048,
                       retrieval=levels != "draft", ngram=levels == "ngram", gamma=gamma,
                       draft_cache="query" if levels == "query" else None)
    tokens, hashes, rejected, _ = bits(state, 90)
    assert (tokens, hashes) == plain and rejected["full"] >= 10


@pytest.mark.slow
def test_greedy_bits_side_by_side(models):
    """Rows of a batch draft alike and are checked together; the experts of one row's drafts are another's neighbours.
    Over a shared prefix, too."""
    prompts = [random_prompt(300) + random_prompt(40, seed=seed) for seed in (1, 2, 3)]
    for base in (0, 288):
        found = [bits_of_rows(make_state(*models, prompts, base=base, capacity=1024), 40, plan=plan)
                 for plan in (AUTOREGRESSION, DraftPlan(6, "model", True, 2, 3), DraftPlan(3, "model"))]
        assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("how", [{"offload": True, "num_resident_layers": 1}, *slow({}, {"compile": True})], ids=str)
def test_a_seeds_text_and_greedy_text(models, how):
    engine = make_engine(*models, flush_interval=16, chunk_size=4, budget=64, sampling="coupled", **how)
    prompt = random_prompt(700)  # longer than a step: the prefill goes from expert to expert
    for temperature in (0.0, 1.0):
        texts = [engine.generate(prompt, 40, temperature=temperature, seed=3, speculate=on) for on in (True, False)]
        assert texts[0].tokens == texts[1].tokens and texts[0].stats.target_forwards < 40


def test_a_plan_counts_them():
    """What all experts make of 16 rows: gate and up, their product, what comes down, and that weighed."""
    settings, sizes = Settings(gamma=6, block_size=8).resolve(has_model=False), Sizes(2, 1024, 256, 64)
    plan = plan_memory(CONFIG, None, settings, sizes, torch.float32, torch.device("cpu"))
    [found] = [part.bytes for part in plan.parts if part.name == "experts of a step"]
    assert found == 16 * 16 * 4 * (3 * 24 + 32 + 2 * 32)
    for config in (CONFIG, OSS):
        model = Transformer.empty(config, "meta", torch.float32)
        assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("fields, message", [
    ({"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported"),
    ({"mlp_only_layers": [1]}, "mlp_only_layers .* is not supported"),
    ({"num_local_experts": 7}, "num_experts says 16, and num_local_experts says 7"),
    ({"num_experts_per_tok": 17}, "num_experts_per_tok is 17"),
    ({"quantization_config": {"quant_method": "fp8"}}, "model with experts is not supported")])
def test_what_is_not_built_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        config_from_hf({**config_json("Qwen3-30B-A3B"), **fields})
    with pytest.raises(UserError, match="num_experts 8 is not supported"):
        config_from_hf({**config_json("Qwen3"), "num_experts": 8})


@pytest.mark.parametrize("fields, message", [
    ({"swiglu_limit": 5.0}, "swiglu_limit is 5.0.*must be 7.0"),
    ({"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0.*must be 1.702")])
def test_another_gpt_oss_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        config_from_hf({**config_json("gpt-oss"), **fields})


def test_what_a_gpt_oss_leaves_out_is_as_in_transformers():
    """And a published one says no dtype; what is said of Gemma's pattern alone is not read."""
    given, usual = config_json("gpt-oss"), GptOssConfig(num_hidden_layers=4)
    said = {key: getattr(usual, key) for key in ("sliding_window", "layer_types", "attention_bias", "rms_norm_eps",
                                                 "tie_word_embeddings", "head_dim", "max_position_embeddings")}
    said["rope_scaling"] = {key: value for key, value in usual.rope_parameters.items() if key != "rope_theta"}
    for key, value in said.items():
        absent = {name: other for name, other in given.items() if name != key}
        assert config_from_hf(absent) == config_from_hf({**given, key: value})
    plain = {"rope_type": "default", "rope_theta": 150000}
    assert config_from_hf({**given, "rope_scaling": None, "rope_parameters": plain}).rope_scaling == RopeScaling()
    del given["torch_dtype"], given["layer_types"]
    assert config_from_hf({**given, "sliding_window_pattern": 3}) == config_from_hf(given)
    assert config_from_hf(given).dtype == "bfloat16"


def test_a_window_is_of_all_layers():
    """In transformers max_window_layers says nothing here."""
    fields = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    assert config_from_hf({**config_json("Qwen3-30B-A3B"), **fields}).sliding_layers == (0, 1)
    assert config_from_hf({**config_json("Qwen3"), **fields}).sliding_layers == ()


def test_fp8_is_refused(tmp_path):
    folder = save(build("Qwen3-30B-A3B"), config_json("Qwen3-30B-A3B"), tmp_path)
    with pytest.raises(UserError, match="this one has experts; leave it out"):
        triforce.load(folder, weights="fp8", draft=False, device="cpu")
