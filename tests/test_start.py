"""Where the commands begin."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from triforce import memory, start
from triforce.start import ALLOCATOR, ALLOCATORS, GROWING


@pytest.mark.parametrize("before,expected,advice", [
    ({}, GROWING, ""), ({"WORLD_SIZE": "2"}, None, f"set {ALLOCATOR}={GROWING} before"),
    ({ALLOCATOR: "backend:native"}, "backend:native", f"set {ALLOCATOR}=backend:native,{GROWING} before"),
    ({ALLOCATOR: "expandable_segments:False"}, "expandable_segments:False", f"set {ALLOCATOR}="),
    ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, None, f"set PYTORCH_ALLOC_CONF=max_split_size_mb:64,{GROWING} "),
    ({"PYTORCH_ALLOC_CONF": GROWING}, None, "")])
def test_segments_of_memory_grow(monkeypatch, before, expected, advice):
    """Unless the user says otherwise, or there are several ranks; and whoever runs out of memory is told of it."""
    for name in (*ALLOCATORS, "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        start.main(["--version"])
    assert os.environ.get(ALLOCATOR) == expected
    assert advice in memory.remedy_of_scatter() and bool(advice) == bool(memory.remedy_of_scatter())


SWALLOWS = """
import sys, time
print("importing", flush=True)
for _ in range(200):
    try:
        time.sleep(0.1)
    except KeyboardInterrupt:
        pass
"""


@pytest.mark.quick
@pytest.mark.parametrize("ignored", [False, True])
def test_an_import_that_swallows_interrupts_is_interrupted(tmp_path, ignored):
    """As PyTorch's, where it imports NumPy. Who has Ctrl-C ignored keeps that."""
    (tmp_path / "torch.py").write_text(SWALLOWS)
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " * ignored
    code += "from triforce.start import main; main([])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               cwd=Path(__file__).parent.parent, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    try:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        if ignored:
            time.sleep(0.5)
            assert process.poll() is None
        else:
            assert process.wait(timeout=5) == 130 and process.stderr.read() == "interrupted\n"
    finally:
        process.kill()


@pytest.mark.quick
def test_what_ctrl_c_did_before_comes_back():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with start.interruptible():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.quick
@pytest.mark.parametrize("argv,said", [
    (["--help"], "usage: triforce"), (["--checkpoint", "./nowhere"], "no such folder"),
    (["--prompt", " "], "the prompt is empty"), (["--gamma", "x"], "gamma")])
def test_flags_and_mistakes_do_not_wait_for_pytorch(argv, said, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('PyTorch is imported')")
    code = "import sys; from triforce.start import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *argv], cwd=Path(__file__).parent.parent, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, stdin=subprocess.DEVNULL,
                          capture_output=True)
    assert said in done.stdout + done.stderr and "PyTorch is imported" not in done.stderr
