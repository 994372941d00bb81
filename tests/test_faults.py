"""The list of faults fits the code. `tests/faults/run.py` says whether the suite sees them.

Of the tests themselves, not of a module.
"""

from pathlib import Path

from faults.faults import FAULTS, misfits

TESTS = Path(__file__).parent


def test_every_fault_still_applies():
    assert misfits(TESTS.parent / "triforce", FAULTS) == []


def test_every_fault_has_its_tests():
    for fault in FAULTS:
        files = [word for word in fault.tests.split() if word.endswith(".py")]
        assert files and all((TESTS / file).is_file() for file in files), fault.id
        assert fault.breaks
