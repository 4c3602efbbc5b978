"""No file of cache/ unpickles, runs what it reads, or imports anything heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent.parent / "cache"
FILES = sorted(FOLDER.rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "ctypes", "importlib", "torch", "dill", "cloudpickle", "tarfile"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "open"}


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in FORBIDDEN_MODULES:
            found.append(node.module)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            found.append(node.func.id)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_store_only_moves_bytes(file: Path) -> None:
    """`open` is forbidden too, because it follows links."""
    assert offences(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("source", ["import pickle", "from torch import fx", "exec(data)", "def f():\n  open('x')"])
def test_the_lint_reports_what_is_forbidden(source: str) -> None:
    assert offences(source)


def test_all_of_it_imports_without_torch_and_without_side_effects() -> None:
    modules = ", ".join(f"piecegraph.cache.{file.parent.name}.{file.stem}" for file in FILES if file.stem != "__init__")
    code = f"import sys, {modules}; print(sorted({{'torch', 'numpy', 'platformdirs', 'pickle'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
