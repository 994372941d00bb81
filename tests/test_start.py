"""Where the commands begin."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from triforce import cli, memory, start
from triforce.errors import UserError
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


@pytest.mark.quick
def test_what_ctrl_c_did_before_comes_back():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with start.importing():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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
def test_nobody_waits_for_a_document_that_is_not_needed_any_more(tmp_path):
    """A thread that encodes cannot be stopped. It neither delays the end nor changes the status."""
    code = ("import sys, time\nfrom triforce import request, start\nfrom triforce.hf.tokenizer import Tokenizer\n"
            "request.LONG_DOCUMENT = 1\nTokenizer.encode = lambda *args: time.sleep(60)\n"
            "sys.exit(start.main(['--prompt', 'Once upon a time']))")
    done = with_torch("from triforce.errors import UserError\nraise UserError('a mistake')", tmp_path, code)
    assert done.returncode == 2 and "a mistake" in done.stderr


@pytest.mark.quick
def test_a_library_that_is_not_there_is_named(tmp_path):
    done = with_torch("raise OSError('libcudart.so.12: cannot open it')", tmp_path, START, "--prompt", "a")
    assert done.returncode == 1 and "libcudart.so.12" in done.stderr


@pytest.mark.quick
def test_a_thread_of_a_program_may_import_pytorch():
    """Only the first thread of a process may say what Ctrl-C does."""
    entered = []

    def enter():
        with start.importing():
            entered.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [signal.default_int_handler]


@pytest.mark.quick
def test_garbage_is_not_searched_for_in_what_is_imported(tmp_path):
    code = ("import gc, sys\nfrom triforce import start\n"
            "with start.importing():\n    import torch\n    print(gc.isenabled(), gc.get_freeze_count())\n"
            "first = gc.get_freeze_count()\nprint(gc.isenabled(), first > 1000)\nkept = [[] for _ in range(2000)]\n"
            "with start.importing():\n    print(gc.isenabled())\nprint(gc.isenabled(), gc.get_freeze_count() <= first)")
    done = with_torch("held = [[] for _ in range(1000)]", tmp_path, code)
    assert done.stdout.split() == ["False", "0", "True", "True", "True", "True", "True"], done.stderr


class Driver:
    """In the place of NVIDIA's: notes what it is asked for."""

    def __init__(self):
        self.calls = []

    def cuInit(self, flags):
        self.calls.append("init")
        return 0

    def cuDeviceGet(self, device, number):
        self.calls.append(number)
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        self.calls.append("context")
        return 0


@pytest.mark.quick
@pytest.mark.parametrize("flags,rank,number", [
    ([], None, 0), (["--device", "cuda"], None, 0), (["--device", "cuda:2"], None, 2), ([], "1", 1),
    (["--device", "cpu"], None, None), (["--device", "cuda:x"], None, None)])
def test_a_gpu_is_set_up_beside_the_import(flags, rank, number, monkeypatch):
    """Of this rank, if there are several; and never where it is not wanted."""
    driver, threads, real = Driver(), [], start.begin_gpu
    monkeypatch.setattr(start.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(cli, "begin_gpu", lambda device: threads.append(real(device)))
    monkeypatch.setenv("LOCAL_RANK", rank or "1")  # some schedulers set it for processes that are alone
    if rank is not None:
        monkeypatch.setenv("WORLD_SIZE", "2")

    def imported():  # here PyTorch would be
        raise UserError("imported")

    monkeypatch.setattr(cli, "importing", imported)
    assert cli.main(["--prompt", "Call me", *flags]) == 2
    [thread] = threads
    if thread is not None:
        thread.join()
    assert driver.calls == ([] if number is None else ["init", number, "context"])


@pytest.mark.quick
def test_nobody_needs_a_driver(monkeypatch, capfd):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(start.ctypes, "CDLL", missing)
    start.begin_gpu(None).join()
    assert not any(capfd.readouterr())
