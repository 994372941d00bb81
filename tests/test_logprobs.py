"""Log-probabilities against a forward pass over the whole text, for tokens of every origin."""

import math

import pytest
from conftest import SIZES, make_engine, random_prompt, slow
from reference import reference_filter

LAWS = [{"temperature": 1.0, "top_p": 1.0}, {"temperature": 1.7, "top_p": 0.9}, {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.2, "min_p": 0.1}, {"temperature": 0.0}]


def assert_right(engine, prompt, out, law, k, tolerance=2e-4):
    """Each entry of a result equals what a pass of the model over prompt and answer gives."""
    assert len(out.logprobs) == len(out.tokens)
    logits = engine.logits([prompt + out.tokens])[0, len(prompt) - 1 : -1, : engine.vocab_size].double()
    for token, row, told in zip(out.tokens, logits, out.logprobs, strict=True):
        own = row.log_softmax(-1)
        assert told.model_logprob == pytest.approx(float(own[token]), abs=tolerance)
        assert [value for _, value in told.top] == pytest.approx(own.topk(k).values.tolist(), abs=tolerance)
        assert all(value == pytest.approx(float(own[one]), abs=tolerance) for one, value in told.top)
        assert len({one for one, _ in told.top}) == k
        if law["temperature"] == 0:
            assert told.logprob == 0
            continue
        probs = (row / law["temperature"]).softmax(-1).tolist()
        cut = reference_filter(probs, {"top_p": 1.0, "top_k": None, "min_p": None, **law})
        assert told.logprob == pytest.approx(math.log(cut[token]), abs=10 * tolerance)


@pytest.mark.parametrize("law", [*LAWS[1:4:2], *slow(*LAWS[::2])], ids=str)
def test_every_token_has_its_own(pair, law):
    """Accepted ones of the draft and of the view, recovered and bonus ones."""
    engine = make_engine(pair[0], pair[0], draft_window=16, **SIZES)  # a draft that is often right
    prompt = random_prompt(100)
    out = engine.generate(prompt, 60, seed=3, logprobs=3, **{"top_p": None, **law})
    assert {"draft", "retrieval", "target"} == set(out.levels)
    assert_right(engine, prompt, out, law, 3)
    plain = engine.generate(prompt, 60, seed=3, **{"top_p": None, **law})
    assert plain.logprobs is None and plain.tokens == out.tokens


def test_rows_of_a_batch_have_their_own(pair):
    engine = make_engine(*pair, **SIZES, max_batch_size=2)
    prompts = [random_prompt(40), random_prompt(70, seed=1), random_prompt(9, seed=2)]
    temperatures = [1.0, 0.5, 0.0]
    outs = engine.generate(prompts, 30, seed=5, logprobs=2, temperature=temperatures, top_p=1.0,
                           stop_token_ids=list(range(3)))
    for prompt, out, temperature in zip(prompts, outs, temperatures, strict=True):
        assert_right(engine, prompt, out, {"temperature": temperature}, 2)


def test_words_without_a_name_have_no_share(pair):
    """A model's vocabulary may be padded beyond the tokenizer's."""
    engine = make_engine(*pair, **SIZES)
    engine.buffers.vocab_size = 20
    out = engine.generate(random_prompt(40, vocab_size=20), 8, seed=0, temperature=1.0, top_p=1.0, logprobs=20)
    for told in out.logprobs:
        assert sum(math.exp(value) for _, value in told.top) == pytest.approx(1.0, abs=1e-5)
        assert {one for one, _ in told.top} == set(range(20))


def test_bias_counts_in_the_law_alone(pair):
    engine, prompt = make_engine(*pair, **SIZES), random_prompt(40)
    law = {"temperature": 1.0, "top_p": 1.0}
    out = engine.generate(prompt, 20, seed=0, logprobs=2, logit_bias={5: 60.0}, **law)
    assert out.tokens == [5] * 20 and all(told.logprob > -1e-6 > told.model_logprob for told in out.logprobs)
    logits = engine.logits([prompt + out.tokens])[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert [told.model_logprob for told in out.logprobs] == pytest.approx(logits[:, 5].tolist(), abs=2e-4)
