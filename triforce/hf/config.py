"""config.json to `ModelConfig`: every value by kind and range before anything is built, and one value a fact."""

import math
from dataclasses import replace

from ..errors import UserError
from ..experts import LIMIT, SLOPE
from ..model import ModelConfig, RopeScaling
from .files import FLAG, REQUIRED, TEXT, Fields, guarded, number, several, shown, whole
from .packed import packing_of
from .quantization import float8_from_hf

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "ministral": "MinistralForCausalLM",
                 "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "phi3": "Phi3ForCausalLM",
                 "glm": "GlmForCausalLM", "smollm3": "SmolLM3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
                 "gemma3_text": "Gemma3ForCausalLM", "olmo3": "Olmo3ForCausalLM", "gpt_oss": "GptOssForCausalLM"}
PARTIAL = {"Phi3ForCausalLM": 1.0, "GlmForCausalLM": 0.5}  # families that may rotate a part of a head, and its default
THETAS = {"SmolLM3ForCausalLM": 2e6, "Gemma3ForCausalLM": 1e6, "Olmo3ForCausalLM": 5e5,
          "GptOssForCausalLM": 1.5e5}  # by default, if not 10,000
EPSILONS = {"Phi3ForCausalLM": 1e-5, "Olmo3ForCausalLM": 1e-5, "GlmForCausalLM": 1.5625e-7}  # by default, if not 1e-6
# What families differ in.
FEATURES = {"GlmForCausalLM": {"rotary_interleaved": True}, "Qwen3ForCausalLM": {"qk_norm": True},
            "Qwen3MoeForCausalLM": {"qk_norm": True}, "GptOssForCausalLM": {"sinks": True, "activation": "clamped"},
            "Gemma3ForCausalLM": {"qk_norm": True, "post_norm": True, "shifted_norms": True, "activation": "gelu"},
            "Olmo3ForCausalLM": {"qk_norm": True, "qk_norm_whole": True, "pre_norm": False, "post_norm": True}}
# Families whose full layers are the last of every few: how few, and the base of the other layers; None: the same. All
# but gpt-oss scale the rotation of full layers alone, and may describe it by kind of layer.
PATTERNS = {"Gemma3ForCausalLM": (6, 1e4), "Olmo3ForCausalLM": (4, 5e5), "GptOssForCausalLM": (2, None)}
BY_KIND = ("Gemma3ForCausalLM", "Olmo3ForCausalLM")  # their `rope_parameters` have a part for each kind of layer
# What a config.json may name and the model lacks: a value of any of these would change what is computed.
LACKING = ("attn_logit_softcapping", "final_logit_softcapping", "n_routed_experts", "kv_lora_rank", "q_lora_rank",
           "mlp_only_layers", "shared_expert_intermediate_size", "use_bidirectional_attention")
EXPERTS = ("num_experts", "num_local_experts")  # two spellings of their number
LACKING_ROPE = ("full_attention", "sliding_attention", "llama_4_scaling_beta")  # layers unlike, queries by position
KINDS = ("default", "linear", "llama3", "yarn", "longrope")
WINDOW = whole(1, 2**31)  # positions
GEMMA = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072}
OF_BOTH = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")  # said of text and images together
OSS = {"head_dim": 64, "sliding_window": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
       "attention_bias": True, "mlp_bias": True}
