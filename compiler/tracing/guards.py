"""The audit of Dynamo's guards: which are not checked per call, and why that is safe.

A serving step cannot afford Dynamo's guards (hundreds of attribute checks), but dropping them
silently lets a stale graph give wrong answers. So each guard is put in one of five classes, each
with the reason it needs no check or the check that replaces it; a kind in no class is an error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from piecegraph.errors import UnknownGuard

REASONS = {  # class of guards -> why it is not evaluated per call
    "argument": "checked at every call: structure, dtype, device, declared and fixed sizes, and constants "
    "of the arguments are compared with what was traced; and, where the graph writes to an argument or a buffer, "
    "that it shares no memory with another. Of a tensor's class and flags nothing is compared",
    "size": "checked once per combination of sizes: the relations Dynamo derived are evaluated when a "
    "combination is first seen",
    "module": "fixed by promise: a CompiledModel is made from a module in its final state. That each parameter "
    "and buffer is still the bound tensor, in the same memory, is checked at every call; other attributes "
    "are read at trace time only, so compile again after changing one",
    "code": "fixed while the process runs: functions, classes, modules and globals of the traced source",
    "state": "autocast, the default dtype, deterministic algorithms and transforms of torch.func are compared at every "
    "call of the model (a captured graph is as it was captured); gradients are off, by us, around trace and call. The "
    "default device and torch function modes count when the model is traced, and not after that",
}

_STATE = frozenset(
    "AUTOGRAD_SAVED_TENSORS_HOOKS DEFAULT_DEVICE DETERMINISTIC_ALGORITHMS DUAL_LEVEL FSDP_TRAINING_STATE "
    "FUNCTORCH_STACK_MATCH GLOBAL_STATE GRAD_MODE TORCH_FUNCTION_STATE".split()
)
_VALUE = frozenset(
    "BOOL_MATCH BUILTIN_MATCH CLASS_MATCH CLOSURE_MATCH CONSTANT_MATCH CONSTANT_SUBCLASS_MATCH COUNT_ITERATOR_MATCH "
    "DICT_CONTAINS DICT_KEYS_MATCH DICT_NOT_CONTAINS DICT_VERSION DISPATCH_KEY_SET_MATCH DUPLICATE_INPUT "
    "EMPTY_NN_MODULE_HOOKS_DICT EQUALS_MATCH FUNCTION_MATCH HASATTR ID_MATCH MAPPING_KEYS_CHECK MODULE_MATCH "
    "NN_MODULE NONE_MATCH NOT_NONE_MATCH NOT_PRESENT_IN_GENERIC_DICT RANGE_ITERATOR_MATCH SEQUENCE_LENGTH "
    "SET_CONTAINS SET_NOT_CONTAINS TENSOR_MATCH TUPLE_ITERATOR_LEN TYPE_MATCH WEAKREF_ALIVE".split()
)


@dataclass(frozen=True, slots=True)
class GuardRecord:
    """One guard: Dynamo's kind, the guarded expression, and the class whose reason makes dropping it safe."""

    kind: str
    subject: str
    scope: str  # a key of REASONS


@dataclass(frozen=True, slots=True)
class GuardAudit:
    """All guards of one trace. `print(audit)` gives a table; iterate for the records."""

    records: tuple[GuardRecord, ...]
    note: str = ""

    def __iter__(self) -> Iterator[GuardRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def by_scope(self) -> dict[str, Counter[str]]:
        """Count the guards: class -> kind -> number of guards."""
        counts: dict[str, Counter[str]] = {}
        for record in self.records:
            counts.setdefault(record.scope, Counter())[record.kind] += 1
        return counts

    def __str__(self) -> str:
        lines = [self.note] if self.note else [f"{len(self)} guards of Dynamo are not evaluated per call:"]
        for scope, kinds in sorted(self.by_scope().items()):
            lines.append(f"  {scope} ({kinds.total()}): {REASONS[scope]}")
            lines.extend(f"    {count:5d} {kind}" for kind, count in kinds.most_common())
        return "\n".join(lines)


def classify_guard(kind: str, subject: str) -> GuardRecord:
    """Return the record of one guard of a function `def call(args, kwargs, sized)` closed over `module`.

    Raises `UnknownGuard` for a kind without a class, because there is no reason why dropping it is safe.
    """
    if kind == "SHAPE_ENV":
        return GuardRecord(kind, subject, "size")
    if kind in _STATE:
        return GuardRecord(kind, subject, "state")
    if kind not in _VALUE:
        raise UnknownGuard(
            f"Dynamo guarded {subject or 'the process'} with {kind}, a kind piecegraph has no reason to drop. "
            "Report it with the model; tensor subclasses and opaque objects cannot be inputs or weights yet."
        )
    root = re.match(r"(?:L\[')?(\w+)", subject)
    name = root.group(1) if root else ""
    # What is neither an argument nor the module is reached through globals, closures and types: source, not data.
    scope = {"args": "argument", "kwargs": "argument", "sized": "argument", "module": "module"}.get(name, "code")
    return GuardRecord(kind, subject, scope)


def audit_guards(entries: Sequence[tuple[str, str]]) -> GuardAudit:
    """Return the audit of (kind, subject) pairs. Raises `UnknownGuard`."""
    return GuardAudit(tuple(classify_guard(kind, subject) for kind, subject in entries))
