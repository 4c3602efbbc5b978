"""The rules of the house that a linter cannot know: the direction of imports, what runs bytes, what no file holds."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("compiler", "passes", "cache", "runner", "tools")
LEAVES = tuple(sorted(file.stem for file in (ROOT / "src" / "piecegraph").glob("[a-z]*.py")))
FACADE = ROOT / "src" / "piecegraph" / "__init__.py"

ALLOWED: dict[str, tuple[str, ...]] = {
    "tools": ("runner", "compiler", "passes", "cache", *LEAVES),
    "runner": ("compiler", "passes", "cache", *LEAVES),
    "compiler": ("passes", "cache", *LEAVES),
    "passes": LEAVES,
    "cache": LEAVES,
    "leaf": LEAVES,
}
"""What each folder may import of ours besides itself: tools -> runner -> compiler -> passes, cache -> leaves."""

INSTEAD = {
    ("compiler", "runner"): "a foreign runner uses the compiler alone; take what you need as an argument",
    ("passes", "compiler"): "a pass works on a graph it is given; move what both need to a leaf in src/piecegraph",
    ("passes", "runner"): "a pass knows no runner; say what you need as a field of the pass",
    ("passes", "cache"): "a pass names itself by its fields; the compiler puts them into the key",
    ("cache", "passes"): "the cache stores keys and bytes; the compiler says what they mean",
    ("cache", "compiler"): "the cache stores keys and bytes; the compiler says what they mean",
    ("cache", "runner"): "the cache stores keys and bytes; take what you need as an argument",
}
"""(folder, what it wanted) -> what to do."""


def ours(file: Path) -> str:
    """The folder a source file belongs to, or "leaf"."""
    first = file.relative_to(ROOT).parts[0]
    return first if first in PACKAGES else "leaf"


def sources() -> list[Path]:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return [*files, *(FACADE.parent / f"{leaf}.py" for leaf in LEAVES)]


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, inside functions and `importlib.import_module("...")` too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module"):
            constants = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            yield from ((node.lineno, name) for name in constants if isinstance(name, str))


def crossings(source: str, folder: str) -> list[str]:
    """The imports of `source`, a file of `folder`, that go against the direction."""
    found = []
    for line, name in imported_names(ast.parse(source)):
        parts = name.split(".")
        if parts[0] in PACKAGES:
            found.append(f"line {line} imports {name}: write piecegraph.{name}; a bare {parts[0]} is another module")
            continue
        if parts[0] != "piecegraph" or len(parts) == 1:
            continue
        wanted = parts[1]
        if wanted in (folder, "__version__") or wanted in ALLOWED[folder]:
            continue
        if wanted not in (*PACKAGES, *LEAVES):
            found.append(f"line {line} imports {name} through the facade, which is for users: import it from its file")
            continue
        instead = INSTEAD.get((folder, wanted), "imports go tools -> runner -> compiler -> passes, cache -> leaves")
        found.append(f"line {line} imports {name}, but {folder} may not import {wanted}: {instead}")
    return found


def test_imports_go_one_way() -> None:
    """tools -> runner -> compiler -> passes, cache -> leaves; see `ALLOWED`."""
    found = {file: crossings(file.read_text(encoding="utf-8"), ours(file)) for file in sources()}
    told = [f"{file.relative_to(ROOT)}: {'; '.join(lines)}" for file, lines in found.items() if lines]
    assert not told, "\n".join(told)


@pytest.mark.parametrize(
    ("folder", "source", "reason"),
    [
        ("compiler", "from piecegraph.runner.llm import LLM", "may not import runner: a foreign runner"),
        ("compiler", "from piecegraph import runner", "may not import runner"),
        ("compiler", "def f():\n    import piecegraph.runner.llm", "line 2"),
        ("compiler", "from piecegraph import LLM", "through the facade"),
        ("cache", "import importlib\nimportlib.import_module('piecegraph.compiler.key')", "may not import compiler"),
        ("passes", "from piecegraph.cache.key import key", "the compiler puts them into the key"),
        ("runner", "from piecegraph.tools.cli import main", "may not import tools"),
        ("leaf", "import piecegraph.compiler", "may not import compiler"),
        ("tools", "from compiler.tracing.trace import trace", "write piecegraph.compiler.tracing.trace"),
    ],
)
def test_a_crossing_is_refused_with_its_reason(folder: str, source: str, reason: str) -> None:
    """The check above sees every spelling of an import and says what to do instead."""
    (message,) = crossings(source, folder)
    assert reason in message


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("compiler", "from piecegraph.cache.store.store import Store"),
        ("runner", "from piecegraph.compiler.api import compile"),
        ("tools", "from piecegraph import __version__, environment"),
        ("passes", "from piecegraph.errors import ConfigError\nimport torch"),
    ],
)
def test_the_direction_is_free(folder: str, source: str) -> None:
    assert crossings(source, folder) == []


RUNS_BYTES = {
    "aoti_load_package",
    "CDLL",
    "CompiledArtifact",
    "CppCodeCache",
    "CppPythonBindingsCodeCache",
    "dlopen",
    "exec_module",
    "_load_impl",
    "_load_library",
    "load_artifact",
    "load_cache_artifacts",
    "load_compiled_function",
    "load_library",
    "load_module",
    "LoadLibrary",
    "module_from_spec",
    "PyCodeCache",
    "PyDLL",
    "SourceFileLoader",
    "spec_from_file_location",
    "torch.jit.load",
    "torch.export.load",
    "torch.hub.load",
    "torch.load",
    "np.load",
    "numpy.load",
    "yaml.load",
    "yaml.full_load",
    "yaml.unsafe_load",
}
"""What runs or unpickles bytes, torch's and ours. A name without a dot counts whatever it is an attribute of."""

