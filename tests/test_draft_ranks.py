"""A draft on some ranks, as each of two ranks knows it, in one process: what one broadcasts the other takes.

Of drafting/ranks.py.
"""

import pytest
import torch

from triforce.drafting.ranks import SharedDrafter
from triforce.plan import Plan
from triforce.tape import Tape

VOCAB = 5


class Drafts:
    """In place of a ModelDrafter: always tokens 1, 2, 3, 4, 1, ..., and a note of what it is told."""

    nbytes, weight_bytes, num_layers = 12, 34, 5

    def __init__(self, tape):
        self.tape, self.told = tape, []

    def propose(self, start, plan, probs):
        self.told.append(("propose", plan))
        for row, at in enumerate(start.tolist()):
            for i in range(plan.gamma):
                self.tape.tokens[row, at + 1 + i] = token = i % 4 + 1
                self.tape.runners_up[row, at + 1 + i] = torch.tensor([token + 10, i])
                probs[row, i] = torch.eye(VOCAB)[token]

    def __getattr__(self, name):
        return lambda *args: self.told.append((name, *args))


class Wire:
    """A group of two ranks that take turns: what rank 0 broadcasts lies here until rank 1 wants it."""

    def __init__(self):
        self.sent = []

    def of(self, rank):
        def broadcast(x, source):
            assert source == 0
            if rank == 0:
                self.sent.append(x.clone())
                return x
            return self.sent.pop(0)

        return type("Group", (), {"broadcast": staticmethod(broadcast)})()


@pytest.fixture
def ranks():
    """(drafter, tape) of each of the two; the first has the draft."""
    wire, made = Wire(), []
    for rank in range(2):
        tape = Tape.allocate(2, 20, VOCAB, "cpu", coupled=True, leaves=2)
        tape.tokens.fill_(4)
        made.append((SharedDrafter(Drafts(tape) if rank == 0 else None, tape, wire.of(rank), 0), tape))
    return made


@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_both_know_what_was_drafted(ranks, gamma):
    start, found, plan = torch.tensor([5, 9]), [], Plan(gamma, "model")
    for drafter, tape in ranks:
        probs = torch.full((2, 8, VOCAB), 0.2)
        assert drafter.propose(start, plan, probs).tolist() == [gamma] * 2
        found.append((tape.tokens, probs, tape.runners_up))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    drafted = [i % 4 + 1 for i in range(gamma)]
    for row, at in enumerate((5, 9)):
        assert found[1][0][row].tolist() == [4] * (at + 1) + drafted + [4] * (20 - at - 1 - gamma)
        assert found[1][1][row, :gamma].argmax(-1).tolist() == drafted
        assert found[1][2][row, at + 1 : at + 1 + gamma, 0].tolist() == [token + 10 for token in drafted]
        assert torch.equal(found[1][1][row, gamma:], torch.full((8 - gamma, VOCAB), 0.2))
    assert ranks[0][0].own.told == [("propose", plan)]


def test_the_draft_is_told_everything(ranks):
    (drafter, _), (other, _) = ranks
    length = torch.tensor([3, 4])
    for one in (drafter, other):  # the rank without it passes over all of that
        one.prefill(1, 100, False)
        one.rewind(0, 50)
        one.open([1000, 1000])
        one.catch_up([7, 8])
        one.leave_out()
        one.flush(1, 128)
        one.commit(length)
    assert drafter.own.told == [("prefill", 1, 100, False), ("rewind", 0, 50), ("open", [1000, 1000]),
                                ("catch_up", [7, 8]), ("leave_out",), ("flush", 1, 128), ("commit", length)]
    assert (drafter.nbytes, other.nbytes) == (12, 0) and (drafter.num_layers, other.num_layers) == (5, 0)
