"""Everything that a trace read besides the arguments of the call. A plan is valid while all of it is unchanged.

Note [the key is what was read]: the key of a plan holds what is known of a model before a trace (`plan_factors`).
The plan holds whatever else the trace read, as facts that are compared before the plan is used. Each guard of Dynamo
gives a fact, also those that Dynamo itself leaves out because it assumes that the standard library never changes
(`os.environ` is in it). A read about which no fact can be stated makes the plan unfit for the cache, and the reason is
reported. Tensors that were read from anywhere but the module's parameters and buffers are compared by their bytes,
and the tensors at those places are bound when the plan is loaded.
"""

from __future__ import annotations

import abc
import argparse
import builtins
import dis
import functools
import hashlib
import re
import sys
import types
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piecegraph import environment
from piecegraph.compiler.torch_compat.versions import attribute_guard, source_name
from piecegraph.compiler.tracing.class_factors import class_facts
from piecegraph.compiler.tracing.code_reads import (
    codes_within,
    creates_unordered,
    first_absent,
    global_chains,
    has_own_instance_check,
    imported_modules,
    instance_checks_fact,
    is_function_of_state,
    reads_order_of,
    registered_fact,
    result_fact,
    values_along,
)
from piecegraph.compiler.tracing.dynamo import guard_name
from piecegraph.compiler.tracing.python_kernels import has_python_kernels, own_function_fact, python_kernels_fact
from piecegraph.compiler.tracing.read_facts import FACTS as FACTS_OF_VALUES
from piecegraph.compiler.tracing.read_facts import (
    KIND_OF_GUARD,
    NotComparable,
    class_name,
    is_library_module,
    type_fact,
)
from piecegraph.compiler.tracing.read_paths import (
    MISSING,
    UNTOUCHED,
    Missing,
    ReadTree,
    Step,
    UnknownReadExpression,
    has_no_stable_identity,
    modules_by_dynamo_name,
    resolve_places,
)

_IN_THE_KEY = re.compile(
    r"(?:L\['module'\]|module)(?:\._modules\['[^']*'\])*"
    r"(?:\.training|\._modules|\.(?:_parameters|_buffers)(?:\['[^']*'\])?|\._(?:forward|backward)\w*_hooks\w*)?"
)
"""Dynamo's names for parts of the module that `model_factors` has in the key: submodules, parameters and buffers."""

_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
"""Classes of the standard library whose objects have the attributes that a program gives them."""

_SUBCLASSES = "__subclasses__"

_WITHOUT_PLACE = frozenset(
    "AUTOGRAD_SAVED_TENSORS_HOOKS DEFAULT_DEVICE DETERMINISTIC_ALGORITHMS DUAL_LEVEL FSDP_TRAINING_STATE "
    "FUNCTORCH_STACK_MATCH GLOBAL_STATE GRAD_MODE SHAPE_ENV TORCH_FUNCTION_STATE".split()
)
"""Kinds of guards on sizes, and on the state of the process, which `process_settings` has in the key."""


@dataclass(frozen=True, slots=True)
class ReadFact:
    """One fact about one place. `kind` is a key of `FACTS`, "members", or "same" (as the place with index `detail`)."""

    place: int
    kind: str
    detail: Any
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedReads:
    """Everything a trace read, and the reasons why some of it cannot be compared."""

    places: tuple[tuple[int, Step], ...] = ()
    facts: tuple[ReadFact, ...] = ()
    identities: tuple[tuple[int, int], ...] = ()  # (place, number): places with equal numbers hold one object
    files: tuple[str, ...] = ()  # source files of functions and classes
    tensors: Mapping[str, int]  # places of tensors, by Dynamo's expression
    not_comparable: tuple[str, ...] = ()  # why the plan cannot be kept


def kind_of(value: Any) -> type:
    """Return `value` if it is a class, else the class of `value`."""
    return value if isinstance(value, type) else type(value)


def _class_fact(value: Any, detail: Any = None) -> str:
    """Return a digest of the facts about the class of `value` and its metaclass."""
    kind = kind_of(value)
    text = repr([class_facts(kind), class_facts(type(kind))])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


FACTS = {
    **FACTS_OF_VALUES,
    "called": own_function_fact,
    "class": _class_fact,
    "instance checks": instance_checks_fact,
    "kernels": python_kernels_fact,
    "registered": registered_fact,
    "result": result_fact,
}


