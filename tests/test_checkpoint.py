"""Loading against transformers: the same logits from the same folder, for every family and layout; and every fault.

Most run through the passes of `naive.py`, so that loading and weights are tested by themselves; one test goes through
the engine.
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import make_engine, slow
from families import ARCHITECTURES, FAMILIES, build, build_empty, config_json, save
from reference import dense_logits
from safetensors.torch import load_file, save_file, save_model
from tokenizer_folders import sentencepiece_folder
from transformers import AutoConfig, AutoModelForCausalLM

import triforce
from triforce.errors import UserError
from triforce.hf import checkpoint, folders
from triforce.hf.checkpoint import eos_token_ids, load_model, parse_dtype, read_config
from triforce.hf.config import config_from_hf
from triforce.hf.convert import convert
from triforce.hf.files import LFS
from triforce.hf.fingerprint import model_fingerprint
from triforce.hf.folders import resolve
from triforce.hf.places import places
from triforce.kit import plan
from triforce.model import RotaryEmbedding, Transformer

LENGTH = 250  # of a window of 256; the original one, where RoPE is scaled, is 32
TOKENS = torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def expected(model):
    return model(TOKENS).logits


def close(logits, others):
    torch.testing.assert_close(logits, others, atol=1e-4, rtol=0)


@pytest.fixture
def folder(tmp_path):
    """A GQA checkpoint in one safetensors file."""
    return save(build("Llama 3"), config_json("Llama 3"), tmp_path / "checkpoint")


@pytest.mark.parametrize("family", FAMILIES)
def test_parity(family, tmp_path):
    theirs = build(family)
    logits = expected(theirs)
    folder = save(theirs, config_json(family), tmp_path / "published")
    ours = load_model(folder, dtype=torch.float32)
    close(dense_logits(ours, TOKENS), logits)
    assert not ours.training and not any(parameter.requires_grad for parameter in ours.parameters())
    assert sum(parameter.numel() for parameter in ours.parameters()) == sum(p.numel() for p in theirs.parameters())

    theirs.save_pretrained(tmp_path / "version 5")  # the same in transformers 5's spelling
    new, old = read_config(tmp_path / "version 5"), read_config(folder)
    assert dataclasses.replace(new, dtype=None) == dataclasses.replace(old, dtype=None)
    close(dense_logits(load_model(tmp_path / "version 5", dtype="float32"), TOKENS), logits)


@pytest.mark.parametrize("family", ["Phi-4-mini", "Phi-3-mini-128k"])
def test_longrope_within_its_original_window(family, tmp_path):
    """Where no sequence may leave it, a model has its short factors, as transformers has for a short text. Keys of one
    kind do not pass for the other."""
    theirs = build(family)
    folder = save(theirs, config_json(family), tmp_path)
    short = make_engine(load_model(folder, dtype=torch.float32, max_seq_len=32), max_seq_len=32, flush_interval=16)
    found = short.logits(TOKENS[:, :32])
    with torch.no_grad():
        close(found, theirs(TOKENS[:, :32]).logits)
    answer = theirs.generate(TOKENS[:1, :20], attention_mask=torch.ones(1, 20), do_sample=False, max_new_tokens=12,
                             eos_token_id=None, pad_token_id=0)[0, 20:].tolist()
    assert short.generate(TOKENS[0, :20].tolist(), 12, temperature=0).tokens == answer
    with pytest.raises(UserError, match=r"exceed max_seq_len \(32\)"):
        short.logits(TOKENS[:, :33])
    long = make_engine(load_model(folder, dtype=torch.float32, max_seq_len=33), max_seq_len=33)
    assert (long.logits(TOKENS[:, :32]) - found).abs().max() > 0.1 and long.identity() != short.identity()
    assert long.target.config == load_model(folder, dtype=torch.float32).config
    assert model_fingerprint(folder, 33) == model_fingerprint(folder) != model_fingerprint(folder, 32)


OLD_GLM = {"architectures": ["ChatGLMModel"], "model_type": "chatglm", "add_bias_linear": False, "add_qkv_bias": True,
           "apply_query_key_layer_scaling": True, "apply_residual_connection_post_layernorm": False,
           "ffn_hidden_size": 112, "hidden_size": 64, "kv_channels": 16, "layernorm_epsilon": 1.5625e-07,
           "multi_query_attention": True, "multi_query_group_num": 2, "num_attention_heads": 4, "num_layers": 2,
           "original_rope": True, "padded_vocab_size": 96, "post_layer_norm": True, "rmsnorm": True, "rope_ratio": 500,
           "seq_length": 256, "tie_word_embeddings": False, "torch_dtype": "float32"}
OLD_NAMES = (("model.embed_tokens", "transformer.embedding.word_embeddings"), ("lm_head", "transformer.output_layer"),
             ("model.norm", "transformer.encoder.final_layernorm"), ("model.layers", "transformer.encoder.layers"),
             ("self_attn.o_proj", "self_attention.dense"), ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
             ("mlp.down_proj", "mlp.dense_4h_to_h"), ("self_attn.qkv_proj", "self_attention.query_key_value"))


def test_glm_in_the_layout_of_its_own_code(tmp_path):
    """The same model under other names, with queries, keys and values in one tensor."""
    theirs = build("GLM-4-9B", rope_theta=5000000.0)
    state, old = theirs.state_dict(), {"transformer.rotary_pos_emb.inv_freq": torch.ones(4)}
    for name, tensor in state.items():
        if "q_proj" in name:
            tensor = torch.cat([state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
        elif "k_proj" in name or "v_proj" in name:
            continue
        name = name.replace("q_proj", "qkv_proj")
        for usual, own in OLD_NAMES:
            name = name.replace(usual, own)
        old[name] = tensor
    (tmp_path / "config.json").write_text(json.dumps(OLD_GLM))
    save_file(old, tmp_path / "model.safetensors")
    assert "transformer.encoder.layers.1.self_attention.query_key_value.bias" in old
    close(dense_logits(load_model(tmp_path), TOKENS), expected(theirs))
    for fields, message in (({"rmsnorm": False}, "rmsnorm False is not supported"),
                            ({"add_bias_linear": True}, "add_bias_linear True is not supported"),
                            ({"pre_seq_len": 8}, "pre_seq_len 8 is not supported")):
        edit(tmp_path, **{**OLD_GLM, **fields})
        with pytest.raises(UserError, match=message):
            load_model(tmp_path)


def test_fused_tensors_of_another_shape(tmp_path):
    theirs = build("Phi-4-mini")
    folder = save(theirs, {**config_json("Phi-4-mini"), "num_key_value_heads": 1}, tmp_path)
    with pytest.raises(UserError, match="self_attn.qkv_proj.weight has 128 rows, but config.json implies 96"):
        load_model(folder)


FACTORS = {"short_factor": [1.0] * 48, "long_factor": [1.0 + i / 3 for i in range(48)]}


@pytest.mark.parametrize("fields", [
    {"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 24, "partial_rotary_factor": 0.75,
     "original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope", **FACTORS}},
    {"model_type": "glm", "hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128,
     "partial_rotary_factor": 0.5, "rope_theta": 100000000.0},
    {"model_type": "qwen3", "hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128, "rope_theta": 1000000.0,
     "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    {"hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 3580165449.0},
], ids=lambda fields: fields.get("model_type", "llama"))
def test_angles_of_published_shapes(fields):
    """Far out in a long text a frequency's last bit counts."""
    config = {**config_json("Llama 1"), "max_position_embeddings": 131072, "num_key_value_heads": 1, **fields}
    config["architectures"] = [ARCHITECTURES[config["model_type"]]]
    ours = RotaryEmbedding(config_from_hf(config))
    rotary = type(build_empty(config).model.rotary_emb)(AutoConfig.for_model(**config))
    positions = torch.tensor([[0, 1, 4096, 99_999, 131_071]])
    cos, sin = rotary(torch.zeros(1), positions)  # [1, 5, rotary_dim], both halves alike
    pairs = cos.shape[-1] // 2
    half = ours.config.head_dim // 2
    found = [x[:, half : half + pairs] for x in ours(positions[0])]
    assert torch.equal(found[0], cos[0, :, :pairs]) and torch.equal(found[1], sin[0, :, :pairs])
    for x, still in zip(ours(positions[0]), (1.0, 0.0), strict=True):
        assert (x[:, half + pairs :] == still).all()


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", ["Llama 3.1", "SmolLM2", "Qwen2.5", "Qwen3", "Phi-4-mini", "GLM-4-9B"])
def test_parity_of_layouts(family, shards, kind, tmp_path):
    theirs = build(family)
    folder = save(theirs, config_json(family), tmp_path, kind, shards)
    close(dense_logits(load_model(folder, dtype=torch.float32), TOKENS), expected(theirs))


