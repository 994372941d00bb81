"""The drafter of docs/extending.md, run from the document.

A promise of the document, not of one module.
"""

import re
from pathlib import Path

import triforce
from triforce.decode.controller import Rate

DOCUMENT = Path(__file__).parent.parent / "docs" / "extending.md"


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
    assert engine.generate(names["text"], 32, temperature=0.0).tokens == on.tokens[:32]
    controller = states[-1]().pilot.controller
    assert "custom" in controller.costs.sources
    assert controller.rates["custom"].tests != Rate.WEIGHT  # observed, or forgotten
