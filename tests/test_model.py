"""What config.json says and the model does with it, where loading whole checkpoints does not show it."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import make_engine
from torch import nn
from torch.nn import functional as F

from triforce.cache.blocks import prefill_blocks
from triforce.config import Placement
from triforce.cpu import adapt
from triforce.engine.loading import check_target
from triforce.errors import UserError
from triforce.hf.config import config_from_hf
from triforce.model import ModelConfig, RopeScaling, Transformer, inverse_frequencies

HF = {"architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112,
      "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
SMALL = ModelConfig(50, 32, 2, 4, 2, 8, 48)


def test_a_stretched_window_is_the_one_after_stretching():
    """Some configs give the one before, some the one after."""
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    for positions, most in ((64, 512), (512, 512), (1024, 1024)):
        config = config_from_hf({**HF, "max_position_embeddings": positions, "rope_scaling": scaling})
        assert config.max_len == most


def test_whose_window_slides():
    window = {"sliding_window": 128, "max_position_embeddings": 256}
    for family, more, layers in (("Mistral", {}, (0, 1)), ("Mistral", {"sliding_window": None}, ()),
                                 ("Qwen2", {"max_window_layers": 0}, ()), ("Qwen2", {"use_sliding_window": False}, ()),
                                 ("Qwen2", {"use_sliding_window": True}, ()),  # transformers: from the 28th on
                                 ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0}, (0, 1)),
                                 ("Mistral", {"sliding_window": 256}, ()),  # as long as the model
                                 ("Llama", {}, ()), ("Glm", {"head_dim": 16}, ()),  # which do not read it
                                 ("Qwen3", {"use_sliding_window": True, "max_window_layers": 1}, (1,)),
                                 ("Qwen3", {"use_sliding_window": True, "max_window_layers": 2}, ()),
                                 ("Qwen3", {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, ()),
                                 ("SmolLM3", {"use_sliding_window": True, "no_rope_layers": [0, 1]}, (0,)),
                                 ("Ministral", {"layer_types": ["full_attention", "sliding_attention"]}, (1,)),
                                 ("Ministral", {"layer_types": ["full_attention"] * 2}, ()),
                                 ("Mistral", {"layer_types": ["full_attention"] * 2, "model_type": "mistral"}, ()),
                                 ("SmolLM3", {"layer_types": ["full_attention", "sliding_attention"]}, (1,)),
                                 ("Qwen3Moe", {"layer_types": ["full_attention"] * 2, "use_sliding_window": True,
                                               "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2},
                                  (0, 1))):  # which does not read them
        architecture = {"architectures": [f"{family}ForCausalLM"]}
        config = config_from_hf({**HF, **window, **more, **architecture})
        assert config.sliding_layers == layers and config.sliding_window == (128 if layers else None)
        assert config.max_len == 256


@pytest.mark.parametrize("family, theta", [("Olmo3", 5e5), ("Gemma3", 300.0)])
def test_who_reads_the_base_of_layers_with_a_window(family, theta):
    """Gemma alone. Neither reads an original window beside its scaling."""
    fields = {"architectures": [f"{family}ForCausalLM"], "num_hidden_layers": 6, "sliding_window": 64,
              "rope_local_base_freq": 300.0, "rope_theta": 1e4, "original_max_position_embeddings": 64,
              "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    config = config_from_hf({**HF, **fields})
    assert (config.sliding_theta, config.rope_theta) == (theta, 1e4)
    assert config.rope_scaling.original_max_position_embeddings == 256


def test_a_key_without_a_value_says_nothing():
    silent = dict.fromkeys(("partial_rotary_factor", "sliding_window", "max_window_layers", "layer_types",
                            "num_experts", "dual_chunk_attention_config", "rope_scaling"))
    for family in ("Llama", "Qwen3", "Phi3"):
        named = {**HF, "architectures": [f"{family}ForCausalLM"]}
        assert config_from_hf({**named, **silent}) == config_from_hf(named)


def test_the_names_of_longrope():
    """Older configs of Phi-3 call it otherwise; its original window stands beside the scaling, or in it."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    window = {"original_max_position_embeddings": 64}
    configs = [config_from_hf({**HF, "architectures": ["Phi3ForCausalLM"], **more, "rope_scaling": {
        **factors, **inside}}) for more, inside in (
            (window, {"type": "su"}), (window, {"type": "yarn"}), (window, {"rope_type": "longrope"}),
            (window, {"type": "su", "original_max_position_embeddings": 256}),
            ({}, {"rope_type": "longrope", **window}))]
    assert len(set(configs)) == 1
    scaling = configs[0].rope_scaling
    assert scaling.kind == "longrope" and scaling.attention_factor == pytest.approx((1 + 1 / 3) ** 0.5)  # 64 ** (1 / 3)
    assert configs[0].max_len == 256 and configs[0].within(65) == configs[0].within(None) == configs[0]
    assert configs[0].within(64).max_len == 64
    plain = inverse_frequencies(replace(configs[0], rope_scaling=RopeScaling()))
    torch.testing.assert_close(inverse_frequencies(configs[0]), plain / 2)
    torch.testing.assert_close(inverse_frequencies(configs[0].within(64)), plain)


