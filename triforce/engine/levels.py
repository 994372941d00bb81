"""Which level proposed each token of a text.

    "draft"      the draft model proposed the token, and the levels above kept it
    "ngram"      the same of n-grams, and "custom" of a user's own drafter
    "retrieval"  the target proposed it over the view, and the full cache kept it
    "target"     no proposal was kept here: the full level drew the token itself, recovered or bonus
"""

from ..decode.plan import DraftPlan
from ..decode.tape import ACCEPTED, LEAF
from ..decode.verifier import RowRound


def levels_of(plan: DraftPlan, row: RowRound) -> list[str]:
    """The level that proposed each of the tokens that a round emitted for a row."""
    source = "draft" if plan.source == "model" else plan.source
    levels = []
    for i in range(len(row.tokens)):
        if i >= row.num_accepted + row.beside:
            levels.append("target")
        elif plan.retrieval and (i >= row.num_accepted or row.origins[i] not in (ACCEPTED, LEAF)):
            levels.append("retrieval")
        else:
            levels.append(source)
    return levels
