"""What is set before PyTorch is imported."""

import subprocess
import sys

import pytest

from triforce.start import SPIN, bound_spinning


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"},
                                   {"OMP_NUM_THREADS": "2"}])
def test_threads_spin_for_a_bounded_time_unless_the_user_decides(given):
    environment = {"HOME": "/", **given}
    bound_spinning(environment)
    assert environment == {"HOME": "/", **(given or {"GOMP_SPINCOUNT": str(SPIN)})}


def test_nothing_imports_pytorch_before():
    """It would have read its settings by then."""
    code = "import triforce.start, sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stderr