@pytest.mark.parametrize("family", [*list(FAMILIES)[1::3], *slow(*list(FAMILIES)[::3], *list(FAMILIES)[2::3])])
def test_engine_equals_transformers(family, tmp_path):
    """The same checkpoints through the real caches: logits, and greedy text with speculation and without."""
    theirs = build(family)
    ours = load_model(save(theirs, config_json(family), tmp_path), dtype=torch.float32)
    engine = make_engine(ours, flush_interval=16, prefill_chunk_size=64, budget=48)
    close(engine.logits(TOKENS), expected(theirs))
    prompt = TOKENS[:1, :150]
    answer = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24,
                             eos_token_id=None, pad_token_id=0)[0, 150:].tolist()
    for speculate in (True, False):
        assert engine.generate(prompt[0].tolist(), 24, temperature=0, speculate=speculate).tokens == answer


def test_safetensors_come_before_bin(folder):
    save(build("Llama 3", seed=1), config_json("Llama 3"), folder, "bin")
    close(dense_logits(load_model(folder, dtype=torch.float32), TOKENS), expected(build("Llama 3")))


def test_bin_of_the_old_format(folder):
    """torch before 1.6 wrote files that cannot be mapped."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin",
               _use_new_zipfile_serialization=False)
    (folder / "model.safetensors").unlink()
    close(dense_logits(load_model(folder, dtype=torch.float32), TOKENS), expected(build("Llama 3")))


def test_tied_weights_are_compared_once_a_load_and_not_for_a_plan(tied, monkeypatch, capsys):
    """Whole weights are read for it. A stored output layer that is tied may lie in a later file than the embedding."""
    theirs, folder = tied
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    files = {name: "b.safetensors" if name == "lm_head.weight" else "a.safetensors" for name in tensors}
    save_file({"lm_head.weight": tensors.pop("lm_head.weight")}, folder / "b.safetensors")
    save_file(tensors, folder / "a.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    shutil.copy(sentencepiece_folder(folder.parent / "tokenizer", {}) / "tokenizer.model", folder)
    compared, compare = [], checkpoint.output_is_embedding
    monkeypatch.setattr(checkpoint, "output_is_embedding", lambda files: compared.append(1) or compare(files))
    engine = triforce.load(folder, device="cpu")
    assert engine.target.output.weight is engine.target.embedding.weight and engine.identity() and len(compared) == 1
    assert plan.main(["--checkpoint", str(folder), "--device", "cpu", "--max-new-tokens", "9"]) in (0, 1)
    assert len(compared) == 1
    capsys.readouterr()


def stored(theirs, folder, change):
    """A folder of `theirs` whose tensors, the tied output layer among them, were changed."""
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def tied(tmp_path):
    theirs = build("Llama 3.2")
    return theirs, save(theirs, config_json("Llama 3.2"), tmp_path / "tied")


def test_what_repeats_the_config_is_ignored(tied):
    """RoPE buffers of old checkpoints, and an output layer that is stored beside the embedding it is tied to."""
    theirs, folder = tied
    stored(theirs, folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq":
                                                           torch.zeros(8)}))
    assert {"lm_head.weight", "model.embed_tokens.weight"} < load_file(folder / "model.safetensors").keys()
    ours = load_model(folder, dtype=torch.float32)
    assert ours.output.weight is ours.embedding.weight
    close(dense_logits(ours, TOKENS), expected(theirs))


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_tied_weights_that_differ_are_both_used(tied, kind, tmp_path):
    """As transformers does."""
    theirs, folder = tied
    stored(theirs, folder, lambda tensors: tensors["lm_head.weight"].mul_(-0.5))
    logits = expected(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert (logits - expected(theirs)).abs().max() > 1
    if kind == "bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        folder = convert(folder, tmp_path / "converted")
        assert "lm_head.weight" in load_file(folder / "model.safetensors")
    ours = load_model(folder, dtype=torch.float32)
    assert not ours.config.tie_word_embeddings and read_config(folder).tie_word_embeddings
    close(dense_logits(ours, TOKENS), logits)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_one_of_two_tied_weights_serves_as_both(tied, name):
    theirs, folder = tied
    save_model(theirs, folder / "model.safetensors", {"format": "pt"})
    assert "lm_head.weight" in load_file(folder / "model.safetensors")  # alone: the first by name
    if name != "lm_head.weight":
        stored(theirs, folder, lambda tensors: tensors.pop("lm_head.weight"))
    ours = load_model(folder, dtype=torch.float32)
    assert ours.output.weight is ours.embedding.weight
    close(dense_logits(ours, TOKENS), expected(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)))
    stored(theirs, folder, lambda tensors: (tensors.pop("lm_head.weight"), tensors.pop("model.embed_tokens.weight")))
    with pytest.raises(UserError, match="1 of 20 tensors are missing.*model.embed_tokens.weight"):
        load_model(folder)


def test_dtype(folder):
    assert load_model(folder).dtype == torch.bfloat16  # config.json's
    assert load_model(folder, dtype="fp16").dtype == torch.float16
    assert {parse_dtype(one) for one in ("bfloat16", "bf16", "torch.bfloat16", torch.bfloat16)} == {torch.bfloat16}
    model = load_model(folder, dtype=torch.float64)
    assert model.rope.frequencies.dtype == torch.float32 and model.rope.frequencies.device.type == "cpu"
    edit(folder, torch_dtype=None)
    assert load_model(folder).dtype == torch.float32  # the file's
    edit(folder, torch_dtype="int4")
    with pytest.raises(UserError, match="'int4' is unknown.*bfloat16"):
        load_model(folder)


def test_every_row_of_every_parameter_has_one_place():
    for family in FAMILIES:
        config = config_from_hf(config_json(family))
        parameters = dict(Transformer.empty(config, "meta", torch.float32).named_parameters())
        rows = {name: [0] * parameter.shape[0] for name, parameter in parameters.items()}
        for place in places(config).values():
            assert parameters[place.parameter].shape[1:] == place.shape[1:]
            for row in range(place.start, place.start + place.shape[0]):
                rows[place.parameter][row] += 1
        assert all(count == 1 for counts in rows.values() for count in counts)


def edit(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def replace(name, tensor):
    def fault(folder):
        path = folder / "model.safetensors"
        tensors = {**load_file(path), name: tensor}
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    return fault


def instead(name, write):
    """Another file in place of the weights."""
    def fault(folder):
        (folder / "model.safetensors").unlink()
        (folder / name).unlink(missing_ok=True)
        write(folder / name)
    return fault


def index_of(**weight_map):
    return instead("model.safetensors.index.json", lambda path: path.write_text(json.dumps({"weight_map": weight_map})))


@pytest.mark.parametrize("fault, message", [
    (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
    (lambda folder: (folder / "config.json").write_text("[]"), "no JSON object"),
    (lambda folder: (folder / "config.json").write_text("{}"), r"config.json: architecture 'of no name'"),
    (lambda folder: edit(folder, hidden_size="64"), "hidden_size is '64', and must be a whole number"),
    (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor pytorch_model.bin"),
    (replace("model.layers.1.mlp.up_proj.weight", None), "1 of 21 tensors are missing.*layers.1.mlp.up_proj.weight"),
    (replace("lm_head.weight", None), "missing.*lm_head.weight"),
    (replace("model.norm.weight", torch.zeros(65)), r"model.norm.weight has shape \(65,\), but .* \(64,\)"),
    (replace("model.norm.weight", torch.zeros(64, dtype=torch.int8)), "norm.weight is torch.int8, but .* a wider"),
    (replace("model.layers.0.self_attn.q_proj.bias", torch.zeros(64)), "self_attn.q_proj.bias, which .* no place for"),
    (lambda folder: edit(folder, vocab_size=97), r".*.weight has shape \(96, 64\), but .* \(97, 64\)"),
    (lambda folder: os.truncate(folder / "model.safetensors", 9999), "model.safetensors is truncated or damaged"),
    (instead("pytorch_model.bin", lambda path: path.write_bytes(b"PK\3\4" + bytes(99))), "is truncated or damaged"),
    (index_of(), "has no weight_map"),
    *((index_of(a=file), "places tensor 'a' in .*, which is no file of this folder")
      for file in (3, None, ["x"], "/etc/passwd", "../checkpoint/config.json", "a/../../b.safetensors", "absent",
                   "nul\0.safetensors")),
    *((instead(name, lambda path: path.write_bytes(LFS + b"v1\noid sha256:0\nsize 9\n")), f"{name} is a pointer of Git")
      for name in ("model.safetensors", "pytorch_model.bin")),
    *((instead(name, os.mkfifo), f"{name} is no regular file")
      for name in ("model.safetensors", "pytorch_model.bin", "config.json")),
    *((instead("pytorch_model.bin", lambda path, content=content: torch.save(content, path)),
       "pytorch_model.bin holds more than tensors, or is damaged") for content in (
        {"a": shutil.rmtree}, torch.zeros(2), [torch.zeros(2)], {"a": 1}, {3: torch.zeros(2)},
        {"a": torch.eye(2).to_sparse()}, {"model.norm.weight": torch.zeros(1).expand(64)})),
])
def test_faults(folder, fault, message):
    fault(folder)
    with pytest.raises(UserError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_eos_token_ids(folder):
    assert eos_token_ids(folder) == (3, 5)
    (folder / "generation_config.json").write_text('{"eos_token_id": 7, "temperature": 0.1}')
    assert eos_token_ids(folder) == (7,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert eos_token_ids(folder) == (7, 9)
    (folder / "generation_config.json").write_text('{"temperature": 0.1}')
    assert eos_token_ids(folder) == (3, 5)
    edit(folder, eos_token_id=None)
    source = sentencepiece_folder(folder.parent / "tokenizer", {})
    shutil.copy(source / "tokenizer.model", folder)
    assert eos_token_ids(folder) == (2,)  # the tokenizer's


def test_resolve(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert resolve("tiny") == folders.TINY / "target" and folders.tiny_draft() == folders.TINY / "draft"
    assert resolve(folder) == resolve(str(folder)) == folder
    assert resolve("checkpoint").resolve() == folder
    for name in ("x" * 5000, "~no such user/x", "a\0b", Path("y" * 300)):
        with pytest.raises(UserError) as caught:
            resolve(name)
        assert len(str(caught.value)) < 1000
    for absent in ("./nowhere", "nowhere", str(tmp_path / "nowhere"), "a/b/c", "../owner/name", tmp_path / "nowhere"):
        with pytest.raises(UserError, match="no such folder"):
            resolve(absent)
    with pytest.raises(UserError, match="is a file"):
        resolve(folder / "config.json")
    with pytest.raises(UserError, match="triforce download --repo-id owner/name$"):
        resolve("owner/name")
    cached = tmp_path / "cache" / "models--owner--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="download it"):  # without weights
        resolve("owner/name")
    shutil.copytree(folder, cached / "snapshots" / "abc", dirs_exist_ok=True)
    assert resolve("owner/name") == cached / "snapshots" / "abc"
    shutil.copytree(folder, tmp_path / "checkpoints" / "owner" / "name")
    assert resolve("owner/name").resolve() == tmp_path / "checkpoints" / "owner" / "name"
