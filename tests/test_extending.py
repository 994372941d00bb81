"""The drafter of docs/extending.md, run from the document.

A promise of the document, not of one module.
"""

import re
from pathlib import Path

import pytest

import triforce
from triforce.controller import Rate
from triforce.drafting.protocol import Drafter

DOCUMENT = Path(__file__).parent.parent / "docs" / "extending.md"


@pytest.mark.slow
def test_a_drafter_that_never_proposes_is_given_up(states):
    """It costs next to nothing, and still another way to draft must get its chance."""

    class Silent(Drafter):
        emits_laws = False

        def __init__(self, tape):
            self.num_drafted = tape.buffer()

        def propose(self, start, plan, probs):
            return self.num_drafted

    engine = triforce.load("tiny", draft=Silent, retrieval=False, device="cpu")
    prompt = "one two three four five six seven eight nine ten. " * 8
    assert "a drafter of the user's" in repr(engine)
    out = engine.generate(prompt, 120, temperature=0.0, ignore_eos=True)
    assert out.tokens == engine.generate(prompt, 120, temperature=0.0, ignore_eos=True, speculate=False).tokens
    engine.generate(prompt, 120, temperature=0.0, ignore_eos=True)
    assert states[-1]().pilot.controller.rates["custom"].value < 0.3


def test_the_documents_drafter(capsys, states):
    """It drafts, some of it is kept, and the text is that of no speculation; with "auto" it is timed and observed."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S))
    names = {}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    on, off = names["on"], names["off"]
    assert on.tokens == off.tokens and len(on.tokens) == 96
    assert on.stats.acceptance_rate["retrieval"] > 0.05 and on.stats.target_forwards < 90
    assert "tokens per second" in capsys.readouterr().out
    engine = triforce.load("tiny", draft=names["PeriodDrafter"], device="cpu")
    assert engine.generate(names["text"], 64, temperature=0.0).tokens == on.tokens[:64]
    controller = states[-1]().pilot.controller
    assert "custom" in controller.costs.sources
    assert controller.rates["custom"].tests != Rate.WEIGHT  # observed, or forgotten
