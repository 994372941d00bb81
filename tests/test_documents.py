"""Code that documents show: the drafter of docs/extending.md and the notebook of `examples` run."""

import json
import re
import sys
from unittest import mock

import pytest
from conftest import ROOT

import triforce
from triforce.decode.controller import Rate


def test_the_documents_drafter(capsys, states):
    """It drafts, some of it is kept, and the text is that of no speculation; with "auto" it is timed and observed."""
    document = ROOT / "docs" / "extending.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", document.read_text(), re.S))
    names = {}
    exec(compile(code, str(document), "exec"), names)
    on, off = names["on"], names["off"]
    assert on.tokens == off.tokens and len(on.tokens) == 96
    assert on.stats.acceptance_rate["retrieval"] > 0.05 and on.stats.target_forwards < 90
    assert "tokens per second" in capsys.readouterr().out
    engine = triforce.load("tiny", draft=names["PeriodDrafter"], device="cpu")
    assert engine.generate(names["text"], 32, temperature=0.0).tokens == on.tokens[:32]
    controller = states[-1]().pilot.controller
    assert "custom" in controller.costs.sources
    assert controller.rates["custom"].tests != Rate.WEIGHT  # observed, or forgotten


@pytest.mark.slow
def test_every_cell_runs(monkeypatch, capsys):
    """With no plotting library; what they plot is there."""
    plt, left, right = mock.MagicMock(), mock.MagicMock(), mock.MagicMock()
    plt.subplots.return_value = mock.MagicMock(), (left, right)
    monkeypatch.setitem(sys.modules, "matplotlib", mock.MagicMock(pyplot=plt))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", plt)
    names = {}
    for cell in json.loads((ROOT / "examples" / "triforce.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
            assert cell["outputs"] or cell["source"][0].startswith(("import", "def"))  # it was executed and kept
    told = capsys.readouterr().out
    assert told.count("\n> ") == 4 and "the same tokens: True" in told
    curves = [call.args for call in left.plot.call_args_list]
    assert len(curves) == 2 and all(len(x) == len(y) > 20 and x == sorted(x) and y == sorted(y) for x, y in curves)
    assert len(right.bar.call_args.args[0]) == 8 and "background:rgba" in names["answer"]._repr_html_()
    assert 0 < max(right.bar.call_args.args[1]) <= 1
