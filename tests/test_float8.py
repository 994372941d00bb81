"""Weights in fp8: every layout against the reference dequantisation, and all that is promised of a model, of these."""

from dataclasses import replace

import families
import pytest
import torch
from conftest import VOCAB, bits, make_state, random_prompt, refused, run_rounds, slow
from families import build, config_json, edit, storing
from float8_folders import BLOCKS, COMPRESSED, GROUP, LAYOUTS, compressed, save
from reference import dense_logits
from safetensors.torch import load_file
from widen import shard

import triforce
from triforce import fp8
from triforce.cpu import Linear
from triforce.decode.plan import AUTOREGRESSION
from triforce.engine import memory
from triforce.fp8 import FP8, ScaledLinear, copy_bytes, fp8_copy
from triforce.hf.checkpoint import load_model, read_config
from triforce.hf.convert import convert
from triforce.hf.fingerprint import weights_fingerprint
from triforce.model import ModelConfig, Transformer
from triforce.parallel import Group

LARGE = {"hidden_size": 320, "intermediate_size": 448, "head_dim": 80}  # blocks of 128 end in the midst of all of these
TOKENS = torch.randint(0, 96, (2, 60), generator=torch.Generator().manual_seed(1))
FOLDERS = [("Llama 3", "blocks"), ("Llama 3", "small blocks"), ("Llama 3", "tensor"), ("Llama 3", "output"),
           ("Llama 3", "some layers"), ("Llama 3.2", "compressed tensor"), ("Qwen3, biases", "compressed channel"),
           ("Qwen3", "compressed block"), ("Phi-4-mini", "small blocks"), ("Phi-4-mini", "compressed tensor"),
           ("GLM-4-9B", "compressed channel"), ("GLM-4-9B", "small blocks")]


def made(family: str, layout: str, folder):
    """(the folder in fp8, one of what it stands for, transformers' model of that)."""
    sizes = LARGE if layout == "blocks" else {}
    theirs, config = build(family, **sizes), {**config_json(family), **sizes}
    state = {name: tensor for name, tensor in theirs.state_dict().items()
             if not (config.get("tie_word_embeddings") and name == "lm_head.weight")}
    meant = save(state, config, layout, folder / "fp8")
    theirs.load_state_dict(meant, strict=False)
    families.save(theirs, config, folder / "wide")
    return folder / "fp8", folder / "wide", theirs


def weights(model) -> dict:
    """Every weight, widened."""
    found = {name: x for name, x in model.named_parameters() if x.dtype != FP8 and not name.endswith(".scale")}
    for name, module in model.named_modules():
        if isinstance(module, ScaledLinear):
            found[f"{name}.weight"] = module.widened(model.dtype)
    return found