def traced_reads(
    guards: Iterable[Any],
    tensors: Iterable[str],
    module: Any,
    codes: Iterable[types.CodeType] = (),
    ops: Iterable[str] = (),
    functions: Iterable[Any] = (),
) -> TracedReads:
    """Return what a trace of `module` read.

    `guards` are Dynamo's, `tensors` the expressions of tensors that became constants of the graph, `codes` the
    functions that were traced, whose plain globals count, `ops` the ops that the graph calls (`namespace::name`),
    whose kernels count, and `functions` the functions outside libraries that it calls, with all that they read.
    """
    reading = _Reading(module, functions)
    for guard in guards:
        reading.guard(guard)
    reading.named_globals(codes)
    reading.kernels(ops)
    reading.unguarded_functions()
    for expression in tensors:
        reading.tensor(expression)
    return reading.done()


class _Reading:
    """A collector of facts: the wanted ones are noted first, and stated once all places are known."""

    def __init__(self, module: Any, functions: Iterable[Any] = ()) -> None:
        self._module = module
        self._unguarded = {id(each): each for each in functions}  # those of which no place is known yet
        self._functions = dict(self._unguarded)
        self._modules = modules_by_dynamo_name()
        self._tree = ReadTree()
        self._wanted: dict[tuple[int, str, Any], None] = {}
        self._tensors: dict[str, int] = {}
        self._not_comparable: dict[str, None] = {}
        self._files: set[str] = set()
        self._codes: Sequence[types.CodeType] = ()

    def guard(self, guard: Any) -> None:
        expression, kind = guard_name(guard), guard.guard_type
        if kind in _WITHOUT_PLACE or not expression:
            return
        if guard.has_value and (file := _file_of(guard.value)) is not None:
            self._files.add(file)
        if _IN_THE_KEY.fullmatch(expression) and kind not in ("ID_MATCH", "DUPLICATE_INPUT", "HASATTR"):
            return
        if kind == "HASATTR" and guard.has_value and _is_of_a_library(guard.value):
            return
        detail = _detail(guard)
        if kind == "HASATTR" and not detail:
            owner_and_name = attribute_guard(guard.orig_guard.originating_source)
            if owner_and_name is None:
                self._not_comparable[f"it asked for an attribute of {expression} that its guard does not name"] = None
                return
            expression, detail = owner_and_name[0], {"attr": owner_and_name[1]}
        place = self._place(expression)
        if place is None:
            return
        if guard.has_value and is_function_of_state(guard.value):
            self._wanted[place, "result", None] = None
        if guard.has_value and id(guard.value) in self._functions:
            self._wanted[place, "called", None] = None
            self._unguarded.pop(id(guard.value), None)
        if kind == "DUPLICATE_INPUT":
            other = self._place(source_name(detail["source_b"])) if "source_b" in detail else None
            if other is not None and other != place:
                self._wanted[place, "same", other] = None
            return
        fact = KIND_OF_GUARD.get(kind)
        if fact is None:
            self._not_comparable[f"it read {self._tree.name(place)}, and its guard {kind} cannot be compared"] = None
            return
        self._wanted[place, fact, next(iter(detail.values()), None)] = None
        if guard.has_value and (kind in ("TYPE_MATCH", "CLASS_MATCH") or _is_own_class(guard.value)):
            self._class_or_mapping(guard.value, place)

    def _class_or_mapping(self, value: Any, place: int) -> None:
        """Note facts that Dynamo assumes without a guard: methods and class attributes, and the keys of a mapping."""
        if kind_of(value).__module__ != "builtins":
            self._wanted[place, "class", None] = None
            if isinstance(value, type) and has_own_instance_check(value):
                self._wanted[place, "instance checks", None] = None
            is_open = type(value) in _NAMESPACES or not is_library_module(type(value).__module__)
            if not isinstance(value, type) and is_open and self._tree.root(place):
                self._wanted[place, "own names", None] = None  # a missing attribute has no guard
        if environment.is_environ_data(value):
            self._wanted[place, "names", None] = None
        elif isinstance(value, dict) and not is_library_module(self._tree.root(place)):
            self._wanted[place, "keys if comparable", None] = None  # a library's registries grow with what is imported

    def named_globals(self, codes: Iterable[types.CodeType]) -> None:
        """Note plain globals named by code outside libraries, and plain attributes of modules that it names."""
        modules = {file: name for name, each in list(sys.modules.items()) if (file := getattr(each, "__file__", None))}
        self._codes = [each for code in codes for each in codes_within(code)]
        for code in codes:
            module = modules.get(code.co_filename)
            if module is not None and not is_library_module(module):
                if any("_version" in each.co_names for each in codes_within(code)):
                    self._not_comparable[f"{code.co_qualname} reads _version, a count of writes in this process"] = None
                home = vars(sys.modules[module])
                root = self._tree.add(-1, ("module", module))
                if any(map(creates_unordered, codes_within(code))):
                    self._wanted[self._tree.add(-1, ("hash seed", None)), "value", None] = None
                self._named_reads(code, home, root)
                for name in code.co_names:
                    if isinstance(home.get(name), types.ModuleType) and not is_library_module(home[name].__name__):
                        owner = self._tree.add(root, ("attribute", name))
                        for attribute in code.co_names:
                            self._note_plain(vars(home[name]), attribute, owner)
                    self._note_plain(home, name, root)

    def _note_plain(self, home: Mapping[str, Any], name: str, owner: int) -> None:
        value = home.get(name, MISSING)
        if isinstance(value, bool | int | float | complex | str | bytes | list | tuple | dict | set | frozenset):
            self._wanted[self._tree.add(owner, ("attribute", name)), "value if comparable", None] = None

    def _named_reads(self, code: types.CodeType, home: Mapping[str, Any], root: int) -> None:
        """Add what `code` names and did not find, builtins, classes and imports: Dynamo has no guard on these."""
        for name in imported_modules(code):
            self._wanted[self._tree.add(-1, ("module", name)), "type", None] = None
        for chain in global_chains(code):
            absent = first_absent(home, chain)
            if absent is not None:
                self._wanted[self._along(root, chain[: absent + 1]), "type", None] = None
            if absent == 0:
                place = self._tree.add(self._tree.add(-1, ("builtins", None)), ("item", chain[0]))
                self._wanted[place, "value if comparable" if hasattr(builtins, chain[0]) else "type", None] = None
            for index, value in enumerate(values_along(home, chain)):
                self._named_value(value, self._along(root, chain[: index + 1]), chain[index + 1 : index + 2])
        if _SUBCLASSES in code.co_names and not self._has_subclasses(code, home):
            self._not_comparable[
                f"{code.co_qualname} calls {_SUBCLASSES} of a class that it does not name, and what that returned is "
                "not known"
            ] = None

    def _named_value(self, value: Any, place: int, then: tuple[str, ...]) -> None:
        """Add what code outside libraries reads of a class or a function that it names. `then`: the next name."""
        if isinstance(value, type) and then == (_SUBCLASSES,):
            self._wanted[self._tree.add(place, ("call", _SUBCLASSES)), "value", None] = None
        if _is_own_class(value):
            self._class_or_mapping(value, place)
        elif isinstance(value, abc.ABCMeta):
            self._wanted[place, "registered", None] = None
        elif is_function_of_state(value):
            self._wanted[place, "result", None] = None

    def _has_subclasses(self, code: types.CodeType, home: Mapping[str, Any]) -> bool:
        """Return whether each read of `__subclasses__` in `code` is of a class that it names."""
        named = 0
        for chain in global_chains(code):
            if _SUBCLASSES in chain:
                values = list(values_along(home, chain))
                named += len(values) == chain.index(_SUBCLASSES) and isinstance(values[-1], type)
        return bool(named == sum(each.argval == _SUBCLASSES for each in dis.get_instructions(code)))

    def _reads_order_of(self, place: int) -> bool:
        """Return whether traced code may read the order of the set at `place`, and not only look items up in it."""
        kind, name = self._tree.nodes[place][1]
        if not kind.endswith("attribute"):
            return True
        found = [each for code in self._codes if (each := reads_order_of(code, name)) is not None]
        return any(found) or not found

    def _along(self, place: int, names: Sequence[str]) -> int:
        for name in names:
            place = self._tree.add(place, ("attribute", name))
        return place

    def kernels(self, ops: Iterable[str]) -> None:
        """Add the kernels that Python code registered for `ops`: a trace runs them."""
        for name in ops:
            if has_python_kernels(name):
                self._wanted[self._tree.add(-1, ("op", name)), "kernels", None] = None

    def unguarded_functions(self) -> None:
        """Refuse functions that the graph calls and that no guard leads to."""
        for function in self._unguarded.values():
            name = getattr(function, "__qualname__", None) or class_name(type(function))
            self._not_comparable[f"the graph calls {name}, which no trace enters and no other process could find"] = (
                None
            )

    def tensor(self, expression: str) -> None:
        place = self._place(expression)
        if place is not None:
            self._tensors[expression] = place
            self._wanted[place, "contents", None] = None

    def _place(self, expression: str) -> int | None:
        try:
            return self._tree.place(expression, self._modules)
        except UnknownReadExpression as error:
            self._not_comparable[f"it read {error}, which no other process could find"] = None
            return None

    def done(self) -> TracedReads:
        nodes = tuple(self._tree.nodes)
        values, again = resolve_places(nodes, self._module), resolve_places(nodes, self._module)
        for place, (parent, (step, _)) in enumerate(nodes):
            if step == "dereferenced" and not isinstance(values[parent], weakref.ReferenceType):
                self._not_comparable[f"it read {self._tree.name(place)}, which another call may return anew"] = None
        facts = []
        for place in {place for place, kind, _ in self._wanted if kind.startswith("value")}:
            if type(values[place]) in (set, frozenset) and len(values[place]) > 1 and self._reads_order_of(place):
                self._wanted[place, "order", None] = None
        for place, kind, detail in self._wanted:
            try:
                text, kind, detail = _state_fact(values, place, kind, detail)
            except (NotComparable, RecursionError) as error:
                self._not_comparable[f"it read {self._tree.name(place)}, a {error}, which cannot be compared"] = None
            else:
                facts.append(ReadFact(place, kind, detail, text))
        is_lasting = [
            value is twin and not has_no_stable_identity(value) and value is not MISSING
            for value, twin in zip(values, again, strict=True)
        ]
        read = {fact.place for fact in facts}
        return TracedReads(
            places=nodes,
            facts=tuple(facts),
            identities=_identities(values, [place for place in sorted(read) if is_lasting[place]]),
            files=tuple(sorted(self._files)),
            tensors=self._tensors,
            not_comparable=tuple(self._not_comparable),
        )


