"""The n-gram drafter against a loop, and what it does for text that repeats."""

import itertools
import random

import torch

from triforce.decode.drafters.ngram import NgramDrafter, NgramMeter
from triforce.decode.plan import DraftPlan
from triforce.decode.tape import Tape
from triforce.runtime.graphs import Compiler
from triforce.tree import TokenTree


def look_up(tokens: list[int], gamma: int, longest: int = 4) -> list[int]:
    """The longest match of the end of `tokens` further up, of those the latest; then what followed it."""
    for size in range(longest, 0, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                return tokens[end : end + gamma]
    return []


def test_proposals_equal_a_loop():
    rng = random.Random(0)
    for _ in range(200):
        rows = [[rng.randrange(3) for _ in range(rng.randrange(1, 30))] for _ in range(3)]
        tape = Tape(3, 40, 3, "cpu")
        for row, tokens in zip(tape.tokens, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
            row[len(tokens) :] = torch.randint(0, 3, (40 - len(tokens),))  # what an earlier proposal left
        drafter = NgramDrafter(tape, max_drafted=6, compiler=Compiler(tape.tokens.device))
        probs = torch.full((3, 7, 3), 0.5)
        start = torch.tensor([len(tokens) - 1 for tokens in rows])
        num_drafted = drafter.propose(start, DraftPlan(5, "ngram"), probs)
        drafted = tape.read(start + 1, TokenTree(6))
        assert torch.equal(probs[:, :6].argmax(-1), drafted) and (probs[:, :6].sum(-1) == 1).all()
        for row, tokens in enumerate(rows):
            count = int(num_drafted[row])
            assert drafted[row, :count].tolist() == look_up(tokens, 5)


def test_the_meter_knows_a_quote():
    """New text tells it to expect little, and the fifth word of a quotation much. What follows a right one is likelier
    right than that one was."""
    rng = random.Random(0)
    text = rng.sample(range(10**6), 5000)
    meter = NgramMeter(text)

    def chances() -> list[float]:
        """That the next one is right, and each further one if those before it are."""
        gained = [1.0, *(b - a for a, b in itertools.pairwise(meter.emitted(5)))]
        return [b / max(a, 1e-300) for a, b in itertools.pairwise(gained)]

    assert meter.emitted(5)[0] == 1 and chances()[0] < 0.1 and chances()[1] > 0.3 and chances()[4] > 0.7
    meter.update(text[100:101])  # nothing has been right yet
    assert chances()[0] < 0.1
    for token in text[101:110]:
        meter.update([token])
    assert chances()[0] > 0.75 and meter.emitted(5)[5] > 3.5
    meter.update(text[110:200])
    assert chances()[0] > 0.9
    meter.update([10**6])
    assert chances()[0] < 0.1
    assert NgramMeter([5]).emitted(1)[1] < 1.2


def test_the_meter_looks_up_as_the_drafter_does_and_soon_forgets_the_prompt():
    """A prompt that repeats nothing says little of an answer that quotes it, two words at a time."""
    text = random.Random(0).sample(range(10**6), 5000)
    meter = NgramMeter(text)
    for place in range(0, 1000, 100):  # the first word is found nowhere, the second after the first alone
        meter.update(text[place : place + 2])
    meter.update([10**6])
    assert meter.emitted(1)[1] > 1.3


def test_a_look_up_finds_the_latest_match_of_a_million():
    million = 2**20
    tape = Tape(1, million, 64, "cpu")
    tape.tokens[0] = torch.randint(40, (million,), generator=torch.Generator().manual_seed(3))
    end, newest = million - 20, torch.tensor([50, 51, 52, 53])
    for place in (1000, million - 500):
        tape.tokens[0, place : place + 4] = newest
    tape.tokens[0, end - 3 : end + 1] = newest
    drafter = NgramDrafter(tape, max_drafted=4, compiler=Compiler(tape.tokens.device))
    expected = tape.tokens[0, million - 496 : million - 492].tolist()
    assert drafter.propose(torch.tensor([end]), DraftPlan(4, "ngram"), None).tolist() == [4]
    assert tape.read(torch.tensor([end + 1]), TokenTree(4))[0].tolist() == expected