@pytest.mark.parametrize("family, layout", FOLDERS)
def test_weights_and_logits_are_those_of_the_reference(family, layout, tmp_path):
    folder, wide, theirs = made(family, layout, tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        ours, expected = load_model(folder, dtype=dtype), load_model(wide, dtype=dtype)
        found, widened = weights(ours), load_model(folder, dtype=dtype, weights="wide")
        assert found.keys() == dict(expected.named_parameters()).keys() == dict(widened.named_parameters()).keys()
        for name, weight in expected.named_parameters():
            assert torch.equal(found[name], weight) and torch.equal(widened.get_parameter(name), weight), name
        assert widened.config == replace(expected.config, dtype=widened.config.dtype)
        planned = memory.weight_parts(read_config(folder, weights="wide"), None, dtype)[0].bytes
        assert planned == sum(x.nbytes for x in widened.parameters())
        assert torch.equal(dense_logits(ours, TOKENS), dense_logits(expected, TOKENS))
    assert sum(isinstance(x, Linear) for x in ours.modules()) == {"output": 0, "some layers": 5}.get(layout, 1)
    with torch.no_grad():
        ours = load_model(folder, dtype=torch.float32)
        torch.testing.assert_close(dense_logits(ours, TOKENS), theirs(TOKENS).logits, atol=1e-4, rtol=0)
    held = sum(x.nbytes for x in ours.parameters())
    assert memory.weight_parts(read_config(folder), None, torch.float32)[0].bytes == held


@pytest.fixture
def blocks(tmp_path):
    return made("Llama 3", "blocks", tmp_path)[0]


@pytest.mark.parametrize("family", ["Llama 3", "Phi-4-mini", "GLM-4-9B"])
def test_any_checkpoint_is_rounded_as_it_is_read(family, tmp_path):
    """To what a checkpoint with a scale a channel would have, whatever dtype the rest is in."""
    theirs = build(family)
    wide = families.save(theirs, config_json(family), tmp_path / "wide")
    state = theirs.state_dict()
    state = {name: state[name] for name in load_file(wide / "model.safetensors")}
    LAYOUTS["float32 channel"] = (compressed("channel"), (1, 0), "_scale", torch.float32)
    save(state, config_json(family), "float32 channel", tmp_path / "fp8")
    del LAYOUTS["float32 channel"]
    for dtype in (torch.float32, torch.float16):
        ours, expected = load_model(wide, dtype=dtype, weights="fp8"), load_model(tmp_path / "fp8", dtype=dtype)
        for (name, weight), other in zip(ours.named_parameters(), expected.parameters(), strict=True):
            assert weight.dtype == other.dtype and torch.equal(weight.float(), other.float()), name
    assert load_model(tmp_path / "fp8", weights="fp8").config == expected.config  # what is in fp8 stays as it is


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_number_of_e4m3_is_widened_exactly(dtype):
    layer = ScaledLinear(254, 3, False, 254).requires_grad_(False)
    numbers = torch.tensor([bits for bits in range(256) if bits % 128 != 127], dtype=torch.uint8).view(FP8)
    layer.weight.copy_(numbers.expand(3, 254))
    layer.scale.copy_(torch.tensor([[1.0], [0.0123], [3e-7]]))
    expected = numbers.double().expand(3, 254).to(dtype).float() * layer.scale
    if dtype == torch.float64:
        expected = numbers.double() * layer.scale.double()
    assert torch.equal(layer.widened(dtype), expected.to(dtype)) and len(numbers.float().unique()) == 253


def test_loaded_with_the_embedded_pair(monkeypatch):
    engine = triforce.load("tiny", device="cpu", weights="fp8", gamma=4)
    assert engine.draft.config.float8 is None and "float32 with weights in fp8 on cpu" in repr(engine)
    on = engine.generate("It was the best of times, it was the worst of times, " * 8, 24, temperature=0.0)
    assert on.stats.acceptance_rate["full"] > 0.3
    monkeypatch.setattr(memory, "available", lambda device: 2**20)
    refused(r"target weights 0.01 GiB \(--dtype\)", triforce.load, "tiny", device="cpu", weights="fp8")


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("layout", [*slow("blocks"), "compressed channel"])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_bits_with_and_without_speculation(layout, rule, in_fp8, tmp_path, monkeypatch, watched):
    """Greedy output, and drawn output where levels share their noise, of widened weights and of products in fp8."""
    monkeypatch.setattr(fp8, "multiplies", lambda device: in_fp8)
    target = load_model(made("Llama 3", layout, tmp_path)[0], dtype=torch.float32)
    multiplied = watched(ScaledLinear, "multiplied", lambda layer, x: layer)
    law = {"temperature": 0.0 if rule == "rejection" else 1.0}
    runs = []
    for retrieval in (True, False):
        state = make_state(target, None, [random_prompt(100, vocab_size=96)], vocab_size=96, retrieval=retrieval,
                           gamma=5, rule=rule, sampling=law, capacity=256, max_new_tokens=64)
        runs.append(bits(state, 24, plan=None if retrieval else AUTOREGRESSION))
    assert runs[0][:2] == runs[1][:2]
    assert runs[0][2]["full"] >= 3
    assert bool(multiplied) == (in_fp8 and layout != "blocks")


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("together", [256, 128])
def test_a_row_knows_nothing_of_its_neighbours(together, in_fp8, monkeypatch):
    """Its bits are the same wherever it stands in a block, and whatever stands beside it."""
    monkeypatch.setattr(fp8, "multiplies", lambda device: in_fp8)
    for dtype in (torch.float32, torch.bfloat16):
        layer = random_layer(256, 704, together, dtype)
        for rows in (4, 8, 16, 36):
            x = torch.randn(1, 1, 256).to(dtype).expand(1, rows, 256).contiguous()
            y = layer(x)
            assert torch.equal(y, y[:, :1].expand_as(y))
            x[:, 1:] *= 1000
            assert torch.equal(layer(x)[:, 0], y[:, 0])


def random_layer(columns, rows, together, dtype):
    """With scales that differ by two orders of magnitude."""
    layer = ScaledLinear(columns, rows, True, together).requires_grad_(False)
    layer.weight.copy_((100 * torch.randn(rows, columns)).clamp(-448, 448))
    layer.scale.copy_(torch.logspace(-4, -2, layer.scale.numel()).view(layer.scale.shape))
    layer.bias.data = torch.randn(rows).to(dtype)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_in_fp8(dtype, monkeypatch):
    """Each output channel by its own scale, near what the widened weight gives; by parts as in one go."""
    torch.manual_seed(0)
    layer, x = random_layer(64, 96, 64, dtype), torch.randn(2, 7, 64).to(dtype)
    x[0, 3] *= 100
    expected = (layer(x) - layer.bias).float()
    monkeypatch.setattr(fp8, "multiplies", lambda device: True)
    found = layer(x)
    assert found.shape == (2, 7, 96) and found.dtype == dtype
    size = expected.norm(dim=-1, keepdim=True)
    apart, like = (((found - layer.bias).float() - expected) / size).flatten(0, 1), (expected / size).flatten(0, 1)
    assert 0.01 < apart.norm(dim=1).max() < 0.06  # of each position
    assert (apart.norm(dim=0) / like.norm(dim=0)).max() < 0.12  # of each channel
    monkeypatch.setattr(fp8, "STEP", 4)
    assert torch.equal(layer(x), found)
    for odd in (random_layer(64, 96, 32, dtype), random_layer(72, 96, 72, dtype),
                random_layer(64, 40, 64, dtype)):
        assert not odd.fits_products  # they are widened
        odd(torch.randn(1, 2, odd.weight.shape[1]).to(dtype))


@pytest.mark.parametrize("family, layout", [("Llama 3", "blocks"), ("Qwen3", "compressed block"), ("Llama 3", "output"),
                                            ("Phi-4-mini", "small blocks"), ("Llama 3", "some layers")])
def test_a_rank_s_share(family, layout, tmp_path):
    """Read from the checkpoint and cut out of a whole model: the same, and the widened share of the widened whole; also
    where a rank's share ends in the midst of a block."""
    folder, wide, _ = made(family, layout, tmp_path)
    whole, plain = load_model(folder, dtype="float32"), load_model(wide, dtype="float32")
    for rank in range(2):
        group = Group(rank, 2, "")
        read, cut_out = load_model(folder, dtype="float32", group=group), shard(whole, group)
        for (name, found), expected in zip(read.named_parameters(), cut_out.parameters(), strict=True):
            assert torch.equal(found.float(), expected.float()), name
        found, expected = weights(read), dict(shard(plain, group).named_parameters())
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    before = weights_fingerprint(whole)
    whole.layers[0].mlp.down.scale.mul_(2) if layout != "some layers" else whole.layers[1].mlp.down.scale.mul_(2)
    assert weights_fingerprint(whole) != before


DOWN = "model.layers.1.mlp.down_proj.weight"
OTHERS = [  # (quantization_config, what is said of it)
    ({"bits": 4}, "quant_method None"), ({"quant_method": "hqq", "bits": 4}, "quant_method 'hqq'"),
    ({**BLOCKS, "fmt": "e5m2"}, "fmt 'e5m2'"),
    *(({**COMPRESSED, **more}, words) for more, words in (
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme {'num_bits': 8}"),
        ({"format": "int-quantized"}, "format 'int-quantized'"),
        ({"transform_config": {"a": 1}}, "transform_config {'a': 1}"), ({"ignore": [3]}, r"ignore is \[3\]"),
        ({"config_groups": {"a": GROUP, "b": GROUP}}, r"config_groups \['a', 'b'\]"),
        ({"ignore": ["model.layers.1.self_attn.k_proj"]},
         "leaves model.layers.1.self_attn.k_proj as it is, but not all of self_attn.q_proj, "))),
    (compressed("group"), "strategy 'group'"), (compressed("channel", num_bits=4), "num_bits 4"),
    ({**COMPRESSED, "config_groups": {"group_0": {**GROUP, "output_activations": {"num_bits": 8}}}},
     "output_activations {'num_bits': 8}"),
    *(({**BLOCKS, "weight_block_size": wrong}, "weight_block_size")
      for wrong in (128, [128.5, 128.0], {"a": 1, "b": 2}, [128], [0, 128], [True, True])),
    ({**BLOCKS, "modules_to_not_convert": ["re:["]}, "quantization_config has a field of the wrong kind")]


@pytest.mark.parametrize("fault, words", [
    (storing(DOWN + "_scale_inv", None), "1 of 35 tensors are missing.*layers.1.mlp.down_proj.scale"),
    (storing(DOWN + "_scale_inv", torch.ones(4, 3)), r"down_proj.scale is torch.float32 of shape \(4, 3\), but"),
    (storing(DOWN + "_scale_inv", torch.ones(11)), r"of shape \(11,\)"),
    (storing(DOWN + "_scale_inv", torch.full((3, 4), 120, dtype=torch.uint8)), "scale is torch.uint8"),
    (storing(DOWN + "_scale", torch.ones(3, 4)), "layers.1.mlp.down_proj.scale is there twice"),
    *((storing(DOWN, torch.full((320, 448), byte, dtype=torch.uint8).view(FP8)), f"{DOWN} holds nan")
      for byte in (0x7F, 0xFF)),
    *((storing(DOWN + "_scale_inv", torch.full((3, 4), bad)), "holds scales that are negative or not finite")
      for bad in (-1.0, float("nan"), float("inf"))),
    (storing(DOWN, torch.zeros(320, 448)), f"{DOWN} is torch.float32 .* implies fp8 of shape"),
    (storing(DOWN, torch.zeros(320, 448).to(torch.float8_e5m2)), f"{DOWN} is torch.float8_e5m2 .* implies fp8"),
    (storing("lm_head.weight", torch.zeros(96, 320).to(FP8)), "lm_head.weight is torch.float8_e4m3fn .* implies wider"),
    (lambda folder: edit(folder, quantization_config={}), "down_proj.weight is torch.float8_e4m3fn .* implies wider"),
    *((lambda folder, config=config: edit(folder, quantization_config=config), f"config.json.* {words}")
      for config, words in OTHERS),
])
def test_checkpoints_that_do_not_fit(blocks, fault, words):
    fault(blocks)
    refused(words, load_model, blocks)


def test_what_does_not_go_with_fp8(blocks, tmp_path):
    refused("must be 'fp8' or 'wide'", triforce.load, "tiny", device="cpu", weights="int8")
    for options, words in (({"weights": "fp8"}, "'fp8' copies wider weights, and this target's are fp8 already"),
                           ({}, "'fp8' needs a CUDA GPU"), ({"retrieval": False}, "retrieval=False leaves out"),
                           ({"draft_dtype": "int4"}, "must be 'fp8'")):
        refused(words, triforce.load, "tiny", device="cpu", **{"draft_dtype": "fp8", **options})
    refused("is quantized, and no dtype can be given", convert, blocks, tmp_path / "out", "bfloat16")
    out = convert(blocks, tmp_path / "out")
    for found, expected in zip(load_model(out).parameters(), load_model(blocks).parameters(), strict=True):
        assert torch.equal(found.float(), expected.float())


def test_a_copy_has_weights_of_its_own_and_shares_the_rest():
    config = ModelConfig(64, 32, 2, 4, 2, 16, 48, qkv_bias=True, qk_norm=True, post_norm=True)
    target = Transformer.random(config, std=0.3)
    copy, shared = fp8_copy(target), {id(x) for x in target.parameters()}
    own = {name: x for name, x in copy.named_parameters() if id(x) not in shared}
    assert {x.dtype for name, x in own.items() if not name.endswith(".scale")} == {FP8}
    assert copy_bytes(config) == sum(x.nbytes for x in own.values() if x.dtype == FP8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_drafted_in_fp8_is_accepted(dtype):
    """Also with a layer that adds nothing, as models have that were made deeper: its matrices are zeros."""
    config = ModelConfig(VOCAB, 64, 3, 4, 2, 16, 128, max_position_embeddings=4096)
    target = Transformer.random(config, std=0.1, dtype=dtype)
    for linear in (target.layers[1].attention.out, target.layers[1].mlp.down):
        linear.weight.zero_()
    copy = fp8_copy(target)
    assert all(x.float().isfinite().all() for x in copy.parameters())
    rates = []
    for drafting in (None, copy):
        state = make_state(target, None, [random_prompt(200)], budget=512, drafting=drafting, gamma=4,
                           sampling={"temperature": 0.8})
        run_rounds(state, 80)
        rates.append(state.hierarchy.acceptance_rates()[0]["full"])
    assert rates[0] > 0.95 and rates[1] > 0.85