RUNNING_MODULES = {
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "copyreg"),
    *("ctypes", "cffi", "runpy", "imp", "code", "codeop"),
}

MAY_RUN_BYTES = {
    ("compiler/common/cuda_driver.py", "ctypes"): "calls the driver that torch has loaded",
    ("compiler/common/cuda_driver.py", "CDLL"): "of the driver, by the loader's own search; no path",
    ("compiler/own_kernels/cpp_library.py", "ctypes"): "of its libraries",
    ("compiler/own_kernels/cpp_library.py", "CDLL"): "of bytes the cache's store authenticated, or built just now",
    ("passes/kernels/common/cpp_kernel.py", "ctypes"): "calls a library that the former has loaded",
    ("passes/kernels/common/cpp_kernel.py", "CDLL"): "the type of such a library",
    ("compiler/graphs/replay/replay_plan.py", "exec"): "a line a step, generated right there",
    ("compiler/graphs/replay/replay_plan.py", "compile"): "of the same lines",
    ("compiler/inductor/artifact.py", "PyCodeCache"): "lists modules that torch has loaded",
    ("compiler/tracing/python_kernels.py", "compile"): "of a source file whose names are listed; its code is not run",
    ("runner/distributed/executor.py", "pickle"): "writes messages to processes that it has started itself",
    ("runner/data_parallel/engine_processes.py", "pickle"): "writes messages to processes that it has started itself",
    ("runner/distributed/child_process.py", "pickle"): "writes messages to processes that it has started itself",
    ("compiler/splitting/stitch.py", "exec"): "of the stitched source, generated from a plan",
    ("compiler/splitting/stitch.py", "compile"): "of the same source",
    ("compiler/inductor/files.py", "load_artifact"): "of bytes the cache's store authenticated, or compiled just now",
    ("compiler/inductor/artifact.py", "load_cache_artifacts"): "in load_artifact, of the bytes it was given",
    ("compiler/inductor/artifact.py", "_load_impl"): "in load_artifact, of the same bytes",
    ("compiler/inductor/cpp_libraries.py", "CppPythonBindingsCodeCache"): "its loading is led to files of ours",
    (
        "compiler/inductor/cpp_libraries.py",
        "_load_library",
    ): "inside load_artifact, of those that came with the same bytes",
    ("compiler/common/symbolic_sizes.py", "eval"): "of sizes that this process, or the one that started it, wrote",
    (
        "tools/cache/reading/dump.py",
        "compile",
    ): "of an authenticated stitched source; its bytecode is shown, and not run",
    (
        "runner/device_memory/host_memory/released_memory.py",
        "ctypes",
    ): "calls madvise of the C library that Python is linked with",
    ("runner/device_memory/cuda_memory.py", "ctypes"): "calls the driver that torch has loaded",
    ("runner/device_memory/cuda_memory.py", "CDLL"): "of the driver, by the loader's own search; no path",
    ("tools/bench/startup/clock.py", "SourceFileLoader"): "only to time what Python itself imports",
}
"""(file, what it uses) -> why no byte of a disk runs there unauthenticated. A new row needs a reason as good."""


