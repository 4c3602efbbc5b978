"""The tests' compiler (compiled_once.py): a copy of what was made of the same, and nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import compiled_once


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `g++ SOURCE ... -o OUTPUT` writes the source and the number of its call; `-bad` fails."""
    folder = tmp_path / "real"
    folder.mkdir()
    real = folder / "g++"
    real.write_text(
        '#!/bin/sh\necho call >> "$0.calls"\n[ "$1" = -bad ] && exit 3\n'
        'for last; do :; done\n{ cat "$1"; wc -l < "$0.calls"; } > "$last"\n'
    )
    real.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    compiled_once.install(tmp_path / "remembered")
    return folder


def made(*arguments: object) -> int:
    return subprocess.run(["g++", *map(str, arguments)], check=False).returncode


def calls(compiler: Path) -> int:
    file = compiler / "g++.calls"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_the_same_source_is_compiled_once_wherever_it_lies(compiler: Path, tmp_path: Path) -> None:
    outputs = [tmp_path / name for name in ("a.so", "b.so")]
    for output in outputs:
        source = output.with_suffix(".cpp")
        source.write_text("int x;\n")
        assert made(source, "-O3", "-o", output) == 0
    assert calls(compiler) == 1
    assert outputs[0].read_text() == outputs[1].read_text() == "int x;\n1\n"
    outputs[0].write_text("written over")
    assert made(tmp_path / "a.cpp", "-O3", "-o", outputs[0]) == 0
    assert outputs[0].read_text() == "int x;\n1\n"


@pytest.mark.parametrize("change", ["source", "option", "include", "environment", "compiler", "suffix"])
def test_anything_else_is_compiled(
    change: str, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, include, output = tmp_path / "a.cpp", tmp_path / "include", tmp_path / "a.so"
    source.write_text("int x;\n")
    include.mkdir()
    options = ["-O3", f"-I{include}"]
    assert made(source, *options, "-o", output) == 0
    match change:
        case "source":
            source.write_text("int y;\n")
        case "option":
            options[0] = "-O2"
        case "include":
            os.utime(include, (1, 1))
        case "environment":
            monkeypatch.setenv("CPATH", str(tmp_path))
        case "compiler":
            os.utime(compiler / "g++", (1, 1))
        case "suffix":
            output = tmp_path / "a.o"
    assert made(source, *options, "-o", output) == 0
    assert calls(compiler) == 2


def test_a_failure_is_not_remembered_and_has_its_status(compiler: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert made("-bad", "-o", tmp_path / "a.so") == 3
    assert calls(compiler) == 2


def test_what_is_nothing_that_inductor_builds_is_made_each_time(compiler: Path, tmp_path: Path) -> None:
    source = tmp_path / "a.h"
    source.write_text("int x;\n")
    for _ in range(2):
        assert made(source, "-o", tmp_path / "a.d") == 0
    assert calls(compiler) == 2


def test_a_precompiled_header_is_made_once(compiler: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
        header = folder / "a.h"
        header.write_text("int x;\n")
        assert made(header, "-x", "c++-header", "-o", folder / "a.h.gch") == 0
        assert (folder / "a.h.gch").read_text() == "int x;\n1\n"
    assert calls(compiler) == 1


def test_installing_again_finds_the_real_one(compiler: Path, tmp_path: Path) -> None:
    """In processes that inherit PATH from one that has it."""
    compiled_once.install(tmp_path / "remembered")
    source = tmp_path / "a.cpp"
    source.write_text("int x;\n")
    assert made(source, "-o", tmp_path / "a.so") == 0
    assert calls(compiler) == 1


def test_without_a_compiler_nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    compiled_once.install(tmp_path / "remembered")
    assert os.environ["PATH"] == str(tmp_path)
