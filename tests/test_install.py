"""What is installed: an editable clone beside which Python is started, and a wheel. A promise of the package, not of
one module."""

import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from conftest import ROOT, python


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parent") / "triforce"  # the name that a clone has
    left_out = (".git", ".venv", "*.egg-info", "__pycache__", "results", "checkpoints")
    copytree(ROOT, folder, ignore=ignore_patterns(*left_out))
    return folder


def run(*command, **kw) -> str:
    done = python(*command, **kw)
    assert done.returncode == 0, done.stderr
    return done.stdout


def backend(clone: Path, call: str, folder: Path) -> Path:
    """What the build backend makes of a call, without the isolation that would fetch it anew."""
    code = f"import setuptools.build_meta as build; print(build.{call}({str(folder)!r}))"
    return folder / run("-c", code, cwd=clone).split()[-1]


def test_import_beside_an_editable_clone(clone, tmp_path):
    """In the clone's parent folder, where `triforce` is also the name of a folder that is no package."""
    site = tmp_path / "site"
    with zipfile.ZipFile(backend(clone, "build_editable", tmp_path)) as wheel:
        wheel.extractall(site)
    # As Python does with a site folder at its start: the working directory, then the site with its .pth files.
    code = ("import site, sys\n"
            f"sys.path[1:] = [p for p in sys.path[1:] if p != {str(ROOT)!r}]\n"
            "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
            f"site.addsitedir({str(site)!r})\n"
            "import triforce\nprint(triforce.__file__, callable(triforce.load))")
    shown = run("-c", code, cwd=clone.parent)
    assert shown.split() == [str(clone / "triforce" / "__init__.py"), "True"]


@pytest.mark.slow
def test_a_wheel_has_what_it_needs(clone, tmp_path):
    """The embedded pair, the marker of types and the command; nothing of tests or benchmarks."""
    with zipfile.ZipFile(backend(clone, "build_wheel", tmp_path)) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(tmp_path / "site")
    assert {"triforce/py.typed", "triforce/tiny/target/model.safetensors", "triforce/cli/main.py"} <= names
    assert not any(name.startswith(("tests", "benchmarks", "generate")) for name in names)
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); from triforce.cli import main; main()"
    shown = run("-c", code, "--prompt", "Once upon a time", "--max-new-tokens", "4", "--device", "cpu", cwd=tmp_path)
    assert shown.strip()