def dotted(node: ast.expr) -> str:
    """The text of names joined by dots; of anything else, one that is no name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def ways_to_run_bytes(source: str) -> list[tuple[int, str]]:
    """(line, what) for each unpickling, dlopen and exec in `source`: imports, calls, and what is only named."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            heads = [name.partition(".")[0] for name in modules]
            found += [(node.lineno, head) for head in heads if head in RUNNING_MODULES]
            if isinstance(node, ast.ImportFrom):
                found += [(node.lineno, name) for name in names if {name, f"{node.module}.{name}"} & RUNS_BYTES]
        elif isinstance(node, ast.Attribute):
            spellings = {node.attr, f"{dotted(node.value)}.{node.attr}"}
            found += [(node.lineno, what) for what in spellings & RUNS_BYTES]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            runs_text = node.func.id == "compile" and any(
                isinstance(arg, ast.Constant) and arg.value in ("exec", "eval", "single")
                for arg in (*node.args, *(keyword.value for keyword in node.keywords))
            )
            if runs_text or node.func.id in ("exec", "eval", "__import__"):
                found.append((node.lineno, node.func.id))
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            is_safe = isinstance(node.value, ast.Constant) and node.value.value is (node.arg == "weights_only")
            found += [] if is_safe else [(node.value.lineno, node.arg)]
    return found


def test_bytes_run_where_they_were_authenticated() -> None:
    """Nothing unpickles, dlopens or execs but what `MAY_RUN_BYTES` says."""
    strays = [
        f"{name}: line {line} uses {what}"
        for file in sources()
        for name in (str(file.relative_to(ROOT)),)
        for line, what in ways_to_run_bytes(file.read_text(encoding="utf-8"))
        if (name, what) not in MAY_RUN_BYTES
    ]
    assert not strays, "\n".join(strays) + ": load data, or have inductor_artifact.load_artifact load it"


def test_every_reason_to_run_bytes_is_still_needed() -> None:
    there = {file: (ROOT / file).read_text(encoding="utf-8") for file, _ in MAY_RUN_BYTES if (ROOT / file).exists()}
    used = {(file, what) for file, source in there.items() for _, what in ways_to_run_bytes(source)}
    assert set(MAY_RUN_BYTES) - used == set(), "take them out of MAY_RUN_BYTES"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "pickle"),
        ("def f():\n    from ctypes import CDLL as x", "ctypes"),
        ("import torch as t\nt.ops.load_library(path)", "load_library"),
        ("torch.load(path)", "torch.load"),
        ("from torch import load", "load"),
        ("from torch._inductor.codecache import PyCodeCache", "PyCodeCache"),
        ("loader = torch._inductor.aoti_load_package", "aoti_load_package"),
        ("exec(text)", "exec"),
        ("compile(text, name, 'exec')", "compile"),
        ("numpy.load(path, allow_pickle=True)", "allow_pickle"),
        ("f(weights_only=False)", "weights_only"),
        ("importlib.util.spec_from_file_location(name, path)", "spec_from_file_location"),
    ],
)
def test_a_way_to_run_bytes_is_seen(source: str, what: str) -> None:
    assert what in {found for _, found in ways_to_run_bytes(source)}


