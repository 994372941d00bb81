"""Imports go downwards only: a module imports what stands below it, or beside it in its folder."""

import ast
from pathlib import Path

import pytest

import triforce

ROOT = Path(triforce.__file__).parent
# From the top to the bottom. `triforce/__init__.py` has the public names, and the version, which all may read.
LAYERS = [{"__init__", "__main__", "api", "evaluation", "serve"}, {"cli"}, {"engine"}, {"decode", "naive"}, {"cache"},
          {"model", "attention", "experts", "fp8", "cpu", "parallel", "hf"}, {"runtime"},
          {"config", "tree", "errors", "render"}]
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def layer(module: tuple[str, ...]) -> int:
    return next(i for i, names in enumerate(LAYERS) if module[0] in names)


@pytest.mark.quick
@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_go_downwards_only(file):
    """Lazy ones, and those for types, too."""
    module = file.with_suffix("").parts
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = (*module[: -node.level], *(node.module or "").split("."))
            for name in node.names:
                target = tuple(part for part in (*above, name.name) if part)
                assert target == ("__version__",) or layer(target) >= layer(module), f"line {node.lineno}"