def _is_of_a_library(value: Any) -> bool:
    """Return whether `value` is a module or a function of a library, which has the attributes of its version."""
    if isinstance(value, types.ModuleType):
        return is_library_module(value.__name__)
    return isinstance(value, types.FunctionType) and is_library_module(value.__module__ or "")


def _is_own_class(value: Any) -> bool:
    return isinstance(value, type) and not is_library_module(value.__module__)


def _state_fact(values: Sequence[Any], place: int, kind: str, detail: Any) -> tuple[str, str, Any]:
    """Return a fact's text, kind and detail. For a member that is not plain data, the fact lists all members."""
    value = values[place]
    may_be_type = kind.endswith(" if comparable")
    kind = kind.removesuffix(" if comparable")
    if isinstance(value, Missing):
        return "missing", kind, detail if kind in ("same", "member", "attribute", "own attribute") else None
    if may_be_type:
        try:
            return FACTS[kind](value, detail), kind, detail
        except (NotComparable, RecursionError):
            return type_fact(value), "type", None
    if kind == "same":
        return str(value is values[detail]), kind, detail
    if kind == "member" and type(detail) not in (bool, int, str, bytes, type(None)):
        return FACTS["value"](sorted(map(FACTS["value"], value, [None] * len(value))), None), "members", None
    return FACTS[kind](value, detail), kind, detail


