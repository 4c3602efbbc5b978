from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.passes.pipeline import default_passes
from piecegraph.runner.cudagraphs.dispatch_table import DispatchRange
from piecegraph.tools.cli import main
from piecegraph.tools.command_line.compile_flags import engine_config, passes_without
from piecegraph.tools.command_line.options import LLM_FLAGS
from piecegraph.tools.commands.explain import dispatch_lines
from tests.runner.speculative.heads.random_heads import eagle3_checkpoint
from tests.runner.tiny_models import llama_config, random_model

pytestmark = pytest.mark.usefixtures("models_are_traced_once")

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
SMALL = ["--max-num-seqs", "4", "--max-num-batched-tokens", "8", "--cudagraph-capture-sizes", "1,2,4"]


@pytest.fixture(autouse=True)
def libraries_keep_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command quietens its own process, which here is that of the tests."""
    monkeypatch.setattr("piecegraph.tools.command_line.quiet.quiet_libraries", lambda: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without weights."""
    folder = tmp_path_factory.mktemp("llama")
    llama_config().save_pretrained(str(folder))
    return str(folder)


def test_text(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole explanation is on stdout, and the phases are on stderr."""
    flags = ["--device", "cpu", "--graph-kind", "recorded", "--passes", "merge-projections", *SMALL]
    assert main(["explain", folder, *flags]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "model       LlamaForCausalLM, 0.0M parameters, float32 on cpu",
        "limits      96 tokens a text, 4 requests at once, 8 tokens a step",
        "attention   2 layers of 4 query and 2 KV heads, head size 8",
        "            0.2 KiB of key/value cache a token",
        "            backend sdpa: a CPU has torch's attention, and a kernel of ours for single tokens",
        "pieces      4 -> 4 unique, 2 split ops",
        "            unique  pieces  nodes",
        *(line for line in out.splitlines() if line.startswith(" " * 17) and "->" not in line),
        "passes      pass               matches  misses  nodes removed",
        "            merge-projections        4       0              2",
        "a layer     4 launches known before compiling: piecegraph::attention ?, matmuls 4",
        *(line for line in out.splitlines() if line.startswith(" " * 12 + "left to Inductor: ")),
        "linears     2 x model.layers.*.self_attn.q_proj + k_proj + v_proj: 64 x 32, float32, 0.0 MB, by torch's GEMM",
        *(line for line in out.splitlines() if line.endswith(" MB, by torch's GEMM") and line.startswith(" ")),
        "compiler    inductor",
        "split ops   2 x piecegraph::attention: launch",
        "replay      PIECEWISE: 3 x graph, 2 x launch",
        "graphs      FULL_AND_PIECEWISE: decode PIECEWISE, other batches PIECEWISE",
        "            to capture: 0 FULL, 3 PIECEWISE",
        "decode      requests -> mode, padded to",
        "                      1 -> PIECEWISE 1",
        "                      2 -> PIECEWISE 2",
        "                    3-4 -> PIECEWISE 4",
        "other       tokens -> mode, padded to",
        "                      2 -> PIECEWISE 2",
        "                    3-4 -> PIECEWISE 4",
        "                    5-8 -> NONE  (5 tokens are above the largest captured size 4 (PIECEWISE))",
        "slower      cudagraph_mode: uniform decode runs PIECEWISE instead of FULL: attention backend 'sdpa' supports "
        "NEVER and FULL decode needs UNIFORM_SINGLE_TOKEN_DECODE",
        "            dispatch: other batches of 5 to 8 tokens run NONE: 5 tokens are above the largest captured size 4 "
        "(PIECEWISE)",
    ]
    assert err.startswith("import (torch, transformers)\n")
    assert "trace" in err


def test_json(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same facts are one object by name, and with --quiet stderr is empty."""
    flags = ["--device", "cpu", "--graph-kind", "recorded", "--attention-backend", "triton", *SMALL]
    flags += ["--passes", "merge-projections"]
    assert main(["explain", folder, "--json", "--quiet", *flags]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert err == ""
    assert (record["model"], record["dtype"], record["device"]) == (folder, "float32", "cpu")
    assert (record["configured_mode"], record["decode_mode"]) == ("FULL_AND_PIECEWISE", "FULL")
    assert record["decode"][-1] == {"first": 3, "last": 4, "mode": "FULL", "num_tokens": 4, "reason": None}
    assert record["mixed"][-1]["mode"] == "NONE"
    assert record["replay_costs"] == {"graph": 3, "launch": 2}
    assert record["report"]["num_unique_pieces"] == len(record["report"]["unique_pieces"]) == 4
    assert [row["layers"] for row in record["attention"]] == [2]
    (merged,) = record["report"]["passes"]
    assert (merged["name"], merged["matches"], merged["misses"]) == ("merge-projections", 4, [])
    layer = record["layer"]
    assert layer["split_ops"] == {"piecegraph::attention": 1}
    assert layer["launches"] == layer["matmuls"] + sum(layer["ours"].values()) + 1
    assert record["slower_paths"] == [
        "dispatch: other batches of 5 to 8 tokens run NONE: 5 tokens are above the largest captured size 4 (PIECEWISE)"
    ]


def test_drafts_are_explained(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The graphs of verifications, and the draft's pieces and why its passes have none."""
    config = json.dumps({"model": folder, "num_speculative_tokens": 1})
    flags = ["--device", "cpu", "--graph-kind", "recorded", "--speculative", config, "--quiet", *SMALL]
    assert main(["explain", folder, "--attention-backend", "triton", *flags]) == 0
    text = capsys.readouterr().out
    _, _, drafts = text.partition("drafts      ")
    lines = [line.strip() for line in drafts.splitlines()]
    how = "up to 1 tokens a request and step, while measured steps say that it pays"
    assert lines[0] == f"draft_model ({folder}), {how}"
    assert lines[1:5] == [
        "requests that verify all drafts -> mode, padded to",
        "1 -> FULL 2",
        "2 -> FULL 4",
        "3-4 -> FULL 8",
    ]
    text = "graphs of its passes to capture: 3 FULL, one for each number of requests; prompts are read without graphs"
    assert text in lines
    assert lines[5].startswith("draft model LlamaForCausalLM, 0.0M parameters, 0.2 KiB of key/value cache a token more")
    assert any(line.startswith("pieces ") and line.endswith(" unique, 2 split ops") for line in lines)
    assert main(["explain", folder, "--json", "--cudagraph-mode", "PIECEWISE", *flags]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["verification"][0]["mode"] == "PIECEWISE"
    assert record["draft"]["model"] == folder and record["draft"]["num_full"] == 0
    assert record["draft"]["report"] == record["report"] and record["draft"]["draft"] is None


def test_a_head_is_explained(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its config is enough."""
    written, _ = eagle3_checkpoint(random_model(llama_config()), eagle_aux_hidden_state_layer_ids=[1])
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = json.dumps({"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3})
    flags = ["--device", "cpu", "--graph-kind", "recorded", "--speculative", config, "--quiet", *SMALL]
    assert main(["explain", folder, "--attention-backend", "triton", *flags]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.partition("drafts      ")[2].splitlines()]
    assert any(
        line.startswith("head Eagle3Head, 0.0M parameters, 0.1 KiB of key/value cache a token") for line in lines
    )
    assert "1 layers of 4 query and 2 KV heads, head size 8" in lines
    assert any(line.startswith("pieces ") and line.endswith(" unique, 1 split ops") for line in lines)
    text = "graphs of its passes to capture: 3 FULL, one for each number of requests; prompts are read without graphs"
    assert text in lines


def test_ranks_are_explained(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What one of them holds, heads of zeros included, and the collectives of a step."""
    flags = ["--device", "cpu", "--enforce-eager", "--tensor-parallel-size", "3", "--data-parallel-size", "2"]
    assert main(["explain", folder, "--quiet", *flags]) == 0
    out = capsys.readouterr().out
    lines = [line.strip() for line in out.splitlines()]
    assert any(line.startswith("engines     2, each as below") for line in lines)
    assert any(line.startswith("ranks       3 ranks, each with 0.") for line in lines), out
    assert "2 query and 1 KV heads on a rank; 2 query heads are padding" in lines, out
    assert "5 x all_reduce a step, 128 bytes a token" in lines, out
    assert any(line.startswith("1 x all_gather a step, ") and line.endswith("bytes a request") for line in lines), out


def test_nothing_slower_is_said_too(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device", "cpu", "--enforce-eager", "--dtype", "bfloat16", "--passes", "none"]
    assert main(["explain", folder, "--quiet", *flags]) == 0
    out = capsys.readouterr().out
    assert "bfloat16 on cpu" in out
    assert "compiler    eager\n" in out
    assert "replay      nothing is captured: 6 calls, one by one\n" in out
    assert out.endswith("slower      nothing: every batch runs as asked for\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["./nowhere"], 3, "no folder './nowhere'"),
        (["shape:nothing"], 3, "there is no shape 'nothing'"),
        ([], 2, "Missing argument 'MODEL'"),
        (["FOLDER", "--device", "cpu", "--assume-gpu"], 2, "device='cpu' is not a GPU to assume"),
        (["FOLDER", "--device", "cpu", "--attention-backend", "trtion"], 3, "Did you mean 'triton'?"),
        (["FOLDER", "--device", "cpu", "--cudagraph-capture-sizes", "4,2"], 3, "does not ascend: [4, 2]. Give [2, 4]."),
        (["FOLDER", "--passes", "merge-projection"], 2, "Did you mean 'merge-projections'?"),
        (["FOLDER", "--device", "cpu", "--strict"], 3, "strict=True allows no downgrade"),
    ],
)
def test_a_refusal_is_one_line(
    folder: str, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--quiet", *(folder if word == "FOLDER" else word for word in arguments)]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def explained_passes(folder: str, capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    """Return the names of the passes that ran, in order."""
    assert main(["explain", folder, "--json", "--quiet", *flags]) == 0
    return [row["name"] for row in json.loads(capsys.readouterr().out)["report"]["passes"]]


ALL_OF_A_CPU = [each.name for each in default_passes("cpu")]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (("--passes", "-merge-projections"), [name for name in ALL_OF_A_CPU if name != "merge-projections"]),
        pytest.param((), ALL_OF_A_CPU, marks=pytest.mark.slow),
        pytest.param(("--passes", "none"), [], marks=pytest.mark.slow),
    ],
)
def test_passes_are_dropped_or_all_or_none(
    given: tuple[str, ...], wanted: list[str], folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`test_json` names one."""
    assert explained_passes(folder, capsys, "--device", "cpu", *given) == wanted


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is assumed")
@pytest.mark.parametrize("dropped", [(), pytest.param(("merge-projections",), marks=pytest.mark.slow)])
def test_passes_of_an_assumed_gpu_are_those_that_pay_there(
    dropped: tuple[str, ...], folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """This holds if no passes are named, and if some are dropped."""
    names = [each.name for each in default_passes("cuda")]
    given = [word for name in dropped for word in ("--passes", f"-{name}")]
    assert explained_passes(folder, capsys, "--assume-gpu", *given) == [name for name in names if name not in dropped]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is assumed")
def test_sums_of_ranks_are_part_of_norms_on_a_gpu(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Two a layer, each of two kernels; the row is there for several ranks only, and with that pass dropped not."""
    flags = ["--assume-gpu", "--quiet", "--tensor-parallel-size", "2"]
    assert main(["explain", folder, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if "fuse-all-reduce" in line] == [["fuse-all-reduce", "4", "0", "4"]]
    assert any("piecegraph::all_reduce_add_rms_norm 4" in line for line in lines), lines
    assert passes_without(["fuse-all-reduce"], "cuda", 2) == tuple(each.name for each in default_passes("cuda"))


VALUES: dict[str, Any] = {
    "dtype": "float16",
    "quantization": "int8",
    "device": "cpu",
    "compiler": "eager",
    "attention_backend": "sdpa",
    "load_format": "safetensors",
    "gpu_memory_utilization": 0.5,
    "cudagraph_mode": "FULL",
    "cudagraph_capture_sizes": (1,),
    "compile_sizes": (1,),
    "graph_kind": "cuda",
    "strict": True,
    "measure_graphs": True,
    "enable_sleep_mode": True,
    "distributed_executor_backend": "mp",
    "start": "full",
    "enable_lora": True,
    "enable_expert_parallel": False,  # True needs several ranks
    "kv_cache_dtype": "fp8",
    "calculate_kv_scales": True,
    "nnodes": 1,  # more need as many ranks
    "node_rank": 0,
    "master_addr": "10.0.0.1",
}


@pytest.mark.parametrize("flag", LLM_FLAGS, ids=lambda flag: flag.name)
def test_every_flag_of_run_means_something_here(flag: Any, tmp_path: Path) -> None:
    value = VALUES.get(flag.name, 8)
    if flag.name == "enforce_eager":
        config = engine_config("a/b", {"enforce_eager": True})
        assert (config.cudagraph_mode, config.compile.compiler) == (NONE, "eager")
        return
    if flag.name == "speculative_config":
        config = engine_config("a/b", {flag.name: {"method": "ngram", "num_speculative_tokens": 8}})
        assert config.speculative is not None and config.speculative.num_speculative_tokens == 8
        return
    needed = {"kv_cache_dtype": "fp8"} if flag.name == "calculate_kv_scales" else {}
    config = engine_config("a/b", {flag.name: value, **needed})
    holders = {"load_format": config.source, "compiler": config.compile}
    found = getattr(holders.get(flag.name, config), flag.name)
    assert found == (FULL if flag.name == "cudagraph_mode" else value)


def ranges(sizes: Sequence[int], mode: CUDAGraphMode = PIECEWISE) -> list[DispatchRange]:
    """Return one range up to each size."""
    starts = [1, *(size + 1 for size in sizes)]
    return [
        DispatchRange(first=first, last=last, mode=mode, num_tokens=last, reason=None)
        for first, last in zip(starts, sizes, strict=False)
    ]


def test_sizes_in_equal_steps_share_a_line() -> None:
    assert [line.strip() for line in dispatch_lines(ranges([1, 2, 4, 8, 16, 24, 32, 48, 64, 80]))] == [
        "1 -> PIECEWISE 1",
        "2 -> PIECEWISE 2",
        "3-4 -> PIECEWISE 4",
        "5-8 -> PIECEWISE 8",
        "9-32 -> PIECEWISE 16, 24, ... 32",
        "33-80 -> PIECEWISE 48, 64, ... 80",
    ]


def test_a_line_has_one_mode_and_one_reason() -> None:
    rows = ranges([8, 16, 24])
    rows[2:] = [DispatchRange(first=17, last=24, mode=FULL, num_tokens=24, reason="a reason")]
    assert [line.strip() for line in dispatch_lines(rows)] == [
        "1-8 -> PIECEWISE 8",
        "9-16 -> PIECEWISE 16",
        "17-24 -> FULL 24  (a reason)",
    ]
    assert dispatch_lines([DispatchRange(first=3, last=3, mode=NONE, num_tokens=None, reason=None)]) == [
        "          3 -> NONE"
    ]
