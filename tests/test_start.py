"""Where the commands begin."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from triforce import start
from triforce.start import ALLOCATOR, ALLOCATORS, GROWING


@pytest.mark.parametrize("before,expected", [
    ({}, GROWING), ({"WORLD_SIZE": "2"}, None), ({ALLOCATOR: "backend:native"}, "backend:native"),
    ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, None)])
def test_segments_of_memory_grow(monkeypatch, before, expected):
    """Unless the user says otherwise, or there are several ranks."""
    for name in (*ALLOCATORS, "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        start.main(["--version"])
    assert os.environ.get(ALLOCATOR) == expected


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
@pytest.mark.parametrize("ignored,argv", [(False, []), (True, []), (False, ["plan"]), (False, ["check"]),
                                          (False, ["convert"])])
def test_an_import_that_swallows_interrupts_is_interrupted(tmp_path, ignored, argv):
    """As PyTorch's, where it imports NumPy. Who has Ctrl-C ignored keeps that."""
    (tmp_path / "torch.py").write_text(SWALLOWS)
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " * ignored + "import sys; "
    code += "from triforce.start import main; main(sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", code, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, cwd=Path(__file__).parent.parent,
                               env={**os.environ, "PYTHONPATH": str(tmp_path)})
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


def with_torch(source: str, tmp_path, code: str, *argv: str) -> subprocess.CompletedProcess:
    """Runs Python code where PyTorch is this source."""
    (tmp_path / "torch.py").write_text(source)
    return subprocess.run([sys.executable, "-c", code, *argv], cwd=Path(__file__).parent.parent, text=True, timeout=15,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, stdin=subprocess.DEVNULL,
                          capture_output=True)


START = "import sys; from triforce.start import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.quick
@pytest.mark.parametrize("argv,said", [
    (["--help"], "usage: triforce"), (["--checkpoint", "./nowhere"], "no such folder"),
    (["--prompt", " "], "the prompt is empty"), (["--gamma", "x"], "gamma"),
    (["--save-prefix", "./nowhere/x"], "there is no folder")])
def test_flags_and_mistakes_do_not_wait_for_pytorch(argv, said, tmp_path):
    done = with_torch("raise SystemExit('PyTorch is imported')", tmp_path, START, *argv)
    assert said in done.stdout + done.stderr and "PyTorch is imported" not in done.stderr


@pytest.mark.quick
def test_a_library_that_is_not_there_is_named(tmp_path):
    done = with_torch("raise OSError('libcudart.so.12: cannot open it')", tmp_path, START, "--prompt", "a")
    assert done.returncode == 1 and "libcudart.so.12" in done.stderr


@pytest.mark.quick
def test_what_ctrl_c_did_before_comes_back():
    """And a thread of a program may import PyTorch: only the first one of a process may say what Ctrl-C does."""
    entered = []

    def enter():
        with start.importing():
            entered.append(signal.getsignal(signal.SIGINT))

    enter()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [start._end, signal.default_int_handler]
