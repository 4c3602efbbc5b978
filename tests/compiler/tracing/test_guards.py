"""The audit: every guard has a class with a reason, and an unknown kind is an error."""

from __future__ import annotations

import pytest

import piecegraph as pg
from piecegraph.compiler.tracing.guards import REASONS, audit_guards, classify_guard
from piecegraph.errors import UnknownGuard
from tests.compiler.toy import DIMS, SPLIT_OPS, Decoder, batch


@pytest.mark.parametrize(
    ("kind", "subject", "scope"),
    [
        ("TENSOR_MATCH", "args[0]", "argument"),
        ("DICT_KEYS_MATCH", "kwargs", "argument"),
        ("TENSOR_MATCH", "L['args'][0]", "argument"),
        ("TENSOR_MATCH", "module._parameters['weight']", "module"),
        ("CONSTANT_MATCH", "L['module'].training", "module"),
        ("CLOSURE_MATCH", "G['torch'].nn.functional.silu", "code"),
        ("GRAD_MODE", "", "state"),
        ("SHAPE_ENV", "", "size"),
    ],
)
def test_guards_fall_into_classes(kind: str, subject: str, scope: str) -> None:
    assert classify_guard(kind, subject).scope == scope


def test_a_guard_of_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(UnknownGuard, match="guarded x with TENSOR_SUBCLASS_METADATA_MATCH, a kind piecegraph has no"):
        classify_guard("TENSOR_SUBCLASS_METADATA_MATCH", "x")


def test_the_audit_of_a_model_prints_counts_and_reasons() -> None:
    config = pg.CompileConfig(split_ops=SPLIT_OPS, compiler="eager")
    audit = pg.compile(Decoder(), config, dynamic_dims=DIMS, example_inputs=batch(4)).guards
    text = str(audit)
    assert len(audit) == sum(kinds.total() for kinds in audit.by_scope().values()) > 20
    for scope in audit.by_scope():
        assert REASONS[scope] in text
    assert {"argument", "module", "code", "state"} <= set(audit.by_scope())
    assert str(audit_guards([])).startswith("0 guards")
