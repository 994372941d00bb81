"""GGUF files: the folder that `triforce convert --gguf` makes says what the file's own model says, and what
transformers reads from the same file."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from conftest import make_engine
from families import LONG, SHORT, build, config_json
from tokenizer_folders import STRINGS, make_folders
from transformers import AutoModelForCausalLM

from triforce import load
from triforce.cli import main
from triforce.errors import UserError
from triforce.hf import convert as module
from triforce.hf.checkpoint import eos_token_ids, load_model, open_tensors
from triforce.hf.convert import convert_gguf
from triforce.hf.gguf import GGUF
from triforce.hf.tokenizer import Tokenizer
from triforce.hf.vocabulary import merges_of, read_sentencepiece

# What llama.cpp calls what a config calls otherwise.
KEYS = {"context_length": "max_position_embeddings", "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.key_length": "head_dim",
        "vocab_size": "vocab_size"}
BYTES = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.eos_token_id": 0,
         "tokenizer.ggml.tokens": ["a", "b", "<|im_end|>", "ab"], "tokenizer.ggml.token_type": [1, 1, 3, 1],
         "tokenizer.ggml.merges": ["a b"]}
Q8_0, Q4_1, F16 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_1", "F16"))
IDS = [[(7 * i + i * i) % 96 for i in range(80)]]


def write(path: Path, family="Qwen2.5", *, quantize=None, fields=BYTES, factors=(), cut=(), **more):
    """Writes a family's random model as llama.cpp's converter lays it out, and returns that model.

    Args:
        quantize: the type of its matrices. fields: by full name. factors: (name, numbers) of tensors of RoPE's.
        cut: tensors to leave out. more: fields of the model's config.
    """
    theirs, config = build(family, **more), config_json(family)
    kind = config["model_type"].replace("mistral", "llama").replace("gemma3_text", "gemma3")
    made, writer = theirs.config.to_dict(), gguf.GGUFWriter(path, kind)
    made = {"num_key_value_heads": None, "head_dim": None, **made}
    values = {f"{kind}.{key}": made[name] for key, name in KEYS.items() if made[name] is not None}
    rope = made["rope_parameters"]
    values[f"{kind}.rope.freq_base"] = float(rope.get("full_attention", rope)["rope_theta"])
    for key, value in {**values, **fields}.items():
        add = {float: writer.add_float32, str: writer.add_string, bool: writer.add_bool, list: writer.add_array}
        add.get(type(value), writer.add_uint32)(key, value)
    names = gguf.get_tensor_name_map(next(one for one, its in gguf.MODEL_ARCH_NAMES.items() if its == kind), 2)
    for name, tensor in theirs.state_dict().items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings") or name in cut:
            continue
        if kind == "llama" and (".q_proj." in name or ".k_proj." in name):  # it has the two of a pair beside each other
            heads = tensor.shape[0] // theirs.model.layers[0].self_attn.head_dim
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if kind == "gemma3" and "norm" in name:
            tensor = tensor + 1
        kept, ours = tensor.contiguous().numpy(), names.get_name(name, (".weight", ".bias"))
        if quantize is not None and tensor.ndim == 2:
            writer.add_tensor(ours, gguf.quantize(kept, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(ours, kept)
    for name, numbers in factors:
        writer.add_tensor(name, torch.tensor(numbers).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return theirs


def logits(folder, ids=IDS):
    return make_engine(load_model(folder, dtype="float32"), retrieval=False).logits(ids)


WINDOWS = {"Gemma 3 270M": "gemma3", "Mistral 0.1": "llama"}  # of 40 tokens


@pytest.mark.parametrize("family", ["Llama 2", "Llama 3", "SmolLM2", "Mistral NeMo", "Qwen2.5", "Qwen2.5 0.5B", "Qwen3",
                                    "Phi-3-mini-4k", *WINDOWS])
def test_says_what_the_model_says(tmp_path, family):
    """Gemma stores its norms shifted, and names no layers: the sixth of six sees all keys."""
    more = {"layer_types": ["sliding_attention"] * 2} if "Gemma" in family else {}
    more |= {"sliding_window": 40} if "0.1" in family else {}
    windows = {f"{kind}.attention.sliding_window": 40 for name, kind in WINDOWS.items() if name == family}
    theirs = write(tmp_path / "m.gguf", family, fields={**BYTES, **windows}, **more)
    out = convert_gguf(tmp_path / "m.gguf", tmp_path / "out", "float32")
    torch.testing.assert_close(logits(out), theirs(torch.tensor(IDS)).logits, rtol=1e-4, atol=1e-4)


def test_gemma_is_wide_and_ends_a_turn(tmp_path):
    """float16 ends where its hidden states go on."""
    tokens = {"tokenizer.ggml.tokens": ["a", "b", "<end_of_turn>", "ab"]}
    write(tmp_path / "m.gguf", "Gemma 3 270M", layer_types=["sliding_attention"] * 2,
          fields={**BYTES, **tokens, "gemma3.attention.sliding_window": 40})
    file = GGUF(tmp_path / "m.gguf")
    assert file.dtype == torch.bfloat16 and 2 in file.eos_ids()
    write(tmp_path / "n.gguf", "Gemma 3 270M", layer_types=["sliding_attention"] * 2, fields={
        **BYTES, "gemma3.attention.sliding_window": 40, "gemma3.attention.sliding_window_pattern": 2,
        "gemma3.rope.freq_base_swa": 500.0})
    config = GGUF(tmp_path / "n.gguf").model
    assert config.sliding_layers == (0,) and config.sliding_theta == 500


@pytest.mark.parametrize("family, quantize", [("Llama 3", Q8_0), ("Qwen2.5", Q4_1), ("Qwen3", F16)])
def test_has_the_weights_that_transformers_reads(tmp_path, family, quantize):
    """Of 4, 8 and 16 bits: to the bit, in more files than one, and the same logits."""
    more = {"head_dim": 128} if family == "Qwen3" else {}  # transformers reads no other from such a file
    write(tmp_path / "m.gguf", family, quantize=quantize, intermediate_size=128, **more)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHARD", 2**16)
        out = convert_gguf(tmp_path / "m.gguf", tmp_path / "out", "float32")
    files = sorted(out.glob("model-*.safetensors"))
    ours = {name: tensor for path in files for name, tensor in open_tensors(path).items()}
    expected = theirs.state_dict()
    assert len(files) > 1 and ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)
    torch.testing.assert_close(logits(out), theirs(torch.tensor(IDS)).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family, scaling, kept", [
    ("LLaMA-2-7B-32K", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 8.0}, ()),
    ("LLaMA-2-7B-32K", {"llama.rope.scaling.factor": 8.0}, ()),  # llama.cpp's default
    ("YaRN, of Qwen2.5", {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0,
                          "qwen2.rope.scaling.original_context_length": 64,
                          "qwen2.rope.scaling.yarn_ext_factor": 1.0}, ()),
    ("YaRN, all fields", {f"llama.rope.scaling.{key}": value for key, value in (
        ("type", "yarn"), ("factor", 8.0), ("original_context_length", 32), ("yarn_beta_fast", 16.0),
        ("yarn_beta_slow", 2.0), ("attn_factor", 1.0))}, ()),
    ("Llama 3.1, its band", {}, ("rope_freqs.weight",)),
    *(("Phi-4-mini", {"phi3.rope.scaling.original_context_length": 32, "phi3.rope.dimension_count": 12, **more},
       ("rope_factors_long.weight", "rope_factors_short.weight"))
      for more in ({}, {"phi3.rope.scaling.type": "longrope", "phi3.rope.scaling.attn_factor": 1.75}))])
def test_scaled_rotations(tmp_path, family, scaling, kept):
    """A linear one, YaRN, Llama 3's, which llama.cpp stores as factors, and Phi's two lists of factors."""
    plain = build(family, rope_scaling=None) if "band" in family else None
    factors = [(name, (LONG if "long" in name else SHORT)[:6]) for name in kept]
    if plain is not None:
        factors = [(kept[0], (plain.model.rotary_emb.inv_freq / build(family).model.rotary_emb.inv_freq).tolist())]
        assert max(factors[0][1]) > 7 and any(1.1 < one < 7 for one in factors[0][1])
    # Of YaRN, llama.cpp multiplies the usual factor by `attn_factor`.
    usual = {**(config_json(family)["rope_scaling"] or {}), "attention_factor": None}
    more = {"rope_scaling": usual} if "all" in family else {}
    theirs = write(tmp_path / "m.gguf", family, fields={**BYTES, **scaling}, factors=factors, **more)
    found = GGUF(tmp_path / "m.gguf").model.rope_scaling
    assert family != "YaRN, all fields" or (found.beta_fast, found.beta_slow) == (16, 2)
    if scaling.get("phi3.rope.scaling.attn_factor"):
        assert found.attention_factor == 1.75
        return
    out = convert_gguf(tmp_path / "m.gguf", tmp_path / "out", "float32")
    torch.testing.assert_close(logits(out), theirs(torch.tensor(IDS)).logits, rtol=1e-4, atol=1e-4)


def token_fields(folder: Path) -> dict:
    """A tokenizer folder's tokens as llama.cpp stores them."""
    if (folder / "tokenizer.model").exists():
        vocab, _ = read_sentencepiece(folder / "tokenizer.model")
        kinds = [2 if piece == "<unk>" else 3 if piece in ("<s>", "</s>") else 6 if piece.startswith("<0x") else 1
                 for piece in vocab]
        return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [*vocab], "tokenizer.ggml.token_type": kinds,
                "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
                "tokenizer.ggml.unknown_token_id": 0}
    content = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = {token["id"]: token for token in content["added_tokens"]}
    names = {i: name for name, i in content["model"]["vocab"].items()} | {i: its["content"] for i, its in added.items()}
    tokens = [names.get(i, f"[PAD{i}]") for i in range(-(-len(names) // 32) * 32)]
    kinds = [(3 if added[i]["special"] else 4) if i in added else 1 if i in names else 5 for i in range(len(tokens))]
    merges = [one if isinstance(one, str) else " ".join(one) for one in content["model"]["merges"]]
    fields = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2" if content["normalizer"] else "llama-bpe",
              "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": merges,
              "tokenizer.ggml.eos_token_id": tokens.index(config["eos_token"])}
    if config.get("bos_token"):
        fields["tokenizer.ggml.bos_token_id"] = tokens.index(config["bos_token"])
    return fields | ({"tokenizer.chat_template": config["chat_template"]} if "chat_template" in config else {})


@pytest.mark.parametrize("name", ["sentencepiece, new", "Llama 3", "Qwen", "Phi-3's tokenizer.json"])
def test_the_tokenizer_is_the_folders(tmp_path, name):
    """200 strings, a conversation, the ids that end a text; words that fill up the vocabulary have no name."""
    made, family = make_folders(tmp_path), {"Qwen": "Qwen2.5", "Phi-3's tokenizer.json": "Phi-3-mini-4k"}
    folder = made[name]
    fields = token_fields(made["sentencepiece, legacy"] if name.startswith("Phi") else folder)
    tokens = fields["tokenizer.ggml.tokens"]
    if name.startswith("Phi"):
        fields["tokenizer.ggml.token_type"][2] = 4  # a token of its own
    write(tmp_path / "m.gguf", family.get(name, "Llama 3"), fields=fields, vocab_size=len(tokens))
    out = convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    ours, source = Tokenizer(out), Tokenizer(folder)
    assert len(STRINGS) == 200
    for text in STRINGS:
        assert ours.encode(text) == source.encode(text), repr(text)
        assert ours.decode(ours.encode(text)) == source.decode(source.encode(text)), repr(text)
    assert ours.same_as(source) is None and ours.vocab_size == source.vocab_size
    assert source.eos_id in eos_token_ids(out)
    if "tokenizer.chat_template" in fields:
        messages = [{"role": "user", "content": "Why?"}]
        assert ours.apply_chat_template(messages) == source.apply_chat_template(messages)


def test_merges_go_by_scores(tmp_path):
    """Of a sentencepiece vocabulary: pieces that were added at its end may come first."""
    folder = make_folders(tmp_path)["sentencepiece, new"]
    fields = token_fields(folder)
    tokens = fields["tokenizer.ggml.tokens"]
    backwards = {name: i for i, name in reversed([*enumerate(tokens)])}
    for scores, order in (([-float(i) for i in range(len(tokens))], dict(reversed(backwards.items()))),
                          ([float(i) for i in range(len(tokens))], backwards)):
        write(tmp_path / "m.gguf", "Llama 3", fields=fields | {"tokenizer.ggml.scores": scores}, vocab_size=len(tokens))
        found = json.loads(GGUF(tmp_path / "m.gguf").tokenizer()[0].to_str())["model"]["merges"]
        assert [tuple(one) for one in found] == merges_of(order)
    assert merges_of(backwards) != merges_of(dict(reversed(backwards.items())))


def test_the_command(tmp_path, capsys):
    fields = {**BYTES, "tokenizer.ggml.eom_token_id": 1}
    write(tmp_path / "a model.gguf", quantize=Q8_0, intermediate_size=128, fields=fields)
    assert main(["convert", "--gguf", str(tmp_path / "a model.gguf")]) == 0
    assert str(tmp_path / "a model") in capsys.readouterr().out
    tensors = open_tensors(tmp_path / "a model/model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert json.loads((tmp_path / "a model/generation_config.json").read_text()) == {"eos_token_id": [0, 1, 2]}
    assert load(tmp_path / "a model", draft=False, device="cpu").generate([1, 3, 1], 3, ignore_eos=True).tokens
    assert main(["convert", "--gguf", str(tmp_path / "a model.gguf")]) == 2
    assert "choose another --out-dir" in capsys.readouterr().err


@pytest.mark.parametrize("fields, says", [
    ({"general.architecture": "gemma2"}, "'gemma2' is not supported; supported are llama"),
    ({"split.count": 3}, "one of 3 parts; join them"),
    ({"qwen2.final_logit_softcapping": 30.0}, "qwen2.final_logit_softcapping 30.0 is not supported"),
    ({"qwen2.attention.scale": 1.0}, "qwen2.attention.scale 1.0 is not supported"),
    ({"qwen2.expert_count": 8}, "num_local_experts 8 is not supported"),
    ({"qwen2.attention.value_length": 8}, "keys have 16 dimensions and values 8"),
    ({"qwen2.rope.scaling.type": "other", "qwen2.rope.scaling.factor": 2.0}, "rope type 'other'"),
    ({"qwen2.rope.scaling.yarn_ext_factor": 0.0}, "qwen2.rope.scaling.yarn_ext_factor 0.0 is not supported"),
    ({"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 2.0, "qwen2.rope.scaling.attn_factor": 1.5},
     "rope.scaling.type 'yarn' and attn_factor 1.5 are not supported without tensors of factors"),
    ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert' is not supported"),
    ({"tokenizer.ggml.pre": "tekken"}, "'tekken', is not supported")])
def test_what_is_refused(tmp_path, capsys, fields, says):
    """In one line, before anything is written."""
    write(tmp_path / "m.gguf", fields={**BYTES, **fields})
    assert main(["convert", "--gguf", str(tmp_path / "m.gguf"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert says in said and len(said.splitlines()) == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.99])
def test_a_file_that_is_cut_off(tmp_path, share):
    write(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match="cut off, damaged, or no GGUF file"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_tensors_that_do_not_fit(tmp_path):
    write(tmp_path / "m.gguf", factors=[("blk.0.ffn_gate_exps.weight", [1.0])])
    with pytest.raises(UserError, match="tensor blk.0.ffn_gate_exps.weight, which has no place"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())
    fields = {**BYTES, "qwen2.rope.scaling.factor": 2.0}
    write(tmp_path / "m.gguf", fields=fields, factors=[("rope_freqs.weight", [1.0])])
    with pytest.raises(UserError, match="rope.scaling.type 'linear' .* not supported with tensors of factors"):
        GGUF(tmp_path / "m.gguf")
    write(tmp_path / "n.gguf", cut=["model.layers.1.mlp.down_proj.weight"])
    out = convert_gguf(tmp_path / "n.gguf", tmp_path / "next")
    with pytest.raises(UserError, match="1 of .* tensors are missing, as model.layers.1.mlp.down_proj.weight"):
        load(out, draft=False, device="cpu")


def test_another_checkpoints_folder_is_left_alone(tmp_path, monkeypatch):
    """The working directory, too."""
    write(tmp_path / "m.gguf")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, ".", ""):
        with pytest.raises(UserError, match="holds a checkpoint already"):
            convert_gguf(tmp_path / "m.gguf", folder, "float32")
    assert (tmp_path / "config.json").read_text() == "{}"


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(UserError, match="install it: pip install gguf"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
