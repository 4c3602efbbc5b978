"""A start reads, runs and makes no file in a folder that others can write to, in this process or in those it starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from piecegraph.environment import child_environment

ROOT = Path(__file__).resolve().parents[2]
WATCH = Path(__file__).with_name("file_watch")

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", "/sys", "/dev/null", "/dev/urandom")
NAMED_AT_RANDOM = r"(tmp)?[a-z0-9_]{8}(/.*)?"
"""Of Python's `tempfile`, which nobody could have made before."""

NEVER_OPENED = re.compile(r"torchinductor_\w+")
"""A folder of /tmp that torch makes when it is imported."""


def watched_start(home: Path, workers: int) -> list[tuple[str, str]]:
    """(event, path) of all that one start touches, with `home` for what belongs to the user."""
    asked = {"model": "decoder", "forbid": False, "options": {"compile_workers": workers, "compile_sizes": [4]}}
    record = home / "record"
    record.unlink(missing_ok=True)
    environment = child_environment(
        {
            "HOME": str(home / "home"),
            "TMPDIR": str(home / "tmp"),
            "XDG_DATA_HOME": str(home / "data"),
            "PIECEGRAPH_CACHE": "on",
            "PIECEGRAPH_CACHE_DIR": str(home / "cache"),
            "OMP_NUM_THREADS": "1",
            "TESTS_FILE_WATCH": str(record),
        }
    )
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PYTHONPYCACHEPREFIX"):
        environment.pop(variable, None)
    environment["PYTHONPATH"] = os.pathsep.join([str(WATCH), environment["PYTHONPATH"]])
    for folder in ("home", "tmp"):
        (home / folder).mkdir(exist_ok=True)
    program = [sys.executable, "-m", "tests.compiler.one_start", json.dumps(asked)]
    done = subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = record.read_text().splitlines()
    state = json.loads(done.stdout.splitlines()[-1])["cache"]["state"]
    return [("state", state), *(tuple(line.split("\t", 1)) for line in lines)]  # type: ignore[list-item]


def strays(events: list[tuple[str, str]], home: Path) -> set[tuple[str, str]]:
    """What is neither the system's, nor Python's and its packages', nor ours, nor the user's own cache and key, nor a
    temporary file of ours."""
    installed = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}
    allowed = [*SYSTEM, *installed, str(ROOT), str(home / "cache"), str(home / "data")]
    inside = tuple(f"{folder}{os.sep}" for folder in allowed)
    # The folders, not what lies there. Python lists those it imports from; an editable install has one elsewhere.
    allowed += [str(home / "tmp"), str(home), *map(str, home.parents), *sys.path]
    own = re.compile(rf"{home}/tmp/(piecegraph-[^/]+(/.*)?|{NAMED_AT_RANDOM})")
    found = set()
    for event, word in events:
        path = re.sub(r"^-[a-zA-Z]+(?=/)", "", word)  # -I/folder
        if not path.startswith(os.sep) or path in allowed or os.path.normpath(path).startswith(inside):
            continue
        if not own.fullmatch(os.path.normpath(path)):
            found.add((event, path))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_start_touches_no_folder_of_others(workers: int, tmp_path: Path) -> None:
    """This holds for a cold and for a warm start."""
    for state in ("miss", "hit"):
        (_, found), *events = watched_start(tmp_path, workers)
        assert found == state
        assert len(events) > 1000
        assert {Path(path).name for event, path in events if event == "subprocess.Popen"} >= (
            {"g++"} if state == "miss" else set()
        )
        elsewhere = strays(events, tmp_path)
        made_by_torch = {each for each in elsewhere if NEVER_OPENED.fullmatch(Path(each[1]).name)}
        assert {event for event, _ in made_by_torch} <= {"os.mkdir"}
        assert elsewhere - made_by_torch == set()
        assert [list(Path(path).iterdir()) for _, path in made_by_torch] in ([], [[]])
        assert not list((tmp_path / "home").iterdir())


def test_an_access_outside_the_folders_is_detected(tmp_path: Path) -> None:
    inside = [("open", "/usr/include/a.h"), ("open", f"{tmp_path}/tmp/piecegraph-of-x/1/a.so"), ("open", "relative")]
    inside += [("open", f"{tmp_path}/tmp/tmpab_12345/a"), ("subprocess.Popen", "-I/usr/include")]
    outside = {("open", f"{tmp_path}/tmp/torchinductor_me/a.h"), ("open", str(tmp_path / "home" / ".triton" / "x.so"))}
    outside |= {("subprocess.Popen", "/opt/a.h"), ("open", "/usr/../srv/a")}
    assert strays([*inside, *outside, ("subprocess.Popen", "-I/opt/include")], tmp_path) == {
        *outside,
        ("subprocess.Popen", "/opt/include"),
    }
