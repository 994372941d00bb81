"""A million tokens: positions, indexes, sums and bytes at that length, each alone.

No promise of one module. What a GPU's kernels do at that length is not seen here.
"""

import pytest
import torch
from conftest import VOCAB

from triforce import attention
from triforce.cpu import PackedPrefix
from triforce.decode.drafters.ngram import NgramDrafter
from triforce.decode.plan import DraftPlan
from triforce.decode.tape import Tape
from triforce.runtime.graphs import Compiler
from triforce.tree import TokenTree

MILLION = 2**20


@pytest.mark.slow
def test_attention_over_a_million_keys():
    """Against float64, with a key that outweighs all others near the end: by a kernel, with a mask, and packed."""
    generator = torch.Generator().manual_seed(0)
    q, (k, v) = torch.randn(1, 1, 4, 16, generator=generator), torch.randn(2, 1, 1, MILLION, 16, generator=generator)
    k[0, 0, MILLION - 3] = 12 * q[0, 0, 0]
    scores = (q.double() @ k.double().transpose(-1, -2)) * 0.25
    expected = scores.softmax(-1) @ v.double(), scores.logsumexp(-1)
    for found in (attention.dense(q, k, v), attention.masked(q, k, v, torch.zeros(1, 1, 4, MILLION)),
                  PackedPrefix(k[0], v[0]).dense(q)):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[0][0, 0, 0], v[0, 0, MILLION - 3], rtol=1e-2, atol=1e-2)


def test_a_look_up_finds_the_latest_match_of_a_million():
    tape = Tape.allocate(1, MILLION, VOCAB, "cpu")
    tape.tokens[0] = torch.randint(40, (MILLION,), generator=torch.Generator().manual_seed(3))
    end, newest = MILLION - 20, torch.tensor([50, 51, 52, 53])
    for place in (1000, MILLION - 500):
        tape.tokens[0, place : place + 4] = newest
    tape.tokens[0, end - 3 : end + 1] = newest
    drafter = NgramDrafter(tape, max_drafted=4, compiler=Compiler(tape.tokens.device))
    expected = tape.tokens[0, MILLION - 496 : MILLION - 492].tolist()
    assert drafter.propose(torch.tensor([end]), DraftPlan(4, "ngram"), None).tolist() == [4]
    assert tape.read(torch.tensor([end + 1]), TokenTree(4))[0].tolist() == expected