OSS_ROPE = {"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 4096, "truncate": False}
TEXTS, POSITIVE = several(TEXT), number(1e-3, 1e6)
SCALING = {"low_freq_factor": POSITIVE, "high_freq_factor": POSITIVE, "beta_fast": POSITIVE, "beta_slow": POSITIVE,
           "truncate": FLAG}  # fields of `RopeScaling` that go by the same name


def config_from_hf(hf: dict) -> ModelConfig:
    """Reads a config.json, in the spelling of any transformers version. Raises UserError for a value that is of the
    wrong kind, out of range, contradicted by another, or not one that `model.py` implements."""
    fields = Fields(text_part(hf))
    architecture = _architecture(fields)
    oss, moe = architecture == "GptOssForCausalLM", architecture == "Qwen3MoeForCausalLM"
    refuse(fields, LACKING if oss or moe else (*LACKING, *EXPERTS))
    fields.expect("is_causal", fields.values.get("is_causal", True) is True, "true, which alone is supported")
    glm, qwen2 = architecture == "GlmForCausalLM", architecture == "Qwen2ForCausalLM"
    gemma = architecture == "Gemma3ForCausalLM"
    dim, n_head = fields.get("hidden_size", whole(1, 2**17)), fields.get("num_attention_heads", whole(1, 2**12))
    theta, rotary_factor, scaling, sliding_theta = _rope(fields, architecture)
    theta = THETAS.get(architecture, 10000.0) if theta is None else theta
    chunked = fields.part("dual_chunk_attention_config")
    positions = fields.get("max_position_embeddings", WINDOW, 2048)
    if scaling.kind == "yarn":  # some configs give the window before stretching here, some the one after
        positions = max(positions, int(scaling.original_max_position_embeddings * scaling.factor))
    config = ModelConfig(
        vocab_size=fields.get("vocab_size", whole(1, 2**22)),
        dim=dim,
        n_layer=fields.get("num_hidden_layers", whole(1, 2**10)),
        n_head=n_head,
        n_kv_head=fields.get("num_key_value_heads", whole(1, n_head), n_head),
        head_dim=fields.get("head_dim", whole(2, 2**12), 256 if gemma else max(dim // n_head, 1)),
        ffn_dim=fields.get("moe_intermediate_size" if moe else "intermediate_size", whole(1, 2**20)),
        norm_eps=fields.get("rms_norm_eps", number(0, 1), EPSILONS.get(architecture, 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_factor=PARTIAL.get(architecture, 1.0) if rotary_factor is None else rotary_factor,
        max_position_embeddings=positions,
        unchunked_window=chunked.get("original_max_position_embeddings", WINDOW) if chunked.values else None,
        **FEATURES.get(architecture, {}),
        **(_gemma(fields, dim) if gemma else {}),
        qkv_bias=qwen2 or fields.get("attention_bias", FLAG, glm),
        out_bias=not qwen2 and not glm and fields.get("attention_bias", FLAG, False),
        mlp_bias=fields.get("mlp_bias", FLAG, False),
        tie_word_embeddings=fields.get("tie_word_embeddings", FLAG, gemma or architecture == "SmolLM3ForCausalLM"),
        architecture=architecture,
        **(windows := _windows(fields, architecture, positions)),
        sliding_theta=sliding_theta if architecture in BY_KIND and windows else None,
        nope_layers=_nope_layers(fields) if architecture == "SmolLM3ForCausalLM" else (),
        **(_experts(fields, oss) if oss or moe else {}),
        dtype=one_value({key: fields.get(key, TEXT, "").removeprefix("torch.") or None
                         for key in ("dtype", "torch_dtype")}) or ("bfloat16" if oss else None),  # published without
    )
    _check_shapes(config, fields)
    quantization = fields.part("quantization_config")
    if not quantization.values or packing_of(quantization) is not None:  # which are widened as they are read
        return config
    with guarded("quantization_config has a field of the wrong kind"):
        return replace(config, float8=float8_from_hf(quantization, config.n_layer, config.tie_word_embeddings))


def text_part(hf: dict) -> dict:
    """Of a Gemma 3 that sees images, too, the text model. Published files leave out what its class has by default; so
    may those of gpt-oss and Phi-3."""
    if hf.get("model_type") == "gpt_oss" or hf.get("architectures") == ["GptOssForCausalLM"]:
        return {**OSS, **hf, "rope_scaling": hf.get("rope_scaling") or hf.get("rope_parameters") or OSS_ROPE}
    if hf.get("model_type") == "phi3":
        return {"original_max_position_embeddings": 4096, **hf}
    if hf.get("model_type") != "gemma3" or not isinstance(hf.get("text_config"), dict):
        return hf
    said = {key: value for key, value in hf["text_config"].items() if value is not None}
    said |= {key: hf[key] for key in OF_BOTH if hf.get(key) is not None}
    return {**GEMMA, **said, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}


def refuse(fields: Fields, keys: tuple[str, ...]) -> None:
    for key in keys:
        if fields.values.get(key):
            raise UserError(f"{key} {shown(fields.values[key])} is not supported; choose a dense model without it")


def one_value(spellings: dict):
    """The value of a fact that has several spellings, or None. Two different values are refused."""
    given = {name: value for name, value in spellings.items() if value is not None}
    if any(value != other for value in given.values() for other in given.values()):
        said = ", and ".join(f"{name} says {shown(value)}" for name, value in given.items())
        raise UserError(f"{said}; remove the one that is wrong")
    return next(iter(given.values()), None)


def _architecture(fields: Fields) -> str:
    kind, named = fields.get("model_type", TEXT, None), fields.get("architectures", TEXTS, ())
    by_kind = ARCHITECTURES.get(kind)
    architecture = named[0] if named else by_kind
    if architecture not in ARCHITECTURES.values():
        raise UserError(f"architecture {shown(architecture)} is not supported; use {', '.join(ARCHITECTURES.values())}")
    one_value({"architectures": architecture, f"model_type {kind}": by_kind})
    gemma = architecture == "Gemma3ForCausalLM"
    key, known = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
    if (act := fields.get(key, TEXT, known)) not in (known, known.replace("silu", "swish")):
        raise UserError(f"{key} {shown(act)} is not supported; supported is '{known}'")
    return architecture


def _windows(fields: Fields, architecture: str, positions: int) -> dict:
    """The fields of `ModelConfig` that say which layers see the newest keys alone."""
    # Absent and null differ: most families have a window by default.
    usual = 0 if "sliding_window" in fields.values or architecture[:4] in ("Phi3", "Smol") else 4096
    window, types = fields.get("sliding_window", whole(0, 2**31), usual), fields.get("layer_types", TEXTS, ())
    count, qwen = fields.get("num_hidden_layers", WINDOW), architecture.startswith("Qwen")
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise UserError(f"layer_types {shown(sorted(unknown))} are not supported; choose full or sliding attention")
    smol = architecture == "SmolLM3ForCausalLM"
    unread = architecture in ("LlamaForCausalLM", "GlmForCausalLM")  # in transformers, too
    unread |= (qwen or smol and not types) and not fields.get("use_sliding_window", FLAG, False)
    by_index = qwen and architecture != "Qwen3MoeForCausalLM"
    # transformers takes a Mistral whose layers differ for a Ministral.
    unlike = architecture in (*PATTERNS, "MinistralForCausalLM") or fields.values.get("model_type") == "mistral"
    if window == 0 or unread or window >= positions and architecture not in PATTERNS:
        return {}
    if types and (by_index or smol or unlike):  # others: one of all layers
        fields.expect("layer_types", len(types) >= count, f"a list of num_hidden_layers ({count}) kinds")
        layers = [i for i in range(count) if types[i] == "sliding_attention"]
    elif architecture in PATTERNS:
        every, gemma = PATTERNS[architecture][0], architecture == "Gemma3ForCausalLM"  # which alone reads the key
        every = fields.get("sliding_window_pattern", whole(1, 2**10), every) if gemma else every
        layers = [i for i in range(count) if (i + 1) % every]
    elif smol:
        layers = _nope_layers(fields)
    else:
        layers = range(fields.get("max_window_layers", whole(0, 2**31), 28) if by_index else 0, count)
    return {"sliding_window": window, "sliding_layers": tuple(layers)} if layers else {}


def _gemma(fields: Fields, dim: int) -> dict:
    head, scalar = (fields.get(key, number(1, 2**20), 256) for key in ("head_dim", "query_pre_attn_scalar"))
    return {"embedding_scale": dim**0.5, "query_scale": (head / scalar) ** 0.5}


def _experts(fields: Fields, oss: bool) -> dict:
    """The fields of `ModelConfig` that say which MLPs a layer has. All layers have the same."""
    count = one_value({key: fields.get(key, whole(1, 2**12), None) for key in EXPERTS}) or fields.get(
        "num_experts", whole(1, 2**12))
    if (step := fields.get("decoder_sparse_step", whole(1, 2**10), 1)) != 1:
        raise UserError(f"decoder_sparse_step {step} is not supported: some layers have no experts; supported is 1")
    if fields.part("quantization_config").get("quant_method", TEXT, "") in ("fp8", "compressed-tensors"):
        raise UserError("quantization_config of a model with experts is not supported; choose its wide weights")
    for key, known in (("swiglu_limit", LIMIT), ("swiglu_alpha", SLOPE)) if oss else ():
        fields.expect(key, fields.get(key, number(0, 1e3), known) == known, f"{known}, which alone is supported")
    return {"num_experts": count, "active_experts": fields.get("num_experts_per_tok", whole(1, count)),
            "weighs_anew": oss or fields.get("norm_topk_prob", FLAG, False)}


def _nope_layers(fields: Fields) -> tuple[int, ...]:
    """Layers without rotation: those marked by 0, or else the last of every few."""
    count, every = fields.get("num_hidden_layers", WINDOW), fields.get("no_rope_layer_interval", WINDOW, 4)
    marks = fields.get("no_rope_layers", several(whole(0, 1)), ()) or [(i + 1) % every for i in range(count)]
    fields.expect("no_rope_layers", len(marks) >= count, f"a list of num_hidden_layers ({count}) marks")
    return tuple(i for i in range(count) if not marks[i])


def _rope(fields: Fields, architecture: str) -> tuple[float | None, float | None, RopeScaling, float | None]:
    """(theta, share of a head that is rotated, scaling, theta of sliding layers) from `rope_scaling`, from transformers
    5's `rope_parameters`, and from what stands beside them.
    """
    parts, sliding = {key: fields.part(key) for key in ("rope_scaling", "rope_parameters")}, None
    old, new = parts.values()
    if architecture in PATTERNS:
        within, local = new.part("sliding_attention"), fields if architecture == "Gemma3ForCausalLM" else Fields({})
        if _scaling(within, fields, architecture) is not None:
            raise UserError("a scaling in rope_parameters of sliding_attention is not supported; choose another model")
        sliding = one_value({key: part.get(key, number(2, 1e15), None) for part, key in (
            (local, "rope_local_base_freq"), (within, "rope_theta"))}) or PATTERNS[architecture][1]
        if "full_attention" in new.values:
            parts["rope_parameters"] = new.part("full_attention")
    if architecture in BY_KIND:
        # What transformers reads otherwise than it stands, or not at all.
        fields.expect("rope_parameters", not new.values or "full_attention" in new.values, "by kind of layer")
        old.expect("rope_type", "type" not in old.values or "rope_type" in old.values, "there beside type")
        for part in (old, new, *parts.values()):
            part.expect("truncate", part.values.get("truncate", True) is True, "true, which alone is supported")
    elif old.values:  # then transformers does not read `rope_parameters`
        said = {key: value for key, value in old.values.items() if value is not None}
        read = {"rope_type": said.get("type")} | fields.values | said
        if lost := {key: value for key, value in new.values.items() if value not in (None, "default", read.get(key))}:
            raise UserError(f"rope_parameters says {shown(lost)}, and of a model with rope_scaling transformers reads "
                            "that alone; move what rope_scaling says to rope_parameters")
    for part in parts.values():
        refuse(part, LACKING_ROPE)
    spots = {"config.json": fields, **parts}
    theta, share = (one_value({f"{name} in {key}": part.get(name, kind, None) for key, part in spots.items()})
                    for name, kind in (("rope_theta", number(2, 1e15)), ("partial_rotary_factor", number(1e-3, 1))))
    scalings = {key: _scaling(part, fields, architecture) for key, part in parts.items()}
    return theta, share, one_value(scalings) or RopeScaling(), sliding


def _scaling(rope: Fields, fields: Fields, architecture: str) -> RopeScaling | None:
    kinds = {key: rope.get(key, TEXT, None) for key in ("rope_type", "type")}
    kind = one_value({key: None if (key, kind) == ("type", "default") else kind for key, kind in kinds.items()})
    if rope.values.get("short_factor") and kind in (None, "su", "yarn"):
        rope.expect("rope_type", kind and architecture == "Phi3ForCausalLM", "longrope beside short_factor")
        kind = "longrope"
    if kind in (None, "default"):
        return None
    if kind not in KINDS:
        raise UserError(f"rope type {shown(kind)} is not supported; supported are {', '.join(KINDS)}")
    window = fields.get("max_position_embeddings", WINDOW, 2048)
    inside, beside = (one.get("original_max_position_embeddings", WINDOW, None)
                      for one in (rope, Fields({}) if architecture in BY_KIND else fields))
    if beside is not None and inside == window:  # transformers 5 fills it in, whatever stands beside the scaling
        inside = None
    original = one_value({"original_max_position_embeddings in the scaling": inside,
                          "original_max_position_embeddings beside it": beside}) or window
    by_windows = kind in ("yarn", "longrope")
    factor = rope.get("factor", number(1, 2**16), window / original if by_windows else REQUIRED)
    given = {name: rope.get(name, kind, getattr(RopeScaling, name)) for name, kind in SCALING.items()}
    rope.expect("truncate", rope.values.get("truncate", True) is not None, "true or false")
    rope.expect("high_freq_factor", given["high_freq_factor"] > given["low_freq_factor"], "above low_freq_factor")
    rope.expect("beta_fast", given["beta_fast"] > given["beta_slow"], "above beta_slow")
    if kind == "longrope":
        given.update({name: rope.get(name, several(POSITIVE)) for name in ("short_factor", "long_factor")})
    if by_windows:
        given["attention_factor"] = _attention_factor(rope, factor, original, kind)
    return RopeScaling(kind, factor, original, **given)


def _attention_factor(rope: Fields, factor: float, original: int, kind: str) -> float:
    given = rope.get("attention_factor", POSITIVE, 1.0 if factor <= 1 else None)
    if given is not None:
        return given
    if kind == "longrope":  # arXiv 2402.13753, as Phi-3 has it
        return math.sqrt(1 + math.log(factor) / math.log(original)) if original > 1 else 1.0
    # YaRN's temperature (arXiv 2309.00071, eq. 22), with DeepSeek's two-sided form where both mscales are given.
    m, m_all = rope.get("mscale", number(0, 1e3), None), rope.get("mscale_all_dim", number(0, 1e3), None)
    above, below = (0.1 * weight * math.log(factor) + 1.0 for weight in ((m, m_all) if m and m_all else (1.0, 0.0)))
    return above / below


def _check_shapes(config: ModelConfig, fields: Fields) -> None:
    """Raises UserError for sizes that do not fit each other."""
    scaling = config.rope_scaling
    fields.expect("num_attention_heads", config.n_head % config.n_kv_head == 0,
                  f"a multiple of num_key_value_heads, {config.n_kv_head}")
    if config.rotary_factor != 1.0 and config.architecture not in PARTIAL:
        raise UserError(f"partial_rotary_factor {config.rotary_factor} is not supported for {config.architecture}")
    if config.head_dim % 2 or config.rotary_dim % 2 or not config.rotary_dim:
        raise UserError(f"head_dim {config.head_dim} and its rotated part {config.rotary_dim} must be even, not 0")
    short, long, pairs = len(scaling.short_factor), len(scaling.long_factor), config.rotary_dim // 2
    if scaling.kind == "longrope" and not short == long == pairs:
        raise UserError(f"short_factor has {short} and long_factor {long}, but {pairs} pairs of a head are rotated")
