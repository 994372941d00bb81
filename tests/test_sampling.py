"""Laws, draws and noise against their definitions, and however they are computed: with what no row needs left out,
compiled or not.
"""

from unittest import mock

import pytest
import torch
from conftest import refused
from reference import reference_filter

from triforce.config import Sampling
from triforce.decode import sampling
from triforce.decode.sampling import SamplingParams, Uses, probabilities, sample, uniform

USUAL = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "min_p": None}
INF = float("inf")


def test_a_seed_that_is_not_given_is_drawn_even_in_a_list():
    """And rows of a prompt count up from it."""
    draw = iter([40, 50]).__next__
    assert Sampling(seed=[None, 7, None]).rows(3, 2, draw).seed == [40, 41, 7, 8, 50, 51]
    assert Sampling().rows(2, draw=lambda: 60).seed == [60, 61] and Sampling(seed=[None]).rows(1).seed == [0]


def set_all(made, specialize=True, **values):
    made.set(**values)
    if not specialize:  # as compiled code
        made._needed = Uses()


def params(rows=1, specialize=True, **values) -> SamplingParams:
    made = SamplingParams(rows, "cpu")
    set_all(made, specialize, **{**USUAL, "seed": list(range(rows)), **values})
    return made


@pytest.mark.parametrize("values", [
    {}, {"temperature": 0.6, "top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.5, "top_k": 20, "min_p": 0.05},
    {"temperature": 2.0, "top_p": 0.99}, {"top_k": 300}, {"top_k": 1},
])
def test_filters_equal_their_definitions(values):
    torch.manual_seed(0)
    logits = torch.randn(1, 3, 400, dtype=torch.float64) * 3
    law = probabilities(logits, params(**values))
    full = {"top_p": 1.0, "top_k": None, "min_p": None, **values}
    for row, found in zip((logits / values.get("temperature", 1.0)).softmax(-1)[0], law[0], strict=True):
        torch.testing.assert_close(found, torch.tensor(reference_filter(row.tolist(), full), dtype=torch.float64))


def test_rows_have_their_own_settings():
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(0))
    together = probabilities(logits, params(3, temperature=[0.0, 0.7, 1.0], top_p=[0.5, 1.0, 0.8], top_k=[0, 3, 0]))
    alone = ({"temperature": 0.0, "top_p": 0.5}, {"temperature": 0.7, "top_k": 3}, {"top_p": 0.8})
    for row, values in enumerate(alone):
        torch.testing.assert_close(together[row], probabilities(logits[row, None], params(**values))[0])
    assert (together[0].max(-1).values == 1).all() and torch.equal(together[0].argmax(-1), logits[0].argmax(-1))


@pytest.mark.parametrize("values", [
    {}, {"temperature": 0.0}, {"temperature": [0.0, 0.7, 0.0]}, {"top_p": 0.7}, {"top_k": 4}, {"min_p": 0.2},
    {"temperature": 0.5, "min_p": [None, 0.1, None]}, {"top_p": [1.0, 0.6, 1.0]}, {"top_k": [None, None, 3]},
    {"temperature": [0.0, 0.8, 1.2], "top_p": 0.9, "top_k": [5, None, 7], "min_p": 0.05},
])
@pytest.mark.parametrize("before", [{}, {"temperature": 0.6, "top_p": 0.5, "top_k": 2, "min_p": 0.3}])
def test_skipping_what_no_row_needs_changes_no_law(values, before):
    """An engine that is not compiled leaves out the filters that are off: each that is on for some row is applied, also
    after a call that had others on."""
    logits = torch.randn(3, 2, 60, generator=torch.Generator().manual_seed(0)) * 2
    special = params(3, specialize=True, **before)
    set_all(special, **{**USUAL, "seed": [0, 1, 2], **values})
    law, expected = probabilities(logits, special), probabilities(logits, params(3, specialize=False, **values))
    assert torch.equal(law > 0, expected > 0)
    torch.testing.assert_close(law, expected)
    with mock.patch.object(torch.compiler, "_is_compiling_flag", True):  # what is compiled serves all calls
        assert special.uses == Uses()


@pytest.mark.parametrize("specialize", [False, True])
@pytest.mark.parametrize("values", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 9}])
def test_a_bias_is_added_to_the_logits(values, specialize):
    """Row by row, and nothing of it is left for the next call."""
    logits = 2 * torch.randn(3, 2, 60, generator=torch.Generator().manual_seed(0))
    usual = {**USUAL, "seed": [0, 1, 2], **values}
    biases = [{3: 4.0, 59: -INF}, None, {0: -2.5}]
    shifted = logits.clone()
    for row, bias in enumerate(biases):
        for token, value in (bias or {}).items():
            shifted[row, :, token] += value
    made = SamplingParams(3, "cpu", 60)
    for bias, expected in ((None, logits), (biases, shifted), (None, logits), ({5: 1.0}, None), (biases, shifted)):
        set_all(made, specialize, logit_bias=bias, **usual)
        if expected is not None:
            found, wanted = probabilities(logits, made), probabilities(expected, params(3, **values))
            assert torch.equal(found > 0, wanted > 0)
            torch.testing.assert_close(found, wanted)
    assert made.uses.logit_bias
    set_all(made, specialize, **usual)
    assert made.uses.logit_bias is not specialize  # who needs none pays nothing


