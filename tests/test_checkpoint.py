"""Loading against transformers: the same logits from the same folder, for every family and layout; and every fault.
Most run through the passes of `naive.py`, so that loading and weights are tested by themselves."""

import dataclasses
import json
import os
import shutil

import pytest
import torch
from conftest import make_engine, refused
from families import ARCHITECTURES, FAMILIES, build, build_empty, config_json, edit, save, storing
from reference import dense_logits
from safetensors.torch import load_file, save_file, save_model
from tokenizer_folders import sentencepiece_folder
from transformers import AutoConfig, AutoModelForCausalLM

from triforce.errors import UserError
from triforce.hf import folders
from triforce.hf.checkpoint import eos_token_ids, load_model, parse_dtype, read_config
from triforce.hf.config import config_from_hf
from triforce.hf.files import LFS
from triforce.hf.fingerprint import model_fingerprint
from triforce.hf.folders import resolve
from triforce.model import RotaryEmbedding

LENGTH = 250  # of a window of 256; the original one, where RoPE is scaled, is 32
TOKENS = torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def expected(model):
    return model(TOKENS).logits


def greedy(model, prompt, count: int) -> list[int]:
    """What transformers says behind a prompt [1, S]."""
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count,
                          eos_token_id=None, pad_token_id=0)[0, prompt.shape[1] :].tolist()


def close(logits, others):
    torch.testing.assert_close(logits, others, atol=1e-4, rtol=0)


@pytest.fixture
def folder(tmp_path):
    """A GQA checkpoint in one safetensors file."""
    return save(build("Llama 3"), config_json("Llama 3"), tmp_path / "checkpoint")


@pytest.mark.parametrize("family", FAMILIES)
def test_parity(family, tmp_path):
    """Also through the real caches: logits, and greedy text with speculation and without."""
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

    engine, prompt = make_engine(ours, flush_interval=16, prefill_chunk_size=64, budget=48), TOKENS[:1, :150]
    close(engine.logits(TOKENS), logits)
    for speculate in (True, False):
        said = engine.generate(prompt[0].tolist(), 24, temperature=0, speculate=speculate).tokens
        assert said == greedy(theirs, prompt, 24)


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
    assert short.generate(TOKENS[0, :20].tolist(), 12, temperature=0).tokens == greedy(theirs, TOKENS[:1, :20], 12)
    refused(r"exceed max_seq_len \(32\)", short.logits, TOKENS[:, :33])
    long = make_engine(load_model(folder, dtype=torch.float32, max_seq_len=33), max_seq_len=33)
    assert (long.logits(TOKENS[:, :32]) - found).abs().max() > 0.1 and long.identity() != short.identity()
    assert long.target.config == load_model(folder, dtype=torch.float32).config
    assert model_fingerprint(folder, 33) == model_fingerprint(folder) != model_fingerprint(folder, 32)


FACTORS = {"short_factor": [1.0] * 48, "long_factor": [1.0 + i / 3 for i in range(48)]}


@pytest.mark.parametrize("fields", [
    {"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 24, "partial_rotary_factor": 0.75,
     "original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope", **FACTORS}},
    {"model_type": "glm", "hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128,
     "partial_rotary_factor": 0.5, "rope_theta": 100000000.0},
    {"model_type": "qwen3", "hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128, "rope_theta": 1000000.0,
     "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    {"hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 3580165449.0},
    {"hidden_size": 4096, "num_attention_heads": 32, "rope_scaling": {  # whose ramp ends before it begins
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "beta_fast": 2e5,
        "beta_slow": 1e5}},
], ids=lambda fields: fields.get("model_type", "llama"))
def test_angles_of_published_shapes(fields):
    """Far out in a long text a frequency's last bit counts."""
    config = {**config_json("Llama 1"), "max_position_embeddings": 131072, "num_key_value_heads": 1, **fields}
    config["architectures"] = [ARCHITECTURES[config["model_type"]]]
    ours = RotaryEmbedding(config_from_hf(config))
    rotary = type(build_empty(config).model.rotary_emb)(AutoConfig.for_model(**config))
    positions = torch.tensor([[0, 1, 4096, 131_071, 2**20 - 1]])
    cos, sin = rotary(torch.zeros(1), positions)  # [1, 5, rotary_dim], both halves alike
    pairs = cos.shape[-1] // 2
    half = ours.config.head_dim // 2
    found = [x[0, :, half : half + pairs] for x in ours(positions[0])]
    assert torch.equal(found[0], cos[0, :, :pairs]) and torch.equal(found[1], sin[0, :, :pairs])
    for x, still in zip(ours(positions[0]), (1.0, 0.0), strict=True):
        assert (x[0, :, half + pairs :] == still).all()


def test_safetensors_come_before_bin_and_bin_may_be_of_the_old_format(folder):
    """torch before 1.6 wrote files that cannot be mapped."""
    save(build("Llama 3", seed=1), config_json("Llama 3"), folder, "bin")
    close(dense_logits(load_model(folder, dtype=torch.float32), TOKENS), expected(build("Llama 3")))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin",
               _use_new_zipfile_serialization=False)
    (folder / "model.safetensors").unlink()
    close(dense_logits(load_model(folder, dtype=torch.float32), TOKENS), expected(build("Llama 3")))


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


