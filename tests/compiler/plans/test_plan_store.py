"""A second compile of the same model loads it; the report has the reason if that is impossible."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.store import Loaded, Store
from piecegraph.compiler.building import cold_start
from piecegraph.compiler.splitting.plan import SplitCall
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.errors import PassExpectation
from piecegraph.progress import Phase
from tests.compiler.store.small_models import DIMS, SIZE, Small, compiled, config, state


def inputs(rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(rows))


def no_trace(*args: object, **kwargs: object) -> None:
    raise AssertionError("it traced")


def test_a_load_is_bitwise_the_compile_and_traces_nothing(whole_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything a caller can ask of a compiled model is there again."""
    cold = compiled(Small())
    monkeypatch.setattr(cold_start, "trace", no_trace)
    phases: list[Phase] = []
    model = Small()
    warm = pg.compile(model, config(), dynamic_dims=DIMS, example_inputs=(torch.ones(3, SIZE),), on_phase=phases.append)
    assert (state(cold), state(warm)) == ("miss", "hit")
    for rows in (1, 5, 64):
        assert torch.equal(cold(inputs(rows)), warm(inputs(rows)))
    assert warm.source == cold.source
    assert warm.plan == cold.plan
    assert warm.split_calls == cold.split_calls
    assert list(warm.guards) == list(cold.guards)
    assert [piece.text for piece in warm.unique_pieces] == [piece.text for piece in cold.unique_pieces]
    assert [piece.pieces for piece in warm.unique_pieces] == [piece.pieces for piece in cold.unique_pieces]
    assert [row.key for row in warm.report().unique_pieces] == [row.key for row in cold.report().unique_pieces]
    assert {phase.name for phase in phases} == {"cache_key", "import_loader", "load_compiled", "bind_weights"}
    found = warm.report().cache
    assert found.loaded_pieces == warm.report().num_unique_pieces
    assert found.saved_seconds > 0
    assert "cache hit" in str(warm.report())


def test_weights_are_those_of_the_module_that_is_loaded(whole_cache: Path) -> None:
    """Nothing of a weight is stored: other values, the same entry. One that is replaced later is still noticed."""
    compiled(Small(seed=0))
    model = Small(seed=1)
    warm = compiled(model)
    assert state(warm) == "hit"
    with torch.no_grad():
        assert torch.equal(warm(inputs()), model(inputs()))
        model.get_parameter("layers.0.linear.weight").mul_(2)
        assert torch.equal(warm(inputs()), model(inputs()))
    again = Small(seed=1)
    replaced = compiled(again)
    again.get_submodule("layers.0.linear").weight = nn.Parameter(torch.zeros(SIZE, SIZE))
    with pytest.raises(pg.errors.InputMismatch, match=r"layers\.0\.linear\.weight was replaced"):
        replaced(inputs())


