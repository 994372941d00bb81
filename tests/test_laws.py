"""Laws and noise do not depend on how they are computed: with what no row needs left out, compiled or not."""

import pytest
import torch

from triforce import sampling
from triforce.sampling import SamplingParams, probabilities, uniform


def law_of(specialize: bool, rows: int = 1, **values):
    params = SamplingParams(rows, "cpu")
    params.set(specialize=specialize, **{"temperature": 1.0, "top_p": 1.0, "top_k": None, "min_p": None, **values})
    logits = 2 * torch.randn(rows, 3, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return probabilities(logits, params)


@pytest.mark.parametrize("values, kept", [
    ({"top_p": 0.7}, 0.7), ({"top_k": 7}, 7), ({"min_p": 0.2}, None), ({"temperature": 0.0}, 1),
    ({"top_p": 0.7, "min_p": 0.2, "top_k": 7, "temperature": 0.6}, None)])
def test_what_no_row_needs_is_left_out_and_nothing_else(values, kept):
    law = law_of(True, **values)
    assert torch.equal(law, law_of(False, **values))
    count = (law > 0).sum(-1)
    assert (count < 300).all() and (not isinstance(kept, int) or (count == kept).all())
    assert (law_of(True) > 0).all()


def test_rows_of_a_batch_keep_their_settings_where_others_need_none():
    values = {"temperature": [0.0, 1.0, 0.7], "top_p": [1.0, 0.6, 1.0], "top_k": [0, 0, 5], "min_p": [0.0, 0.0, 0.1]}
    law = law_of(True, rows=3, **values)
    assert torch.equal(law, law_of(False, rows=3, **values)) and torch.isfinite(law).all()
    assert ((law[0] > 0).sum(-1) == 1).all() and ((law[2] > 0).sum(-1) <= 5).all()


def test_none_keeps_every_token():
    assert torch.equal(law_of(False, top_p=None), law_of(False)) and (law_of(True, top_p=None) > 0).all()


def test_no_two_purposes_share_their_numbers():
    seed, positions = torch.tensor([3]), torch.arange(200)[None]
    drawn = [uniform(seed, positions, level, purpose) for level in range(3) for purpose in range(2)]
    for i, one in enumerate(drawn):
        assert not any((one == other).any() for other in drawn[:i])


def test_compiled_steps_draw_the_same_numbers(monkeypatch):
    """NumPy's and PyTorch's arithmetic, to the last bit."""
    seeds, positions = torch.tensor([0, 7, -(2**62)]), torch.arange(3000).view(3, 1000)
    numbers = uniform(seeds, positions, 2, sampling.ACCEPT)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(uniform(seeds, positions, 2, sampling.ACCEPT), numbers)
