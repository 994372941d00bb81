"""Tiny random checkpoints of every supported family, made by transformers, with config.json spelled as published.

Knows nothing of triforce. Sizes are shrunk and windows scaled down with them; every other field is a family's own.
"""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "ministral": "MinistralForCausalLM",
                 "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "phi3": "Phi3ForCausalLM",
                 "glm": "GlmForCausalLM", "smollm3": "SmolLM3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
                 "gemma3_text": "Gemma3ForCausalLM", "olmo3": "Olmo3ForCausalLM", "gpt_oss": "GptOssForCausalLM"}
TINY = {"model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
        "num_attention_heads": 4, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "torch_dtype": "float32"}
LLAMA3_ROPE = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
               "original_max_position_embeddings": 32, "rope_type": "llama3"}
SHORT, LONG = [1.0 + 0.02 * i for i in range(8)], [1.0 + 0.6 * i for i in range(8)]  # of LongRoPE, a factor a pair

# What differs from TINY. Where RoPE is scaled, the window of 256 is past the original one of 32.
FAMILIES = {
    "Llama 1": {"rms_norm_eps": 1e-6},
    "Llama 2": {"num_key_value_heads": 4, "pretraining_tp": 1, "rope_scaling": None, "torch_dtype": "float16",
                "attention_bias": False},
    "Llama 3": {"num_key_value_heads": 2, "rope_theta": 500000.0, "eos_token_id": [3, 5], "torch_dtype": "bfloat16"},
    "Llama 3.1": {"num_key_value_heads": 2, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE, "mlp_bias": False},
    "Llama 3.2": {"num_key_value_heads": 2, "rope_theta": 500000.0, "tie_word_embeddings": True, "head_dim": 16,
                  "rope_scaling": {**LLAMA3_ROPE, "factor": 32.0}},
    # Wavelengths of 14 and 30 tokens lie in the band, here from 8 to 32, where the scaling sets in bit by bit.
    "Llama 3.1, its band": {"num_key_value_heads": 2, "rope_theta": 500.0, "rope_scaling": LLAMA3_ROPE},
    "Yarn-Llama-2-7b-128k": {"num_key_value_heads": 4, "auto_map": {"AutoModelForCausalLM": "other.Code"},
                             "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 32, "type": "yarn",
                                              "finetuned": True}},
    "YaRN, of Qwen2.5": {"model_type": "qwen2", "num_key_value_heads": 2, "rope_theta": 1000000.0,
                         "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 64, "type": "yarn"}},
    "YaRN, all fields": {"rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 32, "rope_type": "yarn",
                                          "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5}},
    "LLaMA-2-7B-32K": {"num_key_value_heads": 4, "rope_scaling": {"factor": 8.0, "type": "linear"}},
    "llama-68m": {"num_attention_heads": 2, "pad_token_id": 1, "bos_token_id": 0, "rms_norm_eps": 1e-6},
    "SmolLM2": {"num_attention_heads": 3, "hidden_size": 48, "num_key_value_heads": 1, "tie_word_embeddings": True,
                "rope_theta": 100000, "rope_interleaved": False, "is_llama_config": True},
    "Mistral 0.1": {"model_type": "mistral", "num_key_value_heads": 1, "sliding_window": 512},
    "Qwen2.5": {"model_type": "qwen2", "num_key_value_heads": 2, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
                "use_sliding_window": False, "sliding_window": 64, "max_window_layers": 2},
    "Qwen2.5 0.5B": {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen2.5-1M": {"model_type": "qwen2", "num_key_value_heads": 2, "rope_theta": 10000000.0,
                   "use_sliding_window": False, "sliding_window": 1024, "max_window_layers": 2,
                   "max_position_embeddings": 1024, "dual_chunk_attention_config": {
                       "chunk_size": 256, "local_size": 16, "original_max_position_embeddings": 256}},
    "Qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 24, "rope_theta": 1000000,
              "rms_norm_eps": 1e-6, "attention_bias": False, "rope_scaling": None, "use_sliding_window": False,
              "sliding_window": None, "max_window_layers": 2},
    "Qwen3 0.6B, YaRN": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 32, "rope_theta": 1000000,
                         "tie_word_embeddings": True, "max_position_embeddings": 80, "rope_scaling": {
                             "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "Qwen3, biases": {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 16, "attention_bias": True},
    "Phi-3-mini-4k": {"model_type": "phi3", "num_key_value_heads": 4, "sliding_window": 512, "rope_scaling": None,
                      "original_max_position_embeddings": 256},
    "Phi-3-mini-128k": {"model_type": "phi3", "num_key_value_heads": 4, "original_max_position_embeddings": 32,
                        "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}},
    "Phi-4-mini": {"model_type": "phi3", "num_key_value_heads": 2, "partial_rotary_factor": 0.75,
                   "tie_word_embeddings": True, "attention_bias": False, "lm_head_bias": False, "sliding_window": 512,
                   "original_max_position_embeddings": 32,
                   "rope_scaling": {"type": "longrope", "short_factor": SHORT[:6], "long_factor": LONG[:6]}},
    "GLM-4-9B": {"model_type": "glm", "num_key_value_heads": 2, "head_dim": 16, "partial_rotary_factor": 0.5,
                 "rms_norm_eps": 1.5625e-07, "attention_bias": True, "rope_theta": 10000.0},
    "GLM-4-9B-1M": {"model_type": "glm", "num_key_value_heads": 1, "head_dim": 24, "partial_rotary_factor": 0.5,
                    "rms_norm_eps": 1.5625e-07, "attention_bias": True, "rope_theta": 100000000.0,
                    "eos_token_id": [3, 5, 7]},
    "Mistral NeMo": {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 24, "rope_theta": 1000000.0,
                     "sliding_window": None},
    "Ministral": {"model_type": "ministral", "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 256,
                  "layer_types": ["full_attention", "sliding_attention"], "rope_theta": 100000000.0},
    "SmolLM3": {"model_type": "smollm3", "num_hidden_layers": 5, "num_key_value_heads": 2, "rope_theta": 5000000.0,
                "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "no_rope_layers": [1, 1, 1, 0, 1],
                "no_rope_layer_interval": 4, "use_sliding_window": False, "sliding_window": None},
    "SmolLM3, YaRN": {"model_type": "smollm3", "num_hidden_layers": 4, "tie_word_embeddings": False,
                      "no_rope_layer_interval": 2, "rope_scaling": {
                          "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "Qwen3-30B-A3B": {"model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 24, "rope_theta": 1000000.0,
                      "rms_norm_eps": 1e-6, "num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
                      "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
                      "use_sliding_window": False, "sliding_window": None, "max_window_layers": 2,
                      "router_aux_loss_coef": 0.001, "output_router_logits": False, "attention_bias": False},
    "Qwen3-MoE, tied": {"model_type": "qwen3_moe", "num_key_value_heads": 1, "head_dim": 16, "num_experts": 5,
                        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": False,
                        "mlp_only_layers": [], "tie_word_embeddings": True},
    "Gemma 3": {"model_type": "gemma3_text", "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 24,
                "query_pre_attn_scalar": 20, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 40, "hidden_act": None,
                "sliding_window_pattern": 3, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
                "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": True},
    "Gemma 3 270M": {"model_type": "gemma3_text", "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 40,
                     "query_pre_attn_scalar": 32, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
                     "hidden_act": None, "layer_types": ["sliding_attention", "full_attention"],
                     "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "OLMo 3": {"model_type": "olmo3", "num_hidden_layers": 4, "num_key_value_heads": 2, "sliding_window": 40,
               "rope_theta": 500000, "rms_norm_eps": 1e-6, "attention_bias": False, "rope_scaling": {
                   "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32,
                   "beta_slow": 1, "attention_factor": 1.2079441541679836}},
    "gpt-oss": {"model_type": "gpt_oss", "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 24,
                "sliding_window": 40, "rope_theta": 150000, "attention_bias": True, "num_local_experts": 6,
                "num_experts_per_tok": 2, "experts_per_token": 2, "swiglu_limit": 7.0, "initial_context_length": 32,
                "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_scaling": {
                    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
                    "beta_slow": 1.0, "truncate": False}},
    "explicit head_dim": {"head_dim": 32, "num_key_value_heads": 2},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


def config_json(family: str) -> dict:
    """A family's config.json, as published; a copy, for transformers writes into what it is given."""
    config = copy.deepcopy({**TINY, **FAMILIES[family]})
    return {"architectures": [ARCHITECTURES[config["model_type"]]], **config}


def edit(folder: Path, **fields) -> None:
    """Changes fields of a folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def storing(name: str, tensor: torch.Tensor | None):
    """Puts a tensor into a folder's file of weights, or takes it out."""
    def change(folder: Path) -> None:
        tensors = {**load_file(folder / "model.safetensors"), name: tensor}
        save_file({name: one for name, one in tensors.items() if one is not None}, folder / "model.safetensors")

    return change


def build_empty(config: dict) -> torch.nn.Module:
    """A transformers model without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(config)))


def build(family: str, seed: int = 0, **more) -> torch.nn.Module:
    """A transformers model of the family in float32, its weights large enough for positions to matter. more: fields of
    its config.json."""
    config = AutoConfig.for_model(**{**config_json(family), **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.15, generator=generator)
    return model


def as_published(state: dict) -> dict:
    """Experts, which transformers 5 holds in one tensor, each by its own name."""
    for name in [name for name in state if ".experts." in name and not any(".sinks" in other for other in state)]:
        tensor = state.pop(name)
        for n, expert in enumerate(tensor):
            parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
            for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
                state[f"{name.rsplit('.', 1)[0]}.{n}.{part}.weight"] = weight
    return state


def save(model: torch.nn.Module, config: dict, folder: Path, kind: str = "safetensors", shards: int = 1) -> Path:
    """Writes config.json and the weights as `safetensors` or `bin`, in one file or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    state = {name: tensor for name, tensor in as_published(model.state_dict()).items()
             if not (config.get("tie_word_embeddings") and name == "lm_head.weight")}
    suffix, stem = {"safetensors": (".safetensors", "model"), "bin": (".bin", "pytorch_model")}[kind]
    names, weight_map = list(state), {}
    for shard in range(shards):
        file = f"{stem}{suffix}" if shards == 1 else f"{stem}-{shard + 1:05d}-of-{shards:05d}{suffix}"
        part = {name: state[name].contiguous() for name in names[shard::shards]}
        weight_map.update(dict.fromkeys(part, file))
        if kind == "bin":
            torch.save(part, folder / file)
        else:
            save_file(part, folder / file, metadata={"format": "pt"})
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
    return folder