def test_the_short_ranking_decides_as_the_whole_one():
    """On a CPU only the most probable tokens are ranked where they decide."""
    torch.manual_seed(1)
    for scale in (0.1, 1.0, 5.0):
        logits = torch.randn(1, 4, 1000) * scale
        for values in ({"top_p": 0.9}, {"top_p": 0.9, "top_k": 100}, {"top_k": 500}, {"top_p": 1.0, "top_k": 40}):
            quick = probabilities(logits, params(**values))
            slow = probabilities(logits.double(), params(**values))
            assert ((quick > 0) != (slow > 0)).sum() <= 4  # of 4,000; borders may round to the other side
            torch.testing.assert_close(quick.double().sum(-1), torch.ones(1, 4, dtype=torch.float64))


def test_a_row_is_filtered_as_alone():
    """Beside a row of which more tokens must be ranked: to the bit, also at the border of what is kept."""
    generator, kept = torch.Generator().manual_seed(0), set()
    for _ in range(60):
        logits = torch.randn(2, 1, 6000, generator=generator) * torch.tensor([6.0, 0.1])[:, None, None]
        ranked = logits[0, 0].softmax(-1).sort(descending=True).values[:60]
        border = float(ranked[:9].cumsum(0)[-1] / ranked.cumsum(0)[-1])  # the tenth token is kept, or just not
        for top_p in (border, 0.9):
            alone = probabilities(logits[:1], params(top_p=top_p, top_k=60))
            beside = probabilities(logits, params(2, top_p=[top_p, 0.9], top_k=[60, 0]))
            assert torch.equal(beside[:1], alone) and (beside[1] > 0).sum() > 4096
            kept.add(int((alone > 0).sum()))
    assert {9, 10} <= kept


def test_sample_inverts_the_cumulative_distribution():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    u = torch.tensor([0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 1 - 2.0**-52], dtype=torch.float64)
    assert sample(probs.expand(7, -1), u).tolist() == [1, 1, 3, 3, 3, 4, 4]
    assert sample(3 * probs.expand(7, -1), u).tolist() == [1, 1, 3, 3, 3, 4, 4]  # any positive sum


@pytest.mark.parametrize("words", [1024, 1025, 6000])
def test_a_draw_in_two_steps_is_the_same(words):
    """Of laws with few words as of those with many, whatever their sum; and no word without a chance is drawn."""
    generator = torch.Generator().manual_seed(0)
    laws = (4 * torch.randn(3, 5, words, generator=generator)).softmax(-1)
    laws[1] = torch.where(laws[1] >= laws[1].topk(3).values[..., -1:], laws[1], 0.0)
    laws[2, :, 40:] = 0.0  # the last stretches are empty
    for u in (torch.rand(3, 5, dtype=torch.float64, generator=generator), torch.zeros(3, 5, dtype=torch.float64),
              torch.full((3, 5), 1 - 2.0**-52, dtype=torch.float64)):
        for law in (laws, 3 * laws):
            assert torch.equal(sampling._in_two_steps(law, u), sample(law, u))
        assert (laws.gather(2, sample(laws, u)[..., None]) > 0).all()
    border = laws[..., :700].double().sum(-1) / laws.double().sum(-1)  # the end of what may lie within a stretch
    found = sampling._in_two_steps(laws, border.clamp(max=1 - 2.0**-52))
    assert (laws.gather(2, found[..., None]) > 0).all()


def test_noise_is_uniform_and_independent_across_keys():
    seeds, positions = torch.arange(200), torch.arange(500).expand(200, -1)
    u = uniform(seeds, positions, 1, sampling.SAMPLE)
    assert 0 <= u.min() and u.max() < 1
    assert abs(u.mean() - 0.5) < 4 / (12 * u.numel()) ** 0.5
    assert (torch.histc(u.float(), 100) - 1000).abs().max() < 6 * 1000**0.5
    z = (u - 0.5) * 12**0.5
    others = [z[:, 1:] * z[:, :-1], z[1:] * z[:-1]]
    for level, purpose in ((1, sampling.ACCEPT), (2, sampling.SAMPLE), (0, sampling.SAMPLE)):
        others.append(z * (uniform(seeds, positions, level, purpose) - 0.5) * 12**0.5)
    for product in others:
        assert abs(product.mean()) < 5 / product.numel() ** 0.5


def test_out_of_range_values_are_refused():
    for name, value in (("temperature", -1), ("top_p", 0), ("top_p", 1.1), ("top_k", -3), ("top_k", 1.5), ("min_p", 1)):
        refused(f"{name} .{value}", params, **{name: value})
    for bias, text in (([5], r"logit_bias \(5\) must be a dict"), ({"a": 1.0}, "id 'a', and ids are whole numbers"),
                       ({5: INF}, r"token 5 \(inf\)"), ({5: float("nan")}, r"token 5 \(nan\)"), ({5: "1"}, "'1'"),
                       ({5: 2e30}, r"from -1e\+30 to 1e\+30, or -inf"), ({True: 1.0}, "id True"), ({5: True}, "True"),
                       ({1: 2.0}, "token id 1 is outside the vocabulary of 1"), ({0: -INF}, "forbids all 1")):
        refused(text, params, logit_bias=bias)
    refused("2 values for 3 prompts", params, 3, temperature=[1.0, 0.5])


def test_compiled_steps_draw_the_same_numbers(monkeypatch):
    """NumPy's and PyTorch's arithmetic, to the last bit."""
    seeds, positions = torch.tensor([0, 7, -(2**62)]), torch.arange(3000).view(3, 1000)
    numbers = uniform(seeds, positions, 2, sampling.ACCEPT)
    monkeypatch.setattr(sampling, "is_compiling", lambda: True)
    assert torch.equal(uniform(seeds, positions, 2, sampling.ACCEPT), numbers)
