"""Query and key are normed and rotated as kernels load them: by decode on the way, by the K/V write in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from piecegraph.runner.attention.triton.reference import rotated
from tests.interpreter import interpreted_case
from tests.runner.attention.rotary_case import (
    NORMS,
    assert_rotated,
    check_rotated_cache,
    keys_of,
    make_rotary,
    make_rotary_case,
    rotate,
    with_shifted_keys,
)

DECODES = [(9, 1), (0, 1), (35, 1)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def merged(*parts: torch.Tensor) -> list[torch.Tensor]:
    """The same, as slices of one projection's output."""
    whole = torch.cat([part.flatten(1) for part in parts], dim=1)
    slices = whole.split([part[0].numel() for part in parts], dim=1)
    return [part.unflatten(1, like.shape[1:]) for part, like in zip(slices, parts, strict=True)]


def check_decode(*, num_launches: int = 1, num_splits: int = 2, is_shifted: bool = False, **kind: object) -> None:
    """Query and key stay as they were, so it may be repeated."""
    from piecegraph.runner.attention.triton.kernels.decode import decode_call
    from piecegraph.runner.attention.triton.kernels.workspace import SplitWorkspace
    from piecegraph.runner.attention.triton.layouts.decode_config import DecodeConfig

    case = make_rotary_case(**{"lens": DECODES, **kind})  # type: ignore[arg-type]
    case = with_shifted_keys(case) if is_shifted else case
    batch, layer, raw = case.raw.metadata, case.raw.layer, case.raw
    query, key, value = merged(raw.query, raw.key, raw.value)
    num_partials = batch.num_reqs * layer.num_q_heads * num_splits
    workspace = SplitWorkspace.allocate(
        num_partials=num_partials, num_values=num_partials * layer.value_dim,
        num_counts=batch.num_reqs * layer.num_q_heads, device=query.device,
    )  # fmt: skip
    num_rows = case.rotated.expected.shape[0]
    tolerance = TOLERANCE[query.dtype]
    for _ in range(num_launches):
        out = query.new_full((query.shape[0], layer.num_q_heads, layer.value_dim), float("nan"))
        decode_call(
            raw.call(out, case.rotary)._replace(query=query, key=key, value=value), raw.kv_cache,
            seq_lens=batch.seq_lens, block_table=batch.block_table, slot_mapping=batch.slot_mapping,
            num_reqs=batch.num_reqs, workspace=workspace,
            config=DecodeConfig(block_n=16, num_warps=4, num_stages=2, num_splits=num_splits, min_split_len=16),
        ).launch()  # fmt: skip
        torch.testing.assert_close(out[:num_rows].double(), case.rotated.expected, atol=tolerance, rtol=1e-3)
        assert out[num_rows:].isnan().all()
    assert torch.equal(query, raw.query)
    assert torch.equal(key, raw.key)
    check_rotated_cache(case)