class Merges(nn.Module):
    """Two linears over one input, a table that is an attribute, and a result that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 2 * SIZE)
        self.table = torch.arange(SIZE, dtype=torch.float32)
        self.buffer = nn.Buffer(torch.full((1,), 7.0))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.ops.pgtoy.triple.default(x)
        right = self.right(x).mm(self.buffer.expand(2 * SIZE, 1))
        return {"left": self.left(x), "right": right, "table": x @ self.table, "buffer": self.buffer}


def test_merged_weights_constants_and_nested_results_come_back(whole_cache: Path) -> None:
    """Parameters become views of one tensor again, and `state_dict` is what it was."""
    options: Any = {"passes": ("merge-projections",), "expect": {"merge-projections": 1}}
    cold = compiled(Merges(), **options)
    model = Merges()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    warm = compiled(model, **options)
    assert (state(cold), state(warm)) == ("miss", "hit")
    first, second = cold(inputs()), warm(inputs())
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert second["buffer"] is model.buffer
    assert model.left.weight.untyped_storage()._cdata == model.right.weight.untyped_storage()._cdata
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(PassExpectation, match="expected 2 matches, found 1"):
        compiled(Merges(), **{**options, "expect": {"merge-projections": 2}})


def test_static_sizes_are_loaded_too(whole_cache: Path) -> None:
    cold = compiled(Small(), compile_sizes=(1, 2))
    warm = compiled(Small(), compile_sizes=(1, 2))
    assert (state(cold), state(warm)) == ("miss", "hit")
    assert warm.report().static_sizes == cold.report().static_sizes == (1, 2)
    assert warm.report().cache.loaded_pieces == 3 * warm.report().num_unique_pieces
    for rows in (1, 2, 3):
        assert torch.equal(cold(inputs(rows)), warm(inputs(rows)))


def test_runners_see_the_split_calls_before_weights_are_bound(whole_cache: Path) -> None:
    """They may refuse the model, as before a compile."""
    seen: list[tuple[SplitCall, ...]] = []

    def compile_with(look: Callable[[tuple[SplitCall, ...]], None]) -> pg.CompiledModel:
        example = (torch.ones(3, SIZE),)
        return pg.compile(Small(), config(), dynamic_dims=DIMS, example_inputs=example, before_compile=look)

    models = [compile_with(seen.append) for _ in range(2)]
    assert state(models[1]) == "hit"
    assert seen[0] == seen[1]
    assert len(seen) == 2

    def refuse(calls: tuple[SplitCall, ...]) -> None:
        raise pg.errors.UnsupportedModel("no")

    with pytest.raises(pg.errors.UnsupportedModel, match="no"):
        compile_with(refuse)


SOURCE = """
import torch
from torch import nn

SCALE = 2.0

class Written(nn.Module):
    def forward(self, x):
        return torch.ops.pgtoy.triple.default(x) @ (torch.ones(4, 4) * SCALE)
"""


def write_module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str = SOURCE) -> Any:
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def test_an_edited_source_is_compiled_again(
    whole_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = write_module(tmp_path, monkeypatch, "written_once")
    assert state(compiled(module.Written())) == "miss"
    assert state(compiled(module.Written())) == "hit"
    (tmp_path / "written_once.py").write_text(SOURCE + "# another\n")
    again = compiled(module.Written())
    assert (state(again), again.report().cache.reason) == ("miss", "the source of written_once has changed")
    assert "the source of written_once has changed" in caplog.text


def test_a_source_edited_while_it_compiles_is_not_stored(
    whole_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was compiled is of no file that is there."""
    module = write_module(tmp_path, monkeypatch, "edited_meanwhile")
    build: Any = cold_start.__dict__["build"]

    def edit_and_build(*args: Any, **kwargs: Any) -> Any:
        (tmp_path / "edited_meanwhile.py").write_text(SOURCE.replace("2.0", "3.0"))
        return build(*args, **kwargs)

    monkeypatch.setattr(cold_start, "build", edit_and_build)
    found = compiled(module.Written()).report().cache
    assert found.state == "miss"
    assert found.not_stored.endswith("edited_meanwhile.py changed while it was compiled")
    assert not Store.open(whole_cache).exists(found.key)