def test_dual_chunk_attention_is_a_limit():
    """Up to its original window it is plain attention; beyond, it is refused by the name of its key."""
    chunked = {"chunk_size": 128, "local_size": 16, "original_max_position_embeddings": 128}
    config = config_from_hf({**HF, "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 1024,
                                  "dual_chunk_attention_config": chunked})
    engine = make_engine(Transformer.random(config))
    assert engine.logits([[1] * 128]).shape == (1, 128, 96)
    with pytest.raises(UserError, match=r"model's window before dual_chunk_attention_config.* \(128\); cut the prompt"):
        engine.logits([[1] * 129])
    with pytest.raises(UserError, match=r"max_seq_len \(200\) exceeds .*dual_chunk_attention_config.* at most 128"):
        check_target(Placement(max_seq_len=200), config)  # of `load` and `plan`


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}


@pytest.mark.parametrize("fields", [
    {"rope_scaling": YARN, "rope_theta": 500.0}, {"rope_parameters": {**YARN, "rope_theta": 500.0}},
    {"rope_scaling": YARN, "rope_parameters": DEFAULT, "rope_theta": 500.0},
    {"rope_scaling": {**YARN, "rope_theta": 500}, "rope_parameters": {**YARN, "rope_theta": 500.0}},
    {"rope_scaling": {**YARN, "rope_type": None, "type": "yarn", "rope_theta": 500.0}, "rope_parameters": DEFAULT},
    {"rope_scaling": {**YARN, "type": "default", "rope_theta": 500.0}},
    {"rope_scaling": {"type": "yarn", "factor": 4}, "original_max_position_embeddings": 256, "rope_theta": 500}])
def test_two_spellings_of_a_scaling_are_one(fields):
    """Where both are there, transformers reads `rope_scaling` alone: then that has to say it all."""
    for family in ("Llama", "Qwen3"):
        named = {**HF, "architectures": [f"{family}ForCausalLM"]}
        config = config_from_hf({**named, **fields})
        assert config.rope_scaling == config_from_hf({**named, "rope_scaling": YARN}).rope_scaling
        assert config.rope_scaling.factor == 4 and config.max_len == 1024 and config.rope_theta == 500