@pytest.mark.parametrize("source", ["model.eval()", "piecegraph.compile(model)", "re.compile(x)", "json.load(file)"])
def test_what_only_looks_like_one_is_not(source: str) -> None:
    assert ways_to_run_bytes(source) == []


VERSION_OF_TORCH = re.compile(r"torch\W{0,4}2\.\d|torch\.__version__\s*[<>]|TorchVersion")


def test_versions_of_torch_are_known_where_they_are_met() -> None:
    """Not even a comment elsewhere tells one torch from another."""
    found = [
        f"{file.relative_to(ROOT)}: {text}"
        for file in sources()
        if file.parent.name != "torch_compat" and file != ROOT / "compiler" / "triton" / "compat.py"
        for text in VERSION_OF_TORCH.findall(file.read_text(encoding="utf-8"))
    ]
    assert not found, f"{found}: let compiler/torch_compat/versions.py meet the difference"


PRIVATE_MODULES_OF_TRITON = ("triton._C", "triton.backends", "triton.compiler", "triton.knobs", "triton.runtime")

TALKS_TO: dict[str, tuple[str, *tuple[str, ...]]] = {
    "compiler/common/ambient_state.py": ("autocast and torch.func, asked at every call", "torch._C"),
    "compiler/common/fake_values.py": ("ops computed on fake tensors", "torch._dispatch"),
    "compiler/common/split_ops.py": ("the names of all registered ops", "torch._C"),
    "compiler/common/symbolic_sizes.py": ("symbols made again", "torch._dynamo"),
    "compiler/graphs/recording/cuda_graph.py": ("tensors over memory that they do not keep", "torch._C"),
    "compiler/inductor/artifact.py": ("a compiled piece to bytes and back", "torch._inductor", "torch._functorch"),
    "compiler/inductor/caches.py": ("where headers are precompiled, and vector instructions tried", "torch._inductor"),
    "compiler/inductor/compile.py": ("one piece through Inductor", "torch._inductor", "torch._dynamo"),
    "compiler/inductor/cpp_libraries.py": ("how C++ kernels are loaded", "torch._inductor"),
    "compiler/inductor/custom_pass.py": ("a pass inside Inductor", "torch._inductor"),
    "compiler/inductor/options.py": ("Inductor's options", "torch._inductor"),
    "compiler/own_kernels/cpp_library.py": ("which C++ compiler Inductor uses", "torch._inductor"),
    "compiler/rewriting/dump.py": ("the structured trace", "torch._logging"),
    "compiler/torch_compat/fake_tensors.py": ("the classes of fake tensors, for all other files", "torch._subclasses"),
    "compiler/torch_compat/process_settings.py": ("their settings", "torch._dynamo", "torch._inductor"),
    "compiler/torch_compat/versions.py": (
        "what versions do not have alike",
        *("torch._dynamo", "torch._inductor", "torch._prims_common"),
    ),
    "compiler/tracing/dynamo.py": ("a graph of a call", "torch._dynamo", "torch._guards"),
    "compiler/tracing/python_kernels.py": ("which file registered an op's kernels", "torch._C", "torch._library"),
    "compiler/tracing/read_facts.py": ("the dispatch keys that Dynamo guards on", "torch._C"),
    "compiler/triton/compat.py": (
        "how Triton keys, compiles and keeps kernels",
        *("torch._inductor", "triton._C", "triton.backends", "triton.compiler", "triton.knobs", "triton.runtime"),
    ),
    "compiler/workers/child.py": ("imports Inductor while the parent traces", "torch._inductor"),
    "passes/kernels/common/overlapped.py": ("the current stream, as Triton's launchers take it", "triton.runtime"),
    "passes/matching/torch_ir.py": ("the function that F.silu calls, which has no public name", "torch._C"),
    "runner/tensor_parallel/symmetric_memory/symmetric_collectives.py": (
        "memory that GPUs of one host read from each other",
        "torch._C",
    ),
    "passes/ops/op_types.py": ("the classes of registered ops, for all other files", "torch._ops"),
}
"""File -> why it needs private modules, and which. A new torch or Triton is tried against these."""