def check_write(
    *, first_row: int = 0, num_left: int = 0, heads: int = 1, is_shifted: bool = False, **kind: object
) -> None:
    """Rows `first_row` to the last but `num_left`; padding among them is rotated and not written. `heads`: of each
    program, which those of longer batches take."""
    from piecegraph.runner.attention.triton.kernels.kv_write import kv_write_call

    case = make_rotary_case(**{"lens": [(0, 37 - first_row)], "num_padded": first_row, **kind})  # type: ignore[arg-type]
    case = with_shifted_keys(case) if is_shifted else case
    raw = case.raw
    query, key, value = merged(raw.query, raw.key, raw.value)
    num_tokens = len(query) - num_left
    raw.metadata.slot_mapping.copy_(raw.metadata.slot_mapping.roll(first_row))
    call = kv_write_call(
        key, value, kv_cache=raw.kv_cache, slot_mapping=raw.metadata.slot_mapping, first_row=first_row,
        num_tokens=num_tokens, query=query, rotary=case.rotary,
    )  # fmt: skip
    assert call.arguments["heads"] == 1
    grid = (-(-call.grid[0] // heads), *call.grid[1:])
    call._replace(grid=grid, arguments={**call.arguments, "heads": heads}).launch()
    rows = slice(first_row, num_tokens)
    assert_rotated(query[rows], case.rotated.query[rows])
    assert torch.equal(query[:first_row], raw.query[:first_row])
    assert torch.equal(query[num_tokens:], raw.query[num_tokens:])
    assert torch.equal(key, raw.key)
    slots = raw.metadata.slot_mapping[rows]
    is_real = slots >= 0
    written = keys_of(raw.kv_cache)
    assert_rotated(written[slots[is_real]], case.rotated.key[rows][is_real])
    assert torch.equal(raw.kv_cache.value.flatten(0, 1)[slots[is_real]], raw.value[rows][is_real])
    assert int((~written.isnan()).any(-1).any(-1).sum()) == int(is_real.sum()) > 0


KINDS: dict[str, dict[str, Any]] = {
    **{name: {"norm": name} for name in NORMS},
    "dim 64": {"key_dim": 64, "value_dim": 64, "norm": "norm"},
    "dim 80, 32 of it rotated": {"key_dim": 80, "value_dim": 80, "rotary_dim": 32},
    "dim 128": {"key_dim": 128, "value_dim": 128, "norm": "norm"},
    "dim 256, normed and half of it rotated": {
        "key_dim": 256, "value_dim": 256, "rotary_dim": 128, "norm": "norm of 1 + weight",
    },
    "dim 12, 6 of it rotated": {"key_dim": 12, "value_dim": 20, "rotary_dim": 6, "norm": "norm"},
    "two numbers": {"rotary_dim": 2},
    "no groups": {"num_q_heads": 2, "norm": "norm"},
    "groups of 3": {"num_q_heads": 6, "norm": "norm"},
    "float16": {"dtype": torch.float16, "key_dim": 64, "value_dim": 64, "norm": "norm"},
    "blocks of three": {"block_size": 3},
}  # fmt: skip

CASES = {
    **{f"decode: {name}": partial(check_decode, **kind) for name, kind in KINDS.items()},
    **{f"write: {name}": partial(check_write, **kind) for name, kind in KINDS.items()},
    "decode: padded requests": partial(check_decode, lens=[*DECODES, (0, 0), (0, 0)], num_padded=2, norm="norm"),
    "decode: twice": partial(check_decode, num_launches=2, norm="norm"),
    "decode: one split": partial(check_decode, num_splits=1, norm="norm"),
    "decode: more heads than a program takes": partial(
        check_decode, num_q_heads=70, num_kv_heads=1, lens=[(20, 1)], norm="norm"
    ),
    "decode: window, softcap and sinks": partial(check_decode, window=7, softcap=2.0, has_sinks=True, norm="norm"),
    "decode: shifted keys": partial(
        check_decode, is_shifted=True, norm="norm", num_launches=2, key_dim=12, value_dim=8
    ),
    "write: shifted keys": partial(check_write, is_shifted=True, norm="norm", heads=2, key_dim=12, value_dim=8),
    "write: some rows": partial(check_write, first_row=3, num_left=2, norm="norm"),
    "write: heads two by two": partial(check_write, heads=2, norm="norm"),
    "write: as many heads as leave one over": partial(check_write, heads=4, num_q_heads=6, first_row=3, num_left=2),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_definition(name: str) -> None:
    interpreted_case(__name__, name)


@pytest.mark.parametrize("rotary_dim", [8, 4, 2])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_reference_equals_the_definition(norm: str, rotary_dim: int, dtype: torch.dtype) -> None:
    rotary = make_rotary(5, 8, rotary_dim=rotary_dim, **NORMS[norm])
    query, key = torch.randn(5, 4, 8).to(dtype), torch.randn(5, 2, 8).to(dtype)
    before = query.clone(), key.clone()
    for found, x, weight in zip(
        rotated(query, key, rotary), (query, key), (rotary.q_norm_weight, rotary.k_norm_weight), strict=True
    ):
        assert found.dtype == dtype
        assert_rotated(found, rotate(x, rotary, weight))
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])


def test_the_reference_takes_the_rows_of_the_tables_it_is_told() -> None:
    rotary = make_rotary(5, 8)
    query, key = torch.randn(5, 4, 8), torch.randn(5, 2, 8)
    rows = slice(2, 4)
    some, whole = rotated(query[rows], key[rows], rotary, rows), rotated(query, key, rotary)
    assert all(torch.equal(part, all_rows[rows]) for part, all_rows in zip(some, whole, strict=True))
