"""A draft's long memory: what it chooses by, and how much it computes anew.

Of decode/drafters/memory.py.
"""

import pytest
import torch
from conftest import VOCAB, make_state, random_prompt

from triforce.model import ModelConfig, Transformer


@pytest.mark.parametrize("length", [20, 250])
def test_a_used_window_drafts_as_a_fresh_one(pair, length):
    """Where the new prompt is shorter than what the window held; and where a draft of many layers would look back
    further than what is computed."""
    draft, laws = Transformer.random(ModelConfig(VOCAB, 16, 6, 2, 2, 8, 32), seed=1, std=0.3), []
    for used in (False, True):
        prompt = random_prompt(length)
        state = make_state(pair[0], draft, [random_prompt(300, seed=1) if used else prompt], retrieval=False, gamma=3,
                           sampling={"temperature": 0.8}, draft_window=32)
        if used:
            state.round()
            state.reset()
            state.prefill(0, prompt)
            state.begin(100)
        state.round()
        laws.append(state.hierarchy.outer.draft_probs[:, :3].tolist())
    assert laws[0] == laws[1]


def test_rows_are_taken_in_side_by_side(pair):
    """Those of the same stretches in one go; each then drafts as it does alone."""
    target, draft = pair
    prompts = [random_prompt(length, seed=length) for length in (300, 170, 20, 260)]

    def laws(prompts) -> list:
        batches = []
        hook = draft.register_forward_pre_hook(lambda _, args: batches.append(len(args[0])))
        state = make_state(target, draft, prompts, retrieval=False, gamma=3, sampling={"temperature": 0.8},
                           draft_window=32)
        hook.remove()
        state.round()
        return batches, state.hierarchy.outer.draft_probs[:, 0]  # what follows a drawn token depends on the row

    batches, together = laws(prompts)
    assert batches == [2, 2, 1, 1, 1]  # sink and window of two rows and of the last one; a text that fits the window
    alone = [laws([prompt])[1][0] for prompt in prompts]
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-6, rtol=1e-4)