@pytest.mark.parametrize("fields, words", [
    # two values of a fact
    *(({"rope_scaling": old, "rope_parameters": new}, f"rope_parameters says .*{lost}.* transformers reads that alone")
      for old, new, lost in ((YARN, {**YARN, "factor": 2.0}, "'factor': 2.0"), (YARN, DEFAULT, "'rope_theta': 500.0"),
                             (DEFAULT, YARN, "'rope_type': 'yarn'"))),
    ({"rope_scaling": {"rope_type": "default", "type": "linear", "factor": 3.0}}, "'default', and type says 'linear'"),
    ({"rope_scaling": {**YARN, "type": "linear"}}, "rope_type says 'yarn', and type says 'linear'"),
    ({"rope_theta": 1e6, "rope_parameters": DEFAULT}, "says 1000000.0, and rope_theta in rope_parameters says 500.0"),
    ({"rope_scaling": YARN, "original_max_position_embeddings": 64, "max_position_embeddings": 1024},
     "in the scaling says 256, .* beside it says 64"),
    ({"dtype": "float32", "torch_dtype": "float16"}, "dtype says 'float32', and torch_dtype says 'float16'"),
    ({"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}}, "says 1.0, .* says 0.5"),
    ({"model_type": "qwen2"}, "architectures says 'LlamaForCausalLM', and model_type qwen2 says 'Qwen2ForCausalLM'"),
    # of the wrong kind, or out of range
    *(({key: value}, f"{key} is .*must be") for key, values in {
        "rms_norm_eps": (math.nan, -1e-6, "1e-5"), "rope_theta": (-1, []), "vocab_size": (0, 2**40, 1.5),
        "num_hidden_layers": (10**12, True), "head_dim": (-2,), "hidden_size": (10**9, [64]), "sliding_window": ("9",),
        "num_attention_heads": (0,), "num_key_value_heads": (5, -1), "max_position_embeddings": (0, 10**12),
        "intermediate_size": (-1,), "attention_bias": ("no",), "mlp_bias": (2,), "tie_word_embeddings": ("true",),
        "architectures": ("LlamaForCausalLM", [1]), "layer_types": (3,), "torch_dtype": (16,), "rope_scaling": ([],),
        "quantization_config": ("fp8",), "model_type": (1,), "hidden_act": (1,)}.items() for value in values),
    *(({"rope_scaling": {**YARN, key: value}}, f"{key} is .*must be") for key, value in {
        "factor": math.nan, "original_max_position_embeddings": 0, "beta_fast": 0.5, "attention_factor": math.inf,
        "mscale": "1", "rope_type": 1, "truncate": 3, "rope_theta": math.nan}.items()),
    *(({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": marks}, f"no_rope_layers is .*{words}")
      for marks, words in (([1], "num_hidden_layers"), ([1] * 98 + [2], "must be"), ("1", "must be"))),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
    ({"hidden_size": None}, "hidden_size is missing, and must be a whole number"),
    ({"num_key_value_heads": 3}, "a multiple of num_key_value_heads, 3"), ({"head_dim": 15}, "must be even"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}}, "above low_freq_factor"),
    # what would be computed wrongly
    *(({key: value}, f"{key} {value!r} is not supported") for key, value in {
        "hidden_act": "gelu", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "num_experts": 128,
        "num_local_experts": 8, "n_routed_experts": 64, "kv_lora_rank": 512}.items()),
    *(({"is_causal": value}, "is_causal is .*must be true") for value in (False, None)),
    ({"rope_scaling": {**YARN, "truncate": None}}, "truncate is missing, and must be true or false"),
    *(({"rope_scaling": {**kind, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}}, "must be longrope beside")
      for kind in (YARN, {})),
    ({"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "rope_scaling": {
        "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8,
        "original_max_position_embeddings": 32}}, "in the scaling says 32, .* beside it says 4096"),
    *(({"architectures": [f"{family}ForCausalLM"], **more}, words) for family in ("Gemma3", "Olmo3")
      for more, words in (({"rope_parameters": DEFAULT}, "rope_parameters is .*must be by kind of layer"),
                          ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is missing"),
                          ({"rope_scaling": {**YARN, "truncate": False}}, "truncate is False, and must be true"),
                          ({"rope_parameters": {"full_attention": DEFAULT, "truncate": False}}, "truncate is False"))),
    *(({"architectures": [name]}, f"architecture '{name}' is not supported")
      for name in ("GPT2LMHeadModel", "Glm4ForCausalLM")),  # the latter has norms of its own
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}},
     "and long_factor 7, but 8 pairs of a head are rotated"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported for LlamaForCausalLM"),
    ({"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta 0.1 is not supported"),
    ({"rope_parameters": {"full_attention": DEFAULT}}, "full_attention .* is not supported"),
    ({"layer_types": ["linear_attention", "full_attention"]}, r"layer_types \['linear_attention'\] are not supported")])
def test_configs_that_are_refused(fields, words):
    with pytest.raises(UserError, match=words) as caught:
        config_from_hf({**HF, **fields})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rows", [1, 8, 64, 65])
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0])
def test_the_norm_is_the_same_for_few_rows_and_many(rows, scale):
    """Also of activations so small that its epsilon counts."""
    torch.manual_seed(0)
    norm, x = nn.RMSNorm(48, 1e-5), scale * torch.randn(2, rows, 48)
    torch.nn.init.uniform_(norm.weight)
    adapt(norm)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (48,), norm.weight, 1e-5))


@pytest.mark.parametrize("more", [{}, {"tie_word_embeddings": True}, {"qkv_bias": True}, {"out_bias": True},
                                  {"mlp_bias": True}, {"qk_norm": True}, {"rotary_factor": 0.5}, {"post_norm": True},
                                  {"qk_norm": True, "qk_norm_whole": True, "pre_norm": False, "post_norm": True}])
def test_the_number_of_parameters(more):
    config = replace(SMALL, **more)
    model = Transformer.empty(config, "meta", torch.float32)
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_prefills_progress_goes_from_0_to_1_with_its_work():
    from triforce.cache.kv_cache import KVCache

    model = Transformer.random(SMALL)
    for length, size in ((100, 30), (64, 64)):
        cache = KVCache(SMALL, model.rope, batch=1, capacity=128, block_size=1, flush_interval=16, chunk_size=0,
                            device="cpu", dtype=torch.float32)
        shares = []
        with torch.inference_mode():
            model.prefill(torch.zeros(1, length, dtype=torch.int64), prefill_blocks(cache, range(1), 0, length, size),
                          shares.append)
        assert shares == sorted(set(shares)) and shares[0] > 0 and shares[-1] == pytest.approx(1)
        assert shares[0] == pytest.approx(min(size, length) ** 2 / length**2 / 2)  # a later token takes longer
