"""Prompts by the libraries' functions leave what the torch path leaves: results, and the states in all blocks.

`chunk_gated_delta_rule` and `mamba_chunk_scan_combined` stand in below for functions of libraries: they check what
these take, and compute it in torch, text by text. The libraries themselves run where they are installed: on a GPU, and
flash-linear-attention in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from piecegraph.runner.attention.interface.forward_context import ForwardContext, set_forward_context
from piecegraph.runner.attention.interface.kv_cache import StateCache
from piecegraph.runner.attention.interface.metadata import HostBatch
from piecegraph.runner.attention.sdpa import SdpaBackend
from piecegraph.runner.startup.compiling import decide
from piecegraph.runner.state_layers import prompt_kernels
from piecegraph.runner.state_layers.layer import StateLayer
from piecegraph.runner.state_layers.libraries import segments
from piecegraph.runner.state_layers.libraries.choice import Library, LibraryChoice, Rule
from piecegraph.runner.state_layers.libraries.library_calls import (
    FlashLinearAttention,
    LibraryCall,
    MambaSsm,
    load_library_call,
)
from piecegraph.runner.state_layers.libraries.segments import Segment
from piecegraph.runner.state_layers.metadata import StateMetadata, state_plan
from piecegraph.runner.step import model_step
from tests.interpreter import interpreted
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.state_layers.kernels.test_calls import linear_attention, mamba_mixer
from tests.runner.test_hybrid_models import PROMPTS, load_hybrid
from tests.runner.tiny_models import make_model, save

CPU = torch.device("cpu")
BLOCK_SIZE = 48
LENS = [(0, 130), (5, 70), (20, 1), (0, 3)]
"""Requests `(computed, tokens)`: over boundaries, with a state, one token, a short one."""


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As flash-linear-attention 0.6.0 has it, token by token."""
    assert cu_seqlens is not None and initial_state is not None and chunk_indices is not None and scale is not None
    assert use_qk_l2norm_in_kernel and output_final_state
    assert q.shape == k.shape and v.shape[2] % q.shape[2] == 0
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    _, num_rows, heads, key_dim = q.shape
    assert q.dtype == k.dtype == v.dtype and v.shape[:3] == (1, num_rows, heads)
    assert g.shape == beta.shape == (1, num_rows, heads) and g.dtype == torch.float32
    num_texts = len(cu_seqlens) - 1
    assert cu_seqlens.dtype == torch.int64 and int(cu_seqlens[-1]) == num_rows and int(cu_seqlens.diff().min()) > 0
    assert initial_state.shape == (num_texts, heads, key_dim, v.shape[-1]) and initial_state.dtype == torch.float32
    counts = (cu_seqlens.diff() + 63) // 64
    expected = [[text, chunk] for text, count in enumerate(counts.tolist()) for chunk in range(count)]
    assert chunk_indices.tolist() == expected and chunk_indices.dtype == cu_seqlens.dtype
    q, k = (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    out = torch.empty_like(v)
    states = initial_state.clone()
    for text in range(num_texts):
        for row in range(int(cu_seqlens[text]), int(cu_seqlens[text + 1])):
            state = states[text] * g[0, row].exp()[:, None, None]
            new = (v[0, row].float() - (k[0, row].unsqueeze(1) @ state).squeeze(1)) * beta[0, row, :, None].float()
            states[text] = state + k[0, row].unsqueeze(-1) * new.unsqueeze(1)
            out[0, row] = scale * (q[0, row].unsqueeze(1) @ states[text]).squeeze(1)
    return out, states


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    chunk_size: int,
    D: torch.Tensor | None = None,  # noqa: N803
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As mamba-ssm 2.3 has it, token by token."""
    assert initial_states is not None and D is not None and return_final_states and chunk_size == 256
    batch, num_tokens, heads, dim = x.shape
    groups, size = B.shape[2:]
    assert dt.shape == (batch, num_tokens, heads) and A.shape == (heads,) and B.shape == C.shape
    assert B.shape[:2] == x.shape[:2] and D.shape in ((heads,), (heads, dim)) and heads % groups == 0
    assert initial_states.shape == (batch, heads, dim, size) and initial_states.dtype == torch.float32
    b, c = (each.float().repeat_interleave(heads // groups, dim=2) for each in (B, C))
    skip = D if D.dim() == 2 else D.unsqueeze(-1)
    out = torch.empty_like(x)
    states = initial_states.clone()
    for token in range(num_tokens):
        step, value = dt[:, token].float(), x[:, token].float()
        added = (step[..., None] * value)[..., None] * b[:, token, :, None]
        states = states * (step * A).exp()[..., None, None] + added
        out[:, token] = (states @ c[:, token].unsqueeze(-1)).squeeze(-1) + value * skip
    return out, states


def test_a_batch_that_would_be_padding_mostly_is_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long text beside short ones: results and states are those of the padded batch."""
    texts = [Segment(0, 20, -1, 1), Segment(20, 21, -1, 2), Segment(25, 27, -1, 3)]
    shapes = {"x": (1, 23, 2, 4), "dt": (1, 23, 2), "A": (2,), "B": (1, 23, 1, 3), "C": (1, 23, 1, 3), "D": (2,)}
    inputs = {name: torch.rand(shape) for name, shape in shapes.items()}
    inputs |= {"A": -inputs["A"], "states": torch.rand(3, 2, 4, 3)}
    found = []
    for most in (segments.MOST_PADDING, 100):
        monkeypatch.setattr(segments, "MOST_PADDING", most)
        rows = segments.ragged_rows(texts, CPU)
        assert (rows.padded is None) == (most != 100)
        found.append(MAMBA.selective_scan(**inputs, rows=rows))
    for alone, padded in zip(*found, strict=True):
        torch.testing.assert_close(alone, padded)


FLA, MAMBA = FlashLinearAttention(chunk_gated_delta_rule), MambaSsm(mamba_chunk_scan_combined)


def batch(
    lens: Sequence[tuple[int, int]],
    library_calls: Mapping[str, LibraryCall],
    device: torch.device,
    *,
    has_batches: bool | None = None,
) -> StateMetadata:
    """The batch, planned on the host as on a GPU: each request has blocks of its own.

    `has_batches`: whether sequences are planned in batches; None: if there is a library.
    """
    has_batches = bool(library_calls) if has_batches is None else has_batches
    starts = torch.tensor([0, *[count for _, count in lens]]).cumsum(0).int()
    table = torch.arange(len(lens) * 4).view(-1, 4)
    seq_lens = [computed + count for computed, count in lens]
    slots = torch.zeros(int(starts[-1]), dtype=torch.int64)
    common: dict[str, Any] = {
        "query_start_loc": starts.tolist(), "seq_lens": seq_lens, "block_table": table, "slot_mapping": slots,
    }  # fmt: skip
    plan = state_plan(**common, block_size=BLOCK_SIZE, pages_per_block=1, device=device, has_batches=has_batches)
    host = HostBatch(
        query_start_loc=tuple(common["query_start_loc"]),
        seq_lens=tuple(seq_lens),
        block_table=table,
        slot_mapping=slots,
    )
    assert bool(plan.batches) == has_batches
    return StateMetadata(
        num_reqs=len(lens), num_tokens=len(slots), max_query_len=max(count for _, count in lens), num_decode_reqs=0,
        query_start_loc=starts, seq_lens=torch.tensor(seq_lens, dtype=torch.int32), block_table=table.int(),
        slot_mapping=slots, host=host, block_size=BLOCK_SIZE, pages_per_block=1, decoding=None, planned=plan,
        library_calls=library_calls,
    )  # fmt: skip


def check(
    op: str,
    make: Callable[[int], tuple[list[Any], list[Any]]],
    library_call: LibraryCall,
    device: torch.device = CPU,
    lens: list[tuple[int, int]] = LENS,
    tolerance: float = 2e-4,
) -> None:
    """Each row of the results and each block differ from those in torch by at most that share of their length."""
    from piecegraph.runner.state_layers import ops  # noqa: F401  (registers the ops)

    found = []
    library_call, calls = counted(library_call)
    library_calls: Mapping[str, LibraryCall]
    for library_calls in ({}, {"layer": library_call}):
        assert not calls
        metadata = batch(lens, library_calls, device)
        torch.manual_seed(0)
        arguments, tensors = make(metadata.num_tokens)
        out = torch.zeros(arguments.pop(), dtype=arguments[0].dtype)
        caches = [torch.randn(len(lens) * 4, *each.shape).to(each.dtype).to(device) for each in tensors]
        context = ForwardContext(
            impl=None,  # type: ignore[arg-type]  # no attention runs
            metadata=metadata,
            kv_caches={},
            state_caches={"layer": StateCache(tuple(caches))},
        )
        arguments.insert({"linear_attention": 5, "mamba_mixer": 6}[op], out)
        arguments = [each.to(device) if isinstance(each, torch.Tensor) else each for each in arguments]
        with set_forward_context(context):
            getattr(torch.ops.piecegraph, op).default(*arguments, "layer")
        found.append([arguments[{"linear_attention": 5, "mamba_mixer": 6}[op]], *caches])
    assert calls
    for ours, theirs in zip(found[1], found[0], strict=True):
        ours, theirs = ours.float().flatten(1), theirs.float().flatten(1)
        errors = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
        assert float(errors.max()) <= tolerance, errors


def counted(library_call: LibraryCall) -> tuple[LibraryCall, list[torch.Size]]:
    """The same, with the shapes of the first argument in the calls of the library's function."""
    calls: list[torch.Size] = []

    def function(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(first.shape)
        return library_call.function(first, *args, **kwargs)

    return replace(library_call, function=function), calls


WITHOUT_CONVOLUTION: Any = partial(mamba_mixer, groups=1, heads=3, dim=4)


def lightning(num_tokens: int) -> tuple[list[Any], list[Any]]:
    """A layer whose inputs are not convolved."""
    arguments, tensors = WITHOUT_CONVOLUTION(num_tokens)
    arguments[4] = arguments[5] = None
    return arguments, tensors[1:]


@pytest.mark.parametrize(
    ("op", "make", "library_call"),
    [
        ("linear_attention", linear_attention, FLA),
        ("mamba_mixer", mamba_mixer, MAMBA),
        ("mamba_mixer", lightning, MAMBA),
    ],
    ids=["gated delta net", "mamba-2", "lightning"],
)
def test_equals_the_torch_path(op: str, make: Any, library_call: LibraryCall) -> None:
    """Several texts over block boundaries, beside one that decodes; and one text alone."""
    check(op, make, library_call)
    check(op, make, library_call, lens=[(7, 60)])


@contextmanager
def computed_by(library_call: LibraryCall, rule: Rule) -> Iterator[list[torch.Size]]:
    """Have engines of this block compute prompts by `library_call`, on a CPU; its calls."""
    library_call, calls = counted(library_call)

    def chosen(layers: Any, device_type: str, installed: object) -> tuple[StateLayer, ...]:
        assert {layer.scan.rule for layer in layers if layer.scan is not None} == {rule}
        return tuple(replace(layer, prompts=LibraryChoice(Library.FLA, "")) for layer in layers)

    def load(library: Library) -> LibraryCall:
        return library_call

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(decide, "with_libraries", chosen)
        patched.setattr(model_step, "load_library_call", load)
        patched.setattr(SdpaBackend, "needs_host_batch", True)  # as on a GPU
        yield calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule", "library_call"), [("qwen3.5", Rule.DELTA, FLA), ("bamba", Rule.MAMBA2, MAMBA)]
)
def test_an_engine_gives_the_same_tokens(name: str, rule: Rule, library_call: LibraryCall, tmp_path: Path) -> None:
    """In chunks, with preemption and cached prefixes, as without a library."""
    from piecegraph import SamplingParams

    model = make_model(name)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with computed_by(library_call, rule) as calls, load_hybrid(save(model, tmp_path), num_kv_blocks=30) as llm:
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                assert_same_tokens(model, prompt, output.outputs[0].token_ids)
        assert calls and llm.engine.stats.num_prefix_hits > 0


def check_flash_linear_attention() -> None:
    """The library's own kernels, each in the first of its configurations: nothing can be measured here."""
    from triton.runtime.autotuner import Autotuner

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Autotuner, "_bench", lambda *args, **kwargs: 0.0)
        # the counter of a loop is a tensor where kernels are compiled, and a number in the interpreter
        patched.setattr(import_module("fla.ops.common.chunk_delta_h"), "range", _tensors, raising=False)
        _check_flash_linear_attention()


