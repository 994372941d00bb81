"""Where the commands begin."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, python

from triforce import cli
from triforce.cli.main import ALLOCATOR, ALLOCATORS, GROWING, importing

START = "import sys; from triforce.cli import main; sys.exit(main(sys.argv[1:]))"


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
        cli.main(["--version"])
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
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " * ignored + START
    process = subprocess.Popen([sys.executable, "-c", code, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    try:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        if ignored:
            time.sleep(0.5)
            assert process.poll() is None
        else:  # as a shell has it: 130
            assert process.wait(timeout=5) == -signal.SIGINT and "Traceback" not in process.stderr.read()
    finally:
        process.kill()


@pytest.mark.quick
@pytest.mark.parametrize("argv,said", [
    (["--help"], "usage: triforce"), (["--checkpoint", "./nowhere"], "no such folder"),
    (["--prompt", " "], "is empty"), (["--gamma", "x"], "gamma"), (["--save-prefix", "./nowhere/x"], "no folder"),
    (["--prompt", "a"], "OSError: libcudart.so.12: cannot open it")])  # a library that is not there is named
def test_flags_and_mistakes_do_not_wait_for_pytorch(argv, said, tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open it')")
    done = python("-c", START, *argv, timeout=15, env={**os.environ, "PYTHONPATH": str(tmp_path)},
                  stdin=subprocess.DEVNULL)
    assert said in done.stdout + done.stderr and ("libcudart" in done.stderr) == ("libcudart" in said)


@pytest.mark.quick
def test_what_ctrl_c_did_before_comes_back():
    with importing():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
