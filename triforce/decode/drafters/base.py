"""What a drafter is. A new kind of drafter derives from `Drafter`; docs/extending.md has a small one.

By the rule of rejection, whether position i is drafted may depend on tokens before i and on the distribution at i,
never on token i itself: a drawn token that is dropped for a reason that looks at it would bias the output.

Only `prefill`, `open`, `rewind` and `catch_up` may wait for the device: the host calls them between rounds.
`propose` and `commit` are parts of a step, which a GPU records.

Shapes: B batch, M rows of the level that checks, V vocabulary.
"""

from torch import Tensor

from ..plan import DraftPlan


class Drafter:
    """Proposes tokens to a level that checks them. Only `propose` must be written; the rest does nothing.

    Calls come in this order: `prefill` for each row, `open`; then before each round either `catch_up` or `leave_out`;
    in the round `propose`, once for each round of the level that checks, and `commit`; `depart` between
    rounds; `rewind` instead of a prefill.
    """

    emits_probs = True  # its tokens are drawn from distributions that it writes down; False: they are deterministic
    # How many tokens it proposes follows from the plan and the tokens up to `start`. False where it depends on tokens
    # that it drafts, for instance if it stops at a full stop that it drew.
    settled_count = True
    nbytes = 0  # of its caches
    weight_bytes = 0  # of its model, which a proposal reads once a token
    num_layers = 0  # of its model

    def propose(self, start: Tensor, plan: DraftPlan, probs: Tensor | None) -> Tensor:
        """Drafts on the tape what follows its token at `start` [B]: at most plan.gamma tokens, or none.

        The tape has room for them. What it finds there, behind `start`, is left over from other rounds.

        Args:
            probs: [B, M, V], M > plan.gamma, written: row i the distribution that token i was drawn from, by
                `Tape.draw`. A drafter of deterministic tokens writes a one at each, where it finds zeros (the library's
                own find what they wrote before). None: nobody wants them, as with coupled sampling.

        Returns:
            how many were drafted, [B]: a buffer, valid until the next call. Rows may differ.
        """
        raise NotImplementedError

    def commit(self, length: Tensor) -> None:
        """The tokens before index `length` [B] are kept. What was drafted from there on is void: the level that checks
        has put one token there, two beside a leaf, and after a branch more, see `depart`.

        The level above may still reject some of them: a later call may name a smaller length, or the same one again. It
        comes after rounds in which this drafter was left out, too. Settled tokens are told by `catch_up`.
        """

    def prefill(self, row: int, length: int, fresh: bool = True) -> None:
        """The first `length` tokens of a row of the tape are settled. fresh: False: they begin with those of the call
        before, as in the next turn of a conversation. True: they do not, or there was no call."""

    def open(self, ends: list[int]) -> None:
        """All prompts are in: no row's prefix will outgrow its end."""

    def rewind(self, row: int, length: int) -> None:
        """Back to the first `length` tokens of a row, where `open` was called; `open` follows."""
        self.prefill(row, length)

    def catch_up(self, lengths: list[int]) -> None:
        """It drafts in the next round. lengths: of each row the `start` of its next `propose`. It may wait for the
        device."""

    def leave_out(self) -> None:
        """It does not draft in the next round."""

    def depart(self, row: int) -> None:
        """The text of a row left the tokens that were drafted in the last round for those of a branch. The tokens up to
        the last `commit` hold. Those between that and the next `catch_up` are still to be taken in."""
