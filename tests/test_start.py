"""Where the commands begin."""

import ctypes
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
@pytest.mark.parametrize("how,expected", [
    ("True", ["False", "0", "True", "True", "True", "True", "True"]),
    ("False", ["True", "0", "True", "False", "True", "True", "True"])])
def test_garbage_is_not_searched_for_in_what_is_imported(tmp_path, how, expected):
    """In a process of a command's own; what a program holds that calls one is the program's."""
    code = ("import gc, sys\nfrom triforce import start\n"
            f"with start.importing({how}):\n    import torch\n    print(gc.isenabled(), gc.get_freeze_count())\n"
            "first = gc.get_freeze_count()\nprint(gc.isenabled(), first > 1000)\n"
            f"with start.importing({how}):\n    print(gc.isenabled())\n"
            "print(gc.isenabled(), gc.get_freeze_count() <= first)")
    done = with_torch("held = [[] for _ in range(1000)]", tmp_path, code)
    assert done.stdout.split() == expected, done.stderr


@pytest.mark.quick
def test_garbage_is_searched_for_after_a_failed_import_and_never_where_a_user_has_said_so(tmp_path):
    code = ("import gc\nfrom triforce import start\n"
            "try:\n    with start.importing(True):\n        import torch\nexcept OSError:\n    print(gc.isenabled())\n"
            "gc.disable()\nwith start.importing(True):\n    pass\nprint(gc.isenabled())")
    done = with_torch("raise OSError('no library')", tmp_path, code)
    assert done.stdout.split() == ["True", "False"], done.stderr


class Driver:
    """In the place of NVIDIA's: notes what it is asked for, and writes where it is told to."""

    def __init__(self, fails: str = ""):
        self.calls, self.fails, self.goes_on = [], fails, threading.Event()

    def cuInit(self, flags):
        assert self.goes_on.wait(20) and flags == 0
        return self._done("init")

    def cuDeviceGet(self, device, number):
        device._obj.value = 7 + number
        assert isinstance(device._obj, ctypes.c_int)
        return self._done(number)

    def cuDevicePrimaryCtxRetain(self, context, device):
        assert isinstance(context._obj, ctypes.c_void_p)  # eight bytes are written there
        context._obj.value = 1
        return self._done(f"context of {device.value}")

    def _done(self, call) -> int:
        self.calls.append(call)
        return int(str(call) == self.fails)


def begun(monkeypatch, driver, *flags: str) -> threading.Thread | None:
    """The thread that a command with these flags begins, while PyTorch would be imported."""
    threads, real = [], start.begin_gpu
    monkeypatch.setattr(start.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(cli, "begin_gpu", lambda device: threads.append(real(device)))
    monkeypatch.setenv("CUDA_MODULE_LOADING", "")
    monkeypatch.delenv("CUDA_MODULE_LOADING")

    def imported(owns_process):
        assert not driver.calls  # it is not waited for
        raise UserError("imported")

    monkeypatch.setattr(cli, "importing", imported)
    assert cli.main(["--prompt", "Call me", *flags]) == 2
    driver.goes_on.set()
    [thread] = threads
    return thread


@pytest.mark.quick
@pytest.mark.parametrize("flags,ranks,number", [
    ([], None, 0), (["--device", "cuda"], None, 0), (["--device", "cuda:2"], None, 2), ([], "2", 1), ([], "1", 0),
    (["--device", "cpu"], None, None), (["--device", "cuda:x"], None, None)])
def test_a_gpu_is_set_up_beside_the_import(flags, ranks, number, monkeypatch):
    """Of this rank, if there are several; and never where it is not wanted."""
    driver = Driver()
    monkeypatch.setattr(start, "_uses_cuda", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")  # some schedulers set it for processes that are alone
    if ranks is not None:
        monkeypatch.setenv("WORLD_SIZE", ranks)
    thread = begun(monkeypatch, driver, *flags)
    if thread is not None:
        assert thread.daemon  # nobody waits for it at the end
        assert os.environ["CUDA_MODULE_LOADING"] == "LAZY"
        thread.join()
    assert driver.calls == ([] if number is None else ["init", number, f"context of {7 + number}"])


@pytest.mark.quick
@pytest.mark.parametrize("fails,calls", [("init", ["init"]), ("0", ["init", 0])])
def test_a_gpu_that_cannot_be_set_up_is_left_to_pytorch(fails, calls, monkeypatch, capfd):
    driver = Driver(fails)
    monkeypatch.setattr(start, "_uses_cuda", lambda: True)
    begun(monkeypatch, driver).join()
    assert driver.calls == calls and "Traceback" not in capfd.readouterr().err


@pytest.mark.quick
@pytest.mark.parametrize("library", ["", "libtorch_cuda.so", "libtorch_hip.so"])
def test_a_build_for_other_devices_touches_no_gpu(library, tmp_path, monkeypatch):
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "lib" / library).touch()
    code = "from triforce import start\nprint(start._uses_cuda(), start.begin_gpu(None) is None)"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, text=True, timeout=15,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True)
    found = library == "libtorch_cuda.so"
    assert done.stdout.split() == [str(found), str(not found)], done.stderr


@pytest.mark.quick
@pytest.mark.parametrize("library", [None, object()], ids=["no driver", "another library"])
def test_nobody_needs_a_driver(library, monkeypatch, capfd):
    def load(name):
        if library is None:
            raise OSError(name)
        return library

    monkeypatch.setattr(start, "_uses_cuda", lambda: True)
    monkeypatch.setattr(start.ctypes, "CDLL", load)
    start.begin_gpu(None).join()
    assert not any(capfd.readouterr())