def _tensors(*bounds: Any) -> Iterator[Any]:
    from triton import language as tl

    for number in range(*map(int, bounds)):
        yield tl.full((), number, tl.int32)


def _check_flash_linear_attention() -> None:
    check(
        "linear_attention",
        partial(linear_attention, key=16, value=16),
        load_library_call(Library.FLA),
        lens=[(0, 66), (5, 3)],
        tolerance=2e-3,
    )


@pytest.mark.slow
@pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_flash_linear_attention_in_the_interpreter() -> None:
    interpreted(check_flash_linear_attention)


DELTA_NET_OF_16_BITS: Any = partial(linear_attention, heads=4, k_heads=2, key=64, value=64, dtype=torch.bfloat16)
MIXER_OF_16_BITS: Any = partial(mamba_mixer, heads=4, dim=64, size=64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("op", "make", "library_call"),
    [("linear_attention", DELTA_NET_OF_16_BITS, FLA), ("mamba_mixer", MIXER_OF_16_BITS, MAMBA)],
)
def test_equals_the_torch_path_in_bfloat16(op: str, make: Any, library_call: LibraryCall) -> None:
    """The convolution's weight and bias, and the windows, are of that dtype; time steps, decays and states are not."""
    check(op, make, library_call, lens=[(0, 20), (5, 1), (3, 7)], tolerance=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("package", "library", "op", "make"),
    [
        ("fla", Library.FLA, "linear_attention", DELTA_NET_OF_16_BITS),
        ("mamba_ssm", Library.MAMBA_SSM, "mamba_mixer", MIXER_OF_16_BITS),
    ],
)
def test_a_library_on_a_gpu_gives_the_torch_paths_numbers(
    package: str, library: Library, op: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, of which the torch path, in float32, differs by rounding; both convolve in torch."""
    if find_spec(package) is None:
        pytest.skip(f"{library.value} is not installed")
    monkeypatch.setattr(prompt_kernels, "runs_kernels", lambda x: False)
    check(op, make, load_library_call(library), torch.device("cuda"), tolerance=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("package", "library", "name"),
    [("fla", Library.FLA, "qwen3.5"), ("mamba_ssm", Library.MAMBA_SSM, "bamba")],
)
def test_an_engine_on_a_gpu_calls_a_library(package: str, library: Library, name: str, tmp_path: Path) -> None:
    """In bfloat16, which is what libraries are given: the tokens of prompts are as likely as they are in torch."""
    if find_spec(package) is None:
        pytest.skip(f"{library.value} is not installed")
    folder = save(make_model(name), tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(decide, "installed", lambda: dict.fromkeys(Library, "left out"))
        expected = prompt_logprobs(folder, device="cuda", dtype="bfloat16")
    calls: list[torch.Size] = []

    def load(library: Library) -> LibraryCall:
        nonlocal calls
        library_call, calls = counted(load_library_call(library))
        return library_call

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model_step, "load_library_call", load)
        found = prompt_logprobs(folder, device="cuda", dtype="bfloat16")
    assert calls
    assert float((found - expected).abs().mean()) < 0.1 < 1.0 < float(expected.std())


def prompt_logprobs(folder: Path, **options: Any) -> torch.Tensor:
    """The log probabilities of the tokens of `PROMPTS` after those before them."""
    from piecegraph import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with load_hybrid(folder, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    found = []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, likely in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert likely is not None
            found.append(likely[token].logprob)
    return torch.tensor(found)


def test_padding_leaves_a_state_as_it_is() -> None:
    """What stands in for mamba-ssm is given time steps of 0 for rows that are none."""
    seen: list[torch.Tensor] = []

    def function(x: torch.Tensor, dt: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(dt)
        return mamba_chunk_scan_combined(x, dt, *args, **kwargs)

    check("mamba_mixer", mamba_mixer, MambaSsm(function), lens=[(0, 9), (0, 4)])
    (steps,) = seen
    assert steps.shape[:2] == (2, 9) and bool((steps[1, 4:] == 0).all()) and bool((steps[0] > 0).all())
    assert F.pad(steps[1, :4], (0, 0, 0, 5)).equal(steps[1])
