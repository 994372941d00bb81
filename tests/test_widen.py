"""A widened model says what the small one says.

Of benchmarks/widen.py.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference import dense_logits

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from widen import PADDING_LOGIT, SHAPES, save, widen  # noqa: E402

import triforce  # noqa: E402
from triforce.hf.checkpoint import load_model  # noqa: E402
from triforce.hf.folders import TINY  # noqa: E402


@pytest.mark.parametrize("part,shape", [
    ("target", replace(SHAPES["llama-3.1-8b"], vocab_size=5000, dim=384, n_layer=9, n_head=16, n_kv_head=4,
                       ffn_dim=704)),
    ("draft", replace(SHAPES["llama-68m"], vocab_size=5000, dim=256, n_head=4, n_kv_head=4, ffn_dim=1024))])
def test_logits_agree(part, shape):
    small = load_model(TINY / "target" if part == "target" else TINY / "draft", "cpu", torch.float32)
    big = widen(small, shape, dtype=torch.float32)
    tokens = torch.randint(0, 4096, (2, 60), generator=torch.Generator().manual_seed(0))
    expected, found = dense_logits(small, tokens), dense_logits(big, tokens)
    torch.testing.assert_close(found[..., :4096], expected, rtol=1e-2, atol=2e-2)
    assert (found[..., 4096:] < PADDING_LOGIT).all()
    with pytest.raises(ValueError, match="does not fit"):
        widen(small, replace(shape, dim=32))


@pytest.mark.slow
def test_folders_of_a_widened_pair_are_loaded_and_say_what_the_small_pair_says(tmp_path):
    shape = replace(SHAPES["llama-2-7b"], vocab_size=4500, dim=384, n_layer=9, n_head=8, n_kv_head=8, ffn_dim=800)
    draft = replace(SHAPES["llama-68m"], dim=256, n_head=4, n_kv_head=4, ffn_dim=1024)
    target, drafts = (save(small, to, tmp_path / name, vocab_size=4500, dtype=torch.float16) for small, to, name in
                      ((TINY / "target", shape, "target"), (TINY / "draft", draft, "draft")))
    engine = triforce.load(target, draft=drafts, device="cpu", dtype="float32", gamma=6)
    assert engine.target.config.n_layer == 9 and engine.draft.config.dim == 256
    ids = [engine.encode_prompt("It was the best of times, it was the worst of times. " * 5)]
    expected = triforce.load("tiny", device="cpu").logits(ids)
    torch.testing.assert_close(engine.logits(ids)[..., :4096], expected, rtol=0, atol=0.05)  # what float16 rounds
    assert engine.generate(ids[0], 24, temperature=0.6, seed=0).stats.acceptance_rate["retrieval"] > 0.1
    with pytest.raises(triforce.UserError, match="not empty"):
        save(TINY / "target", shape, target)