def test_tied_weights(tied):
    """An output layer beside its embedding is ignored, as are RoPE's buffers of old checkpoints. If it is another one,
    both are used, as in transformers."""
    theirs, folder = tied
    stored(theirs, folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq":
                                                           torch.zeros(8)}))
    assert {"lm_head.weight", "model.embed_tokens.weight"} < load_file(folder / "model.safetensors").keys()
    ours = load_model(folder, dtype=torch.float32)
    assert ours.output.weight is ours.embedding.weight
    close(dense_logits(ours, TOKENS), expected(theirs))

    stored(theirs, folder, lambda tensors: tensors["lm_head.weight"].mul_(-0.5))
    logits = expected(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert (logits - expected(theirs)).abs().max() > 1
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
    refused("1 of 20 tensors are missing.*model.embed_tokens.weight", load_model, folder)


def test_dtype(folder):
    assert load_model(folder).dtype == torch.bfloat16  # config.json's
    assert load_model(folder, dtype="fp16").dtype == torch.float16
    assert {parse_dtype(one) for one in ("bfloat16", "bf16", "torch.bfloat16", torch.bfloat16)} == {torch.bfloat16}
    model = load_model(folder, dtype=torch.float64)
    assert model.rope.frequencies.dtype == torch.float32 and model.rope.frequencies.device.type == "cpu"
    edit(folder, torch_dtype=None)
    assert load_model(folder).dtype == torch.float32  # the file's
    edit(folder, torch_dtype="int4")
    refused("'int4' is unknown.*bfloat16", load_model, folder)


def instead(name, write):
    """Another file in place of the weights."""
    def fault(folder):
        (folder / "model.safetensors").unlink()
        (folder / name).unlink(missing_ok=True)
        write(folder / name)
    return fault


def index_of(**weight_map):
    return instead("model.safetensors.index.json", lambda path: path.write_text(json.dumps({"weight_map": weight_map})))


LFS_POINTER = LFS + b"v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize("fault, message", [
    (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    (lambda folder: (folder / "config.json").write_text("[]"), "no JSON object"),
    (lambda folder: (folder / "config.json").write_text("{}"), "config.json: architecture None is not supported"),
    (lambda folder: edit(folder, hidden_size="64"), "hidden_size is '64', and must be a whole number"),
    (lambda folder: edit(folder, vocab_size=97), r".*.weight is .* of shape \(96, 64\), but .* \(97, 64\)"),
    (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor pytorch_model.bin"),
    (lambda folder: os.truncate(folder / "model.safetensors", 9999), "model.safetensors is truncated, damaged"),
    (storing("model.layers.1.mlp.up_proj.weight", None), "1 of 21 tensors are missing.*layers.1.mlp.up_proj.weight"),
    (storing("model.norm.weight", torch.zeros(64, dtype=torch.int8)), "norm.weight is torch.int8 .* implies wider"),
    (storing("model.layers.0.self_attn.q_proj.bias", torch.zeros(64)), "self_attn.q_proj.bias has no place"),
    (storing("model.layers.0.self_attn.qkv_proj.weight", torch.zeros(129, 64)), "qkv_proj.weight has no place"),
    (instead("pytorch_model.bin", lambda path: path.write_bytes(b"PK\3\4" + bytes(99))), "is truncated, damaged"),
    (index_of(), "has no weight_map"),
    *((index_of(a=file), "which is no file of this folder")
      for file in (3, None, ["x"], "/etc/passwd", "../checkpoint/config.json", "absent", "nul\0.safetensors")),
    *((instead(name, lambda path: path.write_bytes(LFS_POINTER)), f"{name} is a pointer of Git")
      for name in ("model.safetensors", "pytorch_model.bin")),
    *((instead(name, os.mkfifo), f"{name} is no regular file") for name in ("model.safetensors", "config.json")),
    *((instead("pytorch_model.bin", lambda path, content=content: torch.save(content, path)), "more than tensors")
      for content in ({"a": shutil.rmtree}, torch.zeros(2), {"a": 1}, {3: torch.zeros(2)},
                      {"a": torch.eye(2).to_sparse()}, {"model.norm.weight": torch.zeros(1).expand(64)})),
])
def test_faults(folder, fault, message):
    fault(folder)
    refused(message, load_model, folder)


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
    assert resolve("tiny") == folders.TINY / "target"
    assert resolve(folder) == resolve(str(folder)) == resolve("checkpoint").resolve() == folder
    for absent in ("./nowhere", "nowhere", "a/b/c", "../owner/name", tmp_path / "nowhere", folder / "config.json",
                   "x" * 300, "~no such user/x", "a\0b", ""):
        refused("no such folder|cannot be opened", resolve, absent)
    cached = tmp_path / "cache" / "models--owner--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="triforce download --repo-id owner/name$"):  # it has no weights
        resolve("owner/name")
    shutil.copytree(folder, cached / "snapshots" / "abc", dirs_exist_ok=True)
    assert resolve("owner/name") == cached / "snapshots" / "abc"
    shutil.copytree(folder, tmp_path / "checkpoints" / "owner" / "name")
    assert resolve("owner/name").resolve() == tmp_path / "checkpoints" / "owner" / "name"