def test_a_changed_global_is_another_model(whole_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file tells: the module's own setting was changed by whoever runs it."""
    module = write_module(tmp_path, monkeypatch, "with_a_global")
    first = compiled(module.Written())(inputs())
    module.SCALE = 4.0
    again = compiled(module.Written())
    assert again.report().cache.reason == "with_a_global.SCALE has changed since the model was traced"
    assert torch.equal(again(inputs()), 2 * first)


def test_a_damaged_entry_is_compiled_again_and_never_raised(
    whole_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a piece's artifact and of the plan: the next start finds what this one mended."""
    cold = compiled(Small())
    store = Store.open(whole_cache)
    entries = {row.key: row.file.entry for row in store.list()}
    plan = entries[cold.report().cache.key]
    assert plan is not None
    for key, role in ((plan.notes["pieces"][0], "artifact"), (plan.key, "plan")):
        entry = store.list()[[row.key for row in store.list()].index(key)].file.entry
        assert entry is not None
        path = store.layout.blob(entry.blobs[role].digest)
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
        mended = compiled(Small())
        assert state(mended) == "miss"
        assert torch.equal(mended(inputs()), cold(inputs()))
        assert "blob corrupt" in mended.report().cache.reason
        assert state(compiled(Small())) == "hit"
    assert "compiling again" in caplog.text


def test_a_malformed_plan_is_compiled_again(whole_cache: Path) -> None:
    """Signed by us and of another version, say."""
    cold = compiled(Small())
    store = Store.open(whole_cache)
    loaded = store.verify(cold.report().cache.key)
    assert isinstance(loaded, Loaded)
    for change in ({"format": 99}, {"symbols": None}, {"schemas": {"op_pgtoy_triple": "f() -> ()"}}):
        document = {**json.loads(loaded.blobs["plan"]), **change}
        blobs = {**loaded.blobs, "plan": json.dumps(document).encode()}
        forged = Entry.of(loaded.entry.factors, blobs, created=0.0)
        store.save(forged, blobs)
        again = compiled(Small())
        assert (state(again), bool(again.report().cache.reason)) == ("miss", True)
        assert torch.equal(again(inputs()), cold(inputs()))


class Branches(nn.Module):
    def __init__(self, setting: Any) -> None:
        super().__init__()
        self.setting = setting

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.pgtoy.triple.default(x @ torch.ones(SIZE, SIZE))
        return result


def test_a_model_that_cannot_be_stored_has_a_reason(whole_cache: Path) -> None:
    odd = compiled(Branches(torch.Generator()))
    assert odd.report().cache.state == "miss"
    assert odd.report().cache.not_stored == "setting is a torch._C.Generator, of which no key can be made."
    eager = compiled(Small(), compiler="eager")
    assert (state(eager), eager.report().cache.reason) == ("off", "eager pieces are not stored")
    off = compiled(Small(), cache=False)
    assert (state(off), off.report().cache.reason) == ("off", "cache=False")
    assert not list(whole_cache.glob("v1/entries/*")) or len(Store.open(whole_cache).list()) == 1


def test_the_mode_pieces_stores_no_plan(whole_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is traced each time, and nothing is compiled the second time."""
    monkeypatch.setenv("PIECEGRAPH_CACHE", "pieces")
    first, second = compiled(Small()), compiled(Small())
    assert state(second) == "off"
    assert second.report().cache.reason == "PIECEGRAPH_CACHE=pieces"
    assert (first.report().cache.loaded_pieces, second.report().cache.loaded_pieces) == (0, 1)
    assert second.report().trace_seconds > 0
    assert torch.equal(first(inputs()), second(inputs()))


def test_a_process_that_waited_loads(whole_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one compiled the same meanwhile."""
    models: list[pg.CompiledModel] = []
    flight = CompileCache.flight

    def compile_elsewhere_first(self: CompileCache, key: str, on_wait: object) -> Any:
        monkeypatch.setattr(CompileCache, "flight", flight)
        models.append(compiled(Small()))
        return Waited()

    class Waited:
        waited_s = 1.0

        def __enter__(self) -> Waited:
            return self

        def __exit__(self, *exc_info: object) -> None:
            pass

    monkeypatch.setattr(CompileCache, "flight", compile_elsewhere_first)
    late = compiled(Small())
    assert (state(models[0]), state(late)) == ("miss", "hit")


@pytest.mark.parametrize("waits_for_others", [False, True])
def test_who_waits_for_others_holds_no_lock(
    waits_for_others: bool, whole_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of a pipeline wait for each other before they compile: none may wait for another's plan meanwhile."""
    flight, held, held_before_compile = CompileCache.flight, set[str](), list[int]()

    @contextlib.contextmanager
    def watched(self: CompileCache, key: str, on_wait: Any = None) -> Iterator[Any]:
        with flight(self, key, on_wait) as found:
            held.add(key)
            yield found
            held.discard(key)

    monkeypatch.setattr(CompileCache, "flight", watched)
    model = pg.compile(
        Small(),
        config(),
        dynamic_dims=DIMS,
        example_inputs=(torch.ones(3, SIZE),),
        before_compile=lambda calls: held_before_compile.append(len(held)),
        waits_for_others=waits_for_others,
    )
    assert held_before_compile == [0 if waits_for_others else 1]
    assert state(model) == "miss"
    assert state(compiled(Small())) == "hit"  # stored all the same
