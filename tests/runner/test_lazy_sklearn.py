"""A start imports no scikit-learn, and who needs it has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from piecegraph.environment import for_child


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which scikit-learn is there, or what stands for it here."""
    package = tmp_path / "sklearn"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '1.5.0'\n")
    (package / "metrics.py").write_text("def roc_curve(matches, probs):\n    return 'curve', matches, probs\n")
    environment = for_child({})
    return {**environment, "PYTHONPATH": os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])}


def printed(code: str, environment: dict[str, str]) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


LOOK = """
import sys
{first}
import transformers.generation.candidate_generator as module
from transformers import utils
from transformers.utils import import_utils
print('sklearn' in sys.modules, module.is_sklearn_available(), *module.roc_curve(1, 2), 'sklearn' in sys.modules,
      utils.is_sklearn_available is module.is_sklearn_available is import_utils.is_sklearn_available)
"""
OURS = "from piecegraph.runner.lazy_sklearn import import_without_sklearn as ours; ours(); ours()"


@pytest.mark.parametrize(
    ("first", "is_imported"), [("", "True"), (OURS, "False"), ("import sklearn.metrics\n" + OURS, "True")]
)
def test_it_is_imported_when_it_is_called(first: str, is_imported: str, installed: dict[str, str]) -> None:
    """Without us, by us, and by who has it imported already; nothing else of transformers is changed."""
    found = printed(LOOK.format(first=first), installed)
    assert found == [is_imported, "True", "curve", "1", "2", "True", "True"]


def test_where_it_is_not_installed_nothing_is_done() -> None:
    look = "import transformers.generation.candidate_generator as module; print(hasattr(module, 'roc_curve'))"
    hidden = "import sys; sys.modules['sklearn'] = None\n"
    plain = printed(hidden + look, for_child({}))
    assert printed(f"{hidden}{OURS}\n{look}", for_child({})) == plain == ["False"]


def test_where_transformers_has_no_such_module_nothing_is_done(installed: dict[str, str]) -> None:
    code = (
        "import piecegraph.runner.lazy_sklearn as ours; ours.MODULE = 'transformers.generation.elsewhere'\n"
        "from transformers import utils; before = utils.is_sklearn_available\n"
        "ours.import_without_sklearn(); print(utils.is_sklearn_available is before)"
    )
    assert printed(code, installed) == ["True"]


def test_a_start_imports_it_without(installed: dict[str, str], tmp_path: Path) -> None:
    """The phase in which transformers is imported is the one that saves it."""
    code = (
        "import sys; from piecegraph import LLM\n"
        "import piecegraph.runner.llm as llm\n"
        "def stop(*args): raise ZeroDivisionError\n"
        "import piecegraph.runner.load_engine as loading; loading.load_engine = stop\n"
        "try: LLM(sys.argv[1])\n"
        "except ZeroDivisionError: pass\n"
        "import transformers.models.llama.modeling_llama; print('sklearn' in sys.modules)"
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model")],
        env=installed,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["False"], done.stderr