@functools.cache
def is_private_module(name: str) -> bool:
    """Return whether `name`, of two parts, is a private module of torch, in the torch that is installed, or Triton."""
    if name in PRIVATE_MODULES_OF_TRITON:
        return True
    package, _, module = name.partition(".")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    if package != "torch" or not module.startswith("_"):
        return False
    return any(folder.glob(f"{module}/__init__.py*")) or any(folder.glob(f"{module}.*"))


def private_modules_used(source: str) -> set[str]:
    """Return the private modules of torch and Triton that `source` imports or reaches for, under any alias."""
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    aliases = {alias.asname: alias.name for node in imports for alias in node.names if alias.asname is not None}
    names = [name for _, name in imported_names(tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            names.append(f"{aliases.get(first, first)}.{rest}")
    return {name for name in {".".join(name.split(".")[:2]) for name in names} if is_private_module(name)}


def test_private_modules_are_used_where_the_table_says() -> None:
    used = {str(file.relative_to(ROOT)): private_modules_used(file.read_text(encoding="utf-8")) for file in sources()}
    allowed = {file: set(modules) for file, (_, *modules) in TALKS_TO.items()}
    strays = {file: names - allowed.get(file, set()) for file, names in used.items()}
    assert not {file: names for file, names in strays.items() if names}, "use what a file of TALKS_TO offers"
    assert not {file for file, names in allowed.items() if names != used.get(file)}, "take them out of TALKS_TO"


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("def f():\n    from torch._inductor import config", "torch._inductor"),
        ("from torch import _logging", "torch._logging"),
        ("torch._guards.x()", "torch._guards"),
        ("import torch as t\nisinstance(x, t._ops.OpOverload)", "torch._ops"),
        ("import torch\ntorch._C._nn.silu", "torch._C"),
        ("from torch._subclasses.fake_tensor import FakeTensor", "torch._subclasses"),
        ("import importlib\nimportlib.import_module('torch._functorch.config')", "torch._functorch"),
        ("from triton.runtime import driver", "triton.runtime"),
        ("import triton\ntriton.compiler.compile(x)", "triton.compiler"),
    ],
)
def test_a_use_of_a_private_module_is_seen(source: str, module: str) -> None:
    assert private_modules_used(source) == {module}


@pytest.mark.parametrize("source", ["torch._check(x)", "import triton.language as tl\ntl.load", "self._C.x", "x._ops"])
def test_a_name_that_is_no_private_module_is_left_alone(source: str) -> None:
    assert private_modules_used(source) == set()


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_piecegraph_imports_nothing_of_weight() -> None:
    """`import piecegraph`, its leaves and its command line's `--help` need no torch."""
    modules = ", ".join(f"piecegraph.{leaf}" for leaf in LEAVES)
    heavy = "sorted({'torch', 'transformers', 'rich', 'numpy', 'triton'} & set(sys.modules))"
    code = f"import sys, {modules}, piecegraph.tools.cli, piecegraph.tools.commands.run; print({heavy})"
    assert in_a_fresh_process(code) == "[]"


def test_importing_piecegraph_changes_no_environment() -> None:
    code = "import os; before = dict(os.environ); import piecegraph; print(before == dict(os.environ))"
    assert in_a_fresh_process(code) == "True"


def test_triton_is_imported_by_kernels_only() -> None:
    """A machine without it runs on its CPU."""
    code = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoTriton())
