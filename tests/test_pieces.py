"""A batch whose prefix streams past says what it says where all is resident, however its pieces are cut."""

import pytest
from conftest import make_state, random_prompt, run_rounds

PROMPTS = [random_prompt(310), random_prompt(205, seed=1), random_prompt(450, seed=2)]


@pytest.mark.parametrize("piece", [32, 112, 2048])
def test_rows_of_a_batch(pair, piece):
    """No row is so short that all of the pieces are masked; the last piece is a partial one; and once more, rewound."""
    expected = run_rounds(make_state(*pair, PROMPTS), 60)
    state = make_state(*pair, PROMPTS, num_resident_layers=1, piece_tokens=piece)
    assert run_rounds(state, 60) == expected
    state.rewind(512)
    assert run_rounds(state, 60) == expected


def test_short_rows_of_a_batch_are_taken_whole(pair):
    """Views that hold all of a prefix are loaded row by row, and draft what the full level says."""
    state = make_state(*pair, [prompt[:120] for prompt in PROMPTS], budget=512, num_resident_layers=0, piece_tokens=48,
                       sampling={"temperature": 0.8})
    for _ in range(2):
        run_rounds(state, 50)
        assert all(rates["full"] > 0.99 for rates in state.hierarchy.acceptance_rates())
        state.rewind(512)