def find_changed_read(
    places: Sequence[tuple[int, Step]], facts: Sequence[ReadFact], identities: Sequence[tuple[int, int]], module: Any
) -> tuple[str | None, list[Any]]:
    """Return the name of the first place whose value is not what a trace of `module` read, and all values now.

    The name is None where nothing changed.
    """
    values = resolve_places(places, module)
    for fact in facts:
        if not _holds(fact, values):
            tree = ReadTree(nodes=list(places))
            return tree.name(fact.place), values
    known: dict[int, int] = {}
    numbers: dict[int, int] = {}
    for place, number in identities:
        value = values[place]
        if value is UNTOUCHED:
            continue
        if known.setdefault(id(value), number) != number or numbers.setdefault(number, id(value)) != id(value):
            return f"which object {ReadTree(nodes=list(places)).name(place)} is", values
    return None, values


def _holds(fact: ReadFact, values: Sequence[Any]) -> bool:
    value = values[fact.place]
    if value is UNTOUCHED or (fact.kind == "same" and values[fact.detail] is UNTOUCHED):
        return True
    try:
        if isinstance(value, Missing):
            return fact.text == "missing"
        if fact.kind == "same":
            return str(value is values[fact.detail]) == fact.text
        if fact.kind == "members":
            return FACTS["value"](sorted(map(FACTS["value"], value, [None] * len(value))), None) == fact.text
        return FACTS[fact.kind](value, fact.detail) == fact.text
    except Exception:  # the value there may be of any kind, and raise anything
        return False


def _identities(values: Sequence[Any], places: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return each place with a number that is equal for places that hold the same object."""
    numbers: dict[int, int] = {}
    return tuple((place, numbers.setdefault(id(values[place]), len(numbers))) for place in places)


def _detail(guard: Any) -> Mapping[str, Any]:
    """Return what a guard names besides a value: the key, the attribute, the other source."""
    make = getattr(getattr(guard, "orig_guard", None), "create_fn", None)
    if not isinstance(make, functools.partial):
        return {}
    return {name: make.keywords[name] for name in ("key", "attr", "source_b") if name in make.keywords}


def _file_of(value: Any) -> str | None:
    """Return the source file of a function or a class written in Python; None for anything else."""
    if not isinstance(value, type | types.FunctionType):
        return None
    file = getattr(sys.modules.get(value.__module__ or ""), "__file__", None)
    return file if file is not None and file.endswith(".py") else None
