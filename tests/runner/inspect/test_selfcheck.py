"""A start that checks itself: honest models pass, and what is wrong is found, placed and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph import LLM
from piecegraph.errors import SelfcheckFailed
from piecegraph.runner.attention.interface.op_call import ATTENTION_OP, ROPE_ATTENTION_OP
from piecegraph.runner.cudagraphs.manager import CudaGraphManager
from piecegraph.runner.inspect.selfcheck import AttentionView
from tests.runner.tiny_models import llama_config, make_model, random_model, save
from tests.runner.wrong_pass import ScaleLinear


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(llama_config(num_hidden_layers=3)), tmp_path_factory.mktemp("llama"))


def checked(folder: Path, passes: tuple[Any, ...], **arguments: Any) -> LLM:
    options: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "compiler": "eager",
        "attention_backend": "triton",
        "graph_kind": "recorded",
        "cudagraph_capture_sizes": [1, 3],
        "max_num_seqs": 4,
        "num_kv_blocks": 32,
        "skip_tokenizer_init": True,
    }
    return LLM(folder, **{**options, **arguments}, compilation_config={"selfcheck": True, "passes": passes})


def test_a_correct_model_passes_and_reports_the_comparisons(folder: Path) -> None:
    """Every captured size, and every graph once; and it serves afterwards."""
    with checked(folder, ("merge-projections",)) as llm:
        report = llm.selfcheck
        assert report is not None
        assert {row.size for row in report.values} == {1, 3}
        assert all(row.ok for row in report.values)
        assert {row.piece for row in report.values} == {0, 1, 2, 3, 4}
        found = [(row.mode, row.num_tokens) for row in report.replays]
        assert sorted(found) == [("FULL", 1), ("FULL", 3), ("PIECEWISE", 1), ("PIECEWISE", 3)]
        assert str(report) in llm.notes
        assert not llm.engine.has_unfinished
        assert llm.runner.counters.by_mode() == {}
        llm.generate({"prompt_token_ids": [3, 4, 5]}, use_tqdm=False)


def test_without_the_option_nothing_is_compared(folder: Path) -> None:
    with LLM(folder, device="cpu", compiler="eager", num_kv_blocks=8, skip_tokenizer_init=True) as llm:
        assert llm.selfcheck is None


@pytest.mark.parametrize(
    ("number", "piece"),
    [
        (0, 0),  # query, key and value of layer 0
        (3, 1),  # down of layer 0
        (11, 3),  # down of layer 2
        (12, 4),  # the logits
    ],
)
def test_a_wrong_pass_is_named_with_the_first_wrong_piece(folder: Path, number: int, piece: int) -> None:
    """One result scaled by 1.01; the pass beside it is not blamed, nor are the pieces after it."""
    with pytest.raises(SelfcheckFailed) as raised:
        checked(folder, ("merge-projections", ScaleLinear(number)))
    message = str(raised.value)
    assert f"piece {piece} is the first that computes something else" in message
    assert "Without the pass 'scale-linear' it does not" in message


def test_a_pass_that_made_a_right_graph_is_not_blamed_for_what_follows(folder: Path) -> None:
    """Without `merge-projections` the error is gone too: 22 linears are not the 13 that the wrong pass waits for."""
    with pytest.raises(SelfcheckFailed, match="Without the pass 'scale-linear' it does not"):
        checked(folder, ("merge-projections", ScaleLinear(6, among=13)))


@pytest.mark.slow
def test_nothing_is_compared_with_itself(folder: Path) -> None:
    """What was replaced by eager's is no row of its own: over other kernels each row has an error of its own, but
    the embedding, which is exact."""
    passes = ("merge-projections", "fuse-add-rms-norm", "fuse-rope-kv-write")
    with checked(folder, passes, dtype="bfloat16", cudagraph_capture_sizes=[3]) as llm:
        assert llm.selfcheck is not None
        rows = llm.selfcheck.values
        same = [row.value for row in rows if row.compiled == row.eager]
        assert len({(row.piece, row.value) for row in rows}) == len(rows)
        assert not [name for name in same if name.startswith(("query", "key", "value"))]
        assert len([row.value for row in rows if row.value.startswith("value of")]) == 3  # once a layer


def test_bfloat16_does_not_hide_a_percent(folder: Path) -> None:
    """Errors do not add up from layer to layer, so the last one is seen as sharply as the first."""
    with pytest.raises(SelfcheckFailed, match="piece 3 is the first"):
        checked(folder, (ScaleLinear(20, factor=1.02),), dtype="bfloat16")


def test_a_factor_of_one_is_no_error(folder: Path) -> None:
    """It is the scaling that is found, not the pass."""
    with checked(folder, (ScaleLinear(6, factor=1.0),)) as llm:
        assert llm.selfcheck is not None


def test_a_replay_that_differs_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = CudaGraphManager.replay_full

    def wrong(self: CudaGraphManager, descriptor: Any) -> Any:
        output = replay(self, descriptor)
        if descriptor.num_tokens == 3:
            output.logits.add_(1e-3)
        return output

    monkeypatch.setattr(CudaGraphManager, "replay_full", wrong)
    with pytest.raises(SelfcheckFailed, match="the FULL graph of 3 tokens computes other logits"):
        checked(folder, ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("gemma2", "float32"),
        ("gemma3", "float32"),
        ("phi3", "bfloat16"),
        ("qwen3-moe", "bfloat16"),
    ],
)
def test_other_families_pass(family: str, dtype: str, tmp_path: Path) -> None:
    """Their norms, soft caps, windows and experts have a float64 form too."""
    folder = save(make_model(family), tmp_path)
    with checked(folder, (), dtype=dtype, cudagraph_capture_sizes=[2], max_num_seqs=2) as llm:
        assert llm.selfcheck is not None


def rope_arguments(dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(4, heads, 8, dtype=dtype) for heads in (4, 2, 2))
    angle = torch.arange(4)[:, None] * torch.rand(4)
    cos, sin = (torch.cat([part, part], -1).to(dtype) for part in (angle.cos(), angle.sin()))
    weights = [torch.rand(8, dtype=dtype), torch.rand(8, dtype=dtype)]
    layer = [0.3, 0, 0.0, None, None, "layer"]
    return [query, key, value, torch.empty_like(query), cos, sin, *weights, 1e-6, 0.0, *layer]


def test_an_op_that_rotates_itself_reads_what_is_rotated() -> None:
    """So it is compared with the op it replaces."""
    view, arguments = AttentionView(8), rope_arguments(torch.float64)
    found = view.reads(ROPE_ATTENTION_OP, arguments)
    plain = [found["query"], found["key"], found["value"], torch.empty_like(arguments[3]), *arguments[-6:]]
    view.run(ATTENTION_OP, plain)
    view.run(ROPE_ATTENTION_OP, arguments)
    assert not torch.equal(found["query"], arguments[0])
    assert torch.equal(found["value"], arguments[2])
    assert torch.equal(plain[3], arguments[3])


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (2, 0.0), (0, 5.0)])
def test_attention_of_the_check_equals_its_definition(window: int, softcap: float) -> None:
    """Over one sequence, written with einsum."""
    query, key, value = rope_arguments(torch.float32)[:3]
    out = torch.empty_like(query)
    AttentionView(8).run(ATTENTION_OP, [query, key, value, out, 0.3, window, softcap, None, None, "layer"])
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, 1)) * 0.3
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    behind = torch.arange(4)[:, None] - torch.arange(4)
    scores[:, (behind < 0) | (behind >= (window or 4))] = float("-inf")
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(2, 1))
    torch.testing.assert_close(out, expected)
