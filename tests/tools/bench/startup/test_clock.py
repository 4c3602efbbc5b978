"""Tests that every moment of a start counts once, and that imports count wherever they happen."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path

import pytest

from piecegraph.progress import Phase
from piecegraph.tools.bench.startup import clock as start_clock
from piecegraph.tools.bench.startup.clock import ImportSpans, PhaseSpans, Span, share_out


def test_phases_one_after_the_other_and_what_is_nobodys() -> None:
    shares = share_out([Span("load", 1, 4), Span("trace", 5, 6), Span("load", 7, 8)], 0, 10)
    assert shares.by_name == {"load": 4, "trace": 1}
    assert shares.unnamed == 5
    assert shares.unnamed_after == {"": 1, "load": 3, "trace": 1}


def test_what_runs_inside_a_phase_is_not_the_phases() -> None:
    shares = share_out([Span("trace", 0, 10), Span("import torch", 2, 5), Span("import other", 3, 4)], 0, 10)
    assert shares.by_name == {"trace": 7, "import torch": 2, "import other": 1}
    assert shares.unnamed == 0


def test_phases_side_by_side_count_once() -> None:
    """The phase that began last has the moment, so the shares never add up to more than the elapsed time."""
    shares = share_out([Span("load", 0, 6), Span("trace", 4, 9)], 0, 9)
    assert shares.by_name == {"load": 4, "trace": 5}


def test_spans_that_reach_beyond_are_cut() -> None:
    shares = share_out([Span("before", -5, -1), Span("load", -1, 2), Span("after", 9, 20)], 0, 10)
    assert shares.by_name == {"load": 2, "after": 1}
    assert shares.unnamed == 7


def test_a_phase_of_a_thread_beside_the_others_has_no_time_of_its_own() -> None:
    """Otherwise unnamed time would look as if it were named."""
    shares = share_out([Span("step_kernels", 0, 6), Span("load", 4, 5)], 0, 9)
    assert shares.by_name == {"load": 1}
    assert shares.unnamed == 8


def test_a_phase_that_ended_is_a_span_of_its_seconds() -> None:
    spans = PhaseSpans()
    spans(Phase(name="load"))
    spans(Phase(name="load", done=1, total=2))
    assert not spans.spans
    spans(Phase(name="load", seconds=1.5))
    (span,) = spans.spans
    assert span.name == "load"
    assert span.end - span.begin == pytest.approx(1.5)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importable packages, two of them groups: `pg_first` imports `pg_plain`, `pg_second` and its own module."""
    sources = {
        "pg_first/__init__.py": "import pg_plain\nimport pg_second\nfrom pg_first import inner\n",
        "pg_first/inner.py": "VALUE = 1\n",
        "pg_second.py": "import pg_plain_too\n",
        "pg_plain.py": "",
        "pg_plain_too.py": "",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(start_clock, "_GROUP_OF", {"pg_first": "one", "pg_second": "two"})
    for name in list(sys.modules):
        if name.startswith("pg_"):
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("packages")
def test_imports_are_of_the_group_that_asked() -> None:
    imports = ImportSpans()
    finders = list(sys.meta_path)
    with imports.measured():
        module = importlib.import_module("pg_first")
    assert sys.meta_path == finders
    assert module.inner.VALUE == 1
    names = [span.name for span in imports.spans]
    assert set(names) == {"import one", "import two"}
    # From the search for one on, two is between parts of it; nothing overlaps.
    assert names[0] == names[-1] == "import one"
    assert all(left.end <= right.begin for left, right in zip(imports.spans, imports.spans[1:], strict=False))


@pytest.mark.usefixtures("packages")
def test_imports_of_other_packages_and_of_other_threads() -> None:
    """A package of no group is "other"; another thread's imports take no time of the main one's."""
    imports = ImportSpans()
    with imports.measured():
        thread = threading.Thread(target=importlib.import_module, args=("pg_second",))
        thread.start()
        thread.join()
        importlib.import_module("pg_plain")
    assert "pg_second" in sys.modules
    assert {span.name for span in imports.spans} == {"import other"}