import piecegraph.runner.attention.select, piecegraph.passes.pipeline, piecegraph.runner.llm
from piecegraph.passes.ops.all_ops import define_all_ops

define_all_ops()
print("triton" in sys.modules)
"""
    assert in_a_fresh_process(code) == "False"


def tracked_files() -> list[Path]:
    try:
        done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def test_no_file_names_a_machine() -> None:
    """Paths of somebody's machine do not belong into files that others read."""
    private = ["/" + name + "/" for name in ("work", "root", "home", "Users")]
    found = [
        f"{file.relative_to(ROOT)}:{number} has {needle}"
        for file in tracked_files()
        if file.suffix in {".py", ".md", ".toml", ".txt", ".yaml", ".sh", ""} and not file.is_symlink()
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        for needle in private
        if needle in line
    ]
    assert not found, found


def test_every_test_file_mirrors_a_source_file() -> None:
    """tests/a/test_b.py tests a/b.py or the folder a/b; one that tests several files says what in its docstring."""
    strays = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        source = ROOT.joinpath(*file.relative_to(ROOT / "tests").parts[:-1], file.stem.removeprefix("test_"))
        leaf = FACADE.parent / f"{source.name}.py"
        if source.with_suffix(".py").exists() or source.is_dir() or leaf.exists():
            continue
        if ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) is None:
            strays.append(f"{file.relative_to(ROOT)} (no {source.relative_to(ROOT)}.py)")
    assert not strays, f"{strays}: move the test with its source, or open it with a docstring that says what it tests"


def test_no_file_is_called_utils() -> None:
    """A file is named for its concept."""
    vague = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}
    assert not [str(file) for file in sources() if file.name in vague]


CHANGING_METHODS = {"add", "append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
STATEFUL = {
    "ContextVar",
    "CppKernel",
    "Library",
    "OwnKernels",
    "WeakKeyDictionary",
    "WeakSet",
    "WeakValueDictionary",
    "count",
    "local",
}
"""The calls whose result is state of the process where a module keeps it."""


def global_state(source: str) -> set[str]:
    """Return the names at module level of `source` whose values change while the process runs. Locks do not count."""
    tree = ast.parse(source)
    made = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    found = {
        name
        for name, value in made.items()
        if isinstance(value, ast.Call) and dotted(value.func).rpartition(".")[2] in STATEFUL
    }
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in (inner for function in functions for inner in ast.walk(function)):
        if isinstance(node, ast.Global):
            found |= set(node.names)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            found |= {dotted(node.value)} & made.keys()
        elif isinstance(node, ast.Attribute) and node.attr in CHANGING_METHODS:
            found |= {dotted(node.value)} & {name for name, value in made.items() if isinstance(value, CONTAINERS)}
    return found


CONTAINERS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)


def test_global_state_is_listed_on_the_map() -> None:
    state = {str(file.relative_to(ROOT)) for file in sources() if global_state(file.read_text(encoding="utf-8"))}
    rows = (ROOT / "docs" / "map.md").read_text(encoding="utf-8").partition("## Global state")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`((?:\w+/)+\w+\.py)`", rows)) - {"tests/test_house.py"}
    assert state == listed, "what a module keeps is an argument, or has a row in docs/map.md"


@pytest.mark.parametrize(
    "source",
    [
        "from contextvars import ContextVar\nx: ContextVar[int] = ContextVar('x')",
        "x = {}\ndef f(key):\n    x[key] = 1",
        "x: list[int] = []\ndef f():\n    x.append(1)",
        "x = 0\ndef f():\n    global x\n    x += 1",
        "x = itertools.count()",
    ],
)
def test_global_state_is_seen(source: str) -> None:
    assert global_state(source) == {"x"}


@pytest.mark.parametrize(
    "source", ["x = {'a': 1}\ndef f():\n    return x['a']", "def f():\n    x = []\n    x.append(1)"]
)
def test_a_constant_is_not_global_state(source: str) -> None:
    assert global_state(source) == set()
