"""The notebook of `examples`: its cells run, with no plotting library, and what they plot is there."""

import json
import sys
from pathlib import Path
from unittest import mock

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "triforce.ipynb"


@pytest.mark.slow
def test_every_cell_runs(monkeypatch, capsys):
    plt, left, right = mock.MagicMock(), mock.MagicMock(), mock.MagicMock()
    plt.subplots.return_value = mock.MagicMock(), (left, right)
    monkeypatch.setitem(sys.modules, "matplotlib", mock.MagicMock(pyplot=plt))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", plt)
    names = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
            assert cell["outputs"] or cell["source"][0].startswith(("import", "def"))  # it was executed and kept
    told = capsys.readouterr().out
    assert told.count("\n> ") == 4 and "the same tokens: True" in told
    curves = [call.args for call in left.plot.call_args_list]
    assert len(curves) == 2 and all(len(x) == len(y) > 20 and x == sorted(x) and y == sorted(y) for x, y in curves)
    assert len(right.bar.call_args.args[0]) == 8 and "background:rgba" in names["answer"]._repr_html_()
    assert 0 < max(right.bar.call_args.args[1]) <= 1
