"""Small modules that read something beside their weights, and what changes it: what a key sees is tested over these.

A case is the source of a module: `SETUP` is what is read, `READ` an expression of `x` in `forward` that reads it, and
`CHANGE` what happens to it between two starts. `INIT` runs in `__init__`, where what is read is read once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import piecegraph as pg
from piecegraph.compiler.plans.plan_store import PlanStore
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.compiler.tracing.signature import ExampleCall
from piecegraph.compiler.tracing.trace import trace
from piecegraph.compiler.tracing.traced_reads import TracedReads
from tests.compiler.store.small_models import DIMS, SIZE

VARIABLE = "PIECEGRAPH_TEST_READ"

SOURCE = """
import collections, contextvars, dataclasses, enum, functools, math, os, re, sys, threading, types, typing, weakref
import numpy as np
import torch
from torch import nn

class Plain:
    pass

{setup}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear({size}, {size})
        {init}

    def forward(self, x):
        x = self.linear(x)
        return {read}

def change():
    {change}
"""


@dataclass(frozen=True)
class Case:
    """One read. `is_kept`: an unchanged start is a hit. `is_followed`: a changed one is one too, and right."""

    name: str
    setup: str
    read: str
    change: str
    init: str = "pass"
    is_kept: bool = True
    is_followed: bool = False

    def write(self, folder: Path) -> None:
        text = SOURCE.format(setup=self.setup, init=self.init, read=self.read, change=self.change, size=SIZE)
        (folder / f"{self.module}.py").write_text(text)

    @property
    def module(self) -> str:
        return f"reads_{self.name}"


def _case(name: str, setup: str, read: str, change: str, **more: Any) -> Case:
    return Case(name, setup, read, change, **more)


_TWO = f"torch.full(({SIZE},), 2.0)"
_THREE = f"torch.full(({SIZE},), 3.0)"
_G = "globals()"
_LIBRARY = (
    "N = 2\nLIBRARY = torch.library.Library('{0}', 'DEF'); LIBRARY.define('op(Tensor x) -> Tensor')\n"
    "LIBRARY.impl('op', lambda x: {2}, {1})\n"
)

_IN_GRAPH = (
    "@torch._dynamo.allow_in_graph\ndef F(x):\n    return x * N\n"
    "@torch._dynamo.allow_in_graph\ndef H(x):\n    return x * N.by\n"
    "def made(by):\n    @torch._dynamo.allow_in_graph\n    def f(x):\n        return x * by[0]\n    return f\n"
)

CASES = (
    # globals: numbers, containers, tensors, arrays
    _case("number", "A = 2.0", "x * A", "global A; A = 3.0"),
    _case("negative_zero", "A = 0.0", "torch.atan2(x * 0.0, torch.full_like(x, A))", "global A; A = -0.0"),
    _case("whole_or_not", "A = 2", "x * A / (2 if type(A) is int else 1)", "global A; A = 2.0"),
    _case("complex_number", "A = 2 + 1j", "(x * A).imag", "global A; A = 2 + 3j"),
    _case("number_of_other_kind", "A = True", "x * (A + 1) if A is True else x", "global A; A = 1"),
    _case("string", "A = 'two'", "x * (2 if A == 'two' else 3)", "global A; A = 'three'"),
    _case("list_length", "A = [0]", "x * len(A)", "A.append(0)"),
    _case("list_items", "A = [1.0, 2.0]", "x * sum(A)", "A[1] = 3.0"),
    _case("list_order", "A = [1.0, 2.0]", "x * A[0]", "A.reverse()"),
    _case("dict_length", "A = {'a': 1}", "x * len(A)", "A['b'] = 1"),
    _case("dict_items", "A = {'a': 1.0}", "x * sum(value for _, value in A.items())", "A['b'] = 1.0"),
    _case("dict_keys", "A = {2: 'a'}", "x * sum(A)", "A[3] = 'b'"),
    _case("dict_order", "A = {2.0: 0, 3.0: 0}", "x * next(iter(A))", "A[2.0] = A.pop(2.0)"),
    _case("dict_get", "A = {}", "x * A.get('by', 2.0)", "A['by'] = 3.0"),
    _case("dict_in", "A = {}", "x * (3.0 if 'by' in A else 2.0)", "A['by'] = 3.0"),
    _case("dict_of_dicts", "A = {'a': {'b': [1, 2]}}", "x * A['a']['b'][1]", "A['a']['b'][1] = 3"),
    _case("dict_by_tuple", "A = {(1, 'a'): 2.0}", "x * A[1, 'a']", "A[1, 'a'] = 3.0"),
    _case("dict_by_float", "A = {0.5: 2.0}", "x * A[0.5]", "A[0.5] = 3.0", is_kept=False),
    _case("ordered_dict", "A = collections.OrderedDict(a=2.0)", "x * A['a']", "A['a'] = 3.0"),
    _case("default_dict", "A = collections.defaultdict(lambda: 2.0, a=2.0)", "x * A['a']", "A['a'] = 3.0"),
    _case("counter", "A = collections.Counter('aa')", "x * A['a']", "A['a'] = 3"),
    _case("chain", "A = {'a': 2.0}; B = collections.ChainMap({}, A)", "x * B['a']", "A['a'] = 3.0"),
    _case("deque", "A = collections.deque([2.0])", "x * A[0]", "A[0] = 3.0"),
    _case("deque_length", "A = collections.deque([2.0])", "x * len(A)", "A.append(3.0)"),
    _case("set_in", "A = {1}", "x * (2 if 1 in A else 3)", "A.clear()"),
    _case("set_length", "A = {1}", "x * len(A)", "A.add(2)"),
    _case("set_items", "A = {1}", "x * sum(A)", "A.add(2)"),
    _case("set_order", "A = {0, 8}", "x * (next(iter(A)) + 1)", "global A; A = {8, 0}"),
    _case("set_order_of_self", "A = [0, 8]", "x * (next(iter(self.a)) + 1)", "A.reverse()", init="self.a = set(A)"),
    _case("frozen_set", "A = frozenset({1})", "x * (2 if 2 in A else 3)", "global A; A = frozenset({2})"),
    _case("range", "A = range(2)", "x * len(A)", "global A; A = range(3)"),
    _case("slice", "A = slice(0, 1)", "x * x[:, A].shape[1]", "global A; A = slice(0, 2)"),
    _case("tuple", "A = (1, (2, 3))", "x * A[1][1]", "global A; A = (1, (2, 4))"),
    _case(
        "named_tuple", "A = collections.namedtuple('T', 'a b')(2.0, 1)", "x * A.a", "global A; A = A._replace(a=3.0)"
    ),
    _case("typed_tuple", "class T(typing.NamedTuple):\n    a: float\nA = T(2.0)", "x * A.a", "global A; A = T(3.0)"),
    _case("tensor", f"A = {_TWO}", "x * A", f"global A; A = {_THREE}"),
    _case("tensor_in_place", f"A = {_TWO}", "x * A", "A.add_(1)"),
    _case("tensor_of_one", "A = torch.tensor(2.0)", "x * A", "A.add_(1)"),
    _case("tensor_shape", "A = torch.ones(2)", "x * A.shape[0]", "global A; A = torch.ones(3)"),
    _case("tensor_dtype", f"A = {_TWO}", "(x.double() * A).to(A.dtype)", "global A; A = A.double()"),
    _case("tensor_attribute", f"A = {_TWO}; A.by = 2.0", "x * A * A.by", "A.by = 3.0"),
    _case("tensor_in_list", f"A = [{_TWO}]", "x * A[0]", f"A[0] = {_THREE}"),
    _case("tensor_in_dict", f"A = {{'a': {_TWO}}}", "x * A['a']", f"A['a'] = {_THREE}"),
    _case("tensor_twice", f"A = {_TWO}; B = A", "x * A + B", "global B; B = A + 1"),
    _case("tensor_view", f"A = {_TWO}; B = A[:]", "x * B", "A.add_(1)"),
    _case("tensor_returned", f"A = {_TWO}", "(x * 2, A)[1] + x", "A.add_(1)"),
    _case("parameter", f"A = nn.Parameter({_TWO})", "x * A", "A.data.add_(1)"),
    _case("bits", "A = torch.zeros(1, dtype=torch.bool)", "torch.where(A, x, x * 2)", "A.fill_(True)"),
    _case("half", f"A = {_TWO}.bfloat16()", "x * A", "A.add_(1)"),
    _case("array", "A = np.full((4,), 2.0, np.float32)", "x * torch.from_numpy(A)", "A[:] = 3"),
    _case("array_other", "A = np.full((4,), 2.0, np.float32)", "x * torch.from_numpy(A)", "global A; A = A + 1"),
    _case("array_copied", "A = np.full((4,), 2.0, np.float32)", "x * torch.tensor(A)", "A[:] = 3"),
    _case("array_sum", "A = np.full((4,), 2.0, np.float32)", "x * torch.as_tensor(A.sum())", "A[:] = 3"),
    _case("array_shape", "A = np.ones(2)", "x * A.shape[0]", "global A; A = np.ones(3)"),
    _case("numpy_number", "A = np.float32(2)", "x * A", "global A; A = np.float32(3)"),
    _case("numpy_int", "A = np.int64(2)", "x * A", "global A; A = np.int64(3)"),
    _case("dtype", "A = torch.float64", "x.to(A).float() / 3 + x.to(A).element_size()", "global A; A = torch.float16"),
    # objects
    _case("attribute", "A = Plain(); A.by = 2.0", "x * A.by", "A.by = 3.0"),
    _case("attribute_missing", "A = Plain()", "x * getattr(A, 'by', 2.0)", "A.by = 3.0"),
    _case(
        "attribute_tried",
        "A = Plain()\ndef f():\n    try:\n        return A.k\n    except AttributeError:\n        return 2.0",
        "x * f()",
        "A.k = 3.0",
    ),
    _case("annotation", "def f(x: 2.0): pass", "x * f.__annotations__['x']", "f.__annotations__['x'] = 3.0"),
    _case("pattern", "A = re.compile('a')", "x * (2 if A.match('a') else 3)", "global A; A = re.compile('b')"),
    _case("has_attribute", "A = Plain()", "x * (3.0 if hasattr(A, 'by') else 2.0)", "A.by = 1"),
    _case("attribute_tensor", f"A = Plain(); A.t = {_TWO}", "x * A.t", "A.t = A.t + 1"),
    _case("attributes", "A = Plain(); A.by = 2.0", "x * vars(A)['by']", "A.by = 3.0"),
    _case("namespace", "A = types.SimpleNamespace(by=2.0)", "x * A.by", "A.by = 3.0"),
    _case("which_object", "A = Plain(); B = A", "x * (2.0 if A is B else 3.0)", "global B; B = Plain()"),
    _case("which_other", "A = Plain(); B = Plain()", "x * (2.0 if A is B else 3.0)", "global B; B = A"),
    _case("which_list", "A = []; B = []", "x * (2.0 if A is B else 3.0)", "global B; B = A"),
    _case("property", "class C:\n    n = 2.0\n    by = property(lambda self: C.n)\nA = C()", "x * A.by", "C.n = 3.0"),
    _case("slots", "class C:\n    __slots__ = ('by',)\nA = C(); A.by = 2.0", "x * A.by", "A.by = 3.0"),
    _case(
        "get_attribute",
        "class C:\n    def __getattr__(self, name):\n        return N\nN = 2.0\nA = C()",
        "x * A.by",
        "global N; N = 3.0",
    ),
    _case(
        "called",
        "class C:\n    by = 2.0\n    def __call__(self, x):\n        return x * self.by\nA = C()",
        "A(x)",
        "A.by = 3.0",
    ),
    _case(
        "bool_of",
        "class C:\n    n = 0\n    def __bool__(self):\n        return self.n > 0\nA = C()",
        "x * 2 if A else x",
        "A.n = 1",
    ),
    _case(
        "length_of",
        "class C:\n    n = 2\n    def __len__(self):\n        return self.n\nA = C()",
        "x * len(A)",
        "A.n = 3",
    ),
    _case("list_of_ones_own", "class C(list):\n    pass\nA = C([2.0])", "x * A[0]", "A[0] = 3.0"),
    _case("dict_of_ones_own", "class C(dict):\n    pass\nA = C(a=2.0)", "x * A['a']", "A['a'] = 3.0"),
    _case("int_of_ones_own", "class C(int):\n    pass\nA = C(2)", "x * int(A)", "global A; A = C(3)"),
    _case(
        "string_of_ones_own",
        "class C(str):\n    pass\nA = C('2')",
        "x * (2 if A == '2' else 3)",
        "global A; A = C('3')",
    ),
    _case("dataclass", "@dataclasses.dataclass\nclass C:\n    by: float = 2.0\nA = C()", "x * A.by", "A.by = 3.0"),
    _case(
        "frozen_dataclass",
        "@dataclasses.dataclass(frozen=True)\nclass C:\n    by: float = 2.0\nA = C()",
        "x * A.by",
        "global A; A = C(3.0)",
    ),
    _case(
        "nested_dataclass",
        "@dataclasses.dataclass\nclass B:\n    n: int = 2\n@dataclasses.dataclass\nclass C:\n"
        "    b: B = dataclasses.field(default_factory=B)\nA = C()",
        "x * A.b.n",
        "A.b.n = 3",
    ),
    _case("enum", "class E(enum.Enum):\n    A = 2\n    B = 3\nM = E.A", "x * M.value", "global M; M = E.B"),
    _case(
        "enum_is",
        "class E(enum.Enum):\n    A = 2\n    B = 3\nM = E.A",
        "x * (2 if M is E.A else 3)",
        "global M; M = E.B",
    ),
    _case("enum_of_int", "class E(enum.IntEnum):\n    A = 2\n    B = 3\nM = E.A", "x * M", "global M; M = E.B"),
    _case(
        "enum_of_string",
        "class E(str, enum.Enum):\n    A = 'a'\n    B = 'b'\nM = E.A",
        "x * (2 if M == 'a' else 3)",
        "global M; M = E.B",
    ),
    _case("enum_key", "class E(enum.Enum):\n    A = 2\n    B = 3\nT = {E.A: 2.0}", "x * T[E.A]", "T[E.A] = 3.0"),
    _case(
        "flag", "class E(enum.Flag):\n    A = 1\n    B = 2\nM = E.A", "x * (2 if E.B in M else 3)", "global M; M = E.B"
    ),
    _case("local_of_thread", "A = threading.local(); A.by = 2.0", "x * A.by", "A.by = 3.0"),
    _case("weak", "B = Plain(); B.by = 2.0; A = weakref.ref(B)", "x * A().by", "B.by = 3.0"),
    # functions and classes
    _case("function", "def f(x):\n    return x * 2", "f(x)", "global f; f = lambda x: x * 3"),
    _case("closure", "def make(by):\n    return lambda x: x * by\nF = make(2.0)", "F(x)", "global F; F = make(3.0)"),
    _case(
        "closure_tensor",
        f"def make(by):\n    return lambda x: x * by\nF = make({_TWO})",
        "F(x)",
        "F.__closure__[0].cell_contents.add_(1)",
    ),
    _case(
        "closure_list", "L = [2.0]\ndef make(by):\n    return lambda x: x * by[0]\nF = make(L)", "F(x)", "L[0] = 3.0"
    ),
    _case("default", "def f(x, by=2.0):\n    return x * by", "f(x)", "f.__defaults__ = (3.0,)"),
    _case("default_tensor", f"def f(x, by={_TWO}):\n    return x * by", "f(x)", "f.__defaults__[0].add_(1)"),
    _case("default_list", "def f(x, by=[2.0]):\n    return x * by[0]", "f(x)", "f.__defaults__[0][0] = 3.0"),
    _case("keyword_default", "def f(x, *, by=2.0):\n    return x * by", "f(x)", "f.__kwdefaults__['by'] = 3.0"),
    _case("function_attribute", "def f(x):\n    return x * f.by\nf.by = 2.0", "f(x)", "f.by = 3.0"),
    _case(
        "partial",
        "F = functools.partial(torch.mul, other=2.0)",
        "F(x)",
        "global F; F = functools.partial(torch.mul, other=3.0)",
    ),
    _case("partial_argument", f"F = functools.partial(torch.mul, {_TWO})", "F(x)", "F.args[0].add_(1)"),
    _case(
        "partial_of_own",
        "def f(by, x):\n    return x * by\nF = functools.partial(f, 2.0)",
        "F(x)",
        "global F; F = functools.partial(f, 3.0)",
    ),
    _case(
        "method",
        "class C:\n    by = 2.0\n    def f(self, x):\n        return x * self.by\nA = C(); F = A.f",
        "F(x)",
        "A.by = 3.0",
    ),
    _case(
        "cached",
        "N = 2.0\n@functools.lru_cache\ndef f():\n    return N",
        "x * f()",
        "global N; N = 3.0; f.cache_clear()",
    ),
    _case(
        "registry",
        "R = {}\ndef add(f):\n    R['f'] = f\n    return f\n@add\ndef f(x):\n    return x * 2",
        "R['f'](x)",
        "R['f'] = lambda x: x * 3",
    ),
    _case(
        "registry_of_classes",
        "class B:\n    by = 2.0\nclass C(B):\n    by = 3.0\nR = {'a': B}",
        "x * R['a'].by",
        "R['a'] = C",
    ),
    _case("class_attribute", "class C:\n    by = 2.0", "x * C.by", "C.by = 3.0"),
    _case("class_tensor", f"class C:\n    by = {_TWO}", "x * C.by", "C.by.add_(1)"),
    _case("class_dict", "class C:\n    by = {'a': 2.0}", "x * C.by['a']", "C.by['a'] = 3.0"),
    _case("class_of_object", "class C:\n    by = 2.0\nA = C()", "x * A.by", "C.by = 3.0"),
    _case("class_object", "class C:\n    by = Plain()\nC.by.n = 2.0", "x * C.by.n", "C.by.n = 3.0"),
    _case("class_inherits", "class B:\n    by = 2.0\nclass C(B):\n    pass\nA = C()", "x * A.by", "B.by = 3.0"),
    _case("class_inherits_late", "class B:\n    by = 2.0\nclass C(B):\n    pass\nA = C()", "x * A.by", "C.by = 3.0"),
    _case("metaclass", "class T(type):\n    by = 2.0\nclass C(metaclass=T):\n    pass", "x * C.by", "T.by = 3.0"),
    _case(
        "classmethod",
        "class C:\n    by = 2.0\n    @classmethod\n    def f(cls, x):\n        return x * cls.by",
        "C.f(x)",
        "C.by = 3.0",
    ),
    _case(
        "method_put_in_place",
        "class C:\n    def f(self, x):\n        return x * 2\nA = C()",
        "A.f(x)",
        "C.f = lambda self, x: x * 3",
    ),
    _case(
        "subclasses",
        "class C:\n    pass\nclass D(C):\n    pass\nA = D()",
        "x * (2 if isinstance(A, D) else 3)",
        "global A; A = C()",
    ),
    # the environment and the standard library
    _case("environment", "", f"x * float(os.environ['{VARIABLE}'])", f"os.environ['{VARIABLE}'] = '3'"),
    _case("environment_get", "", f"x * float(os.environ.get('{VARIABLE}', '1'))", f"os.environ['{VARIABLE}'] = '3'"),
    _case(
        "environment_default",
        "",
        f"x * float(os.environ.get('{VARIABLE}_NOT', '2'))",
        f"os.environ['{VARIABLE}_NOT'] = '3'",
    ),
    _case("environment_getenv", "", f"x * float(os.getenv('{VARIABLE}', '1'))", f"os.environ['{VARIABLE}'] = '3'"),
    _case(
        "environment_getenv_default",
        "",
        f"x * float(os.getenv('{VARIABLE}_NO', '2'))",
        f"os.environ['{VARIABLE}_NO'] = '3'",
    ),
    _case("environment_in", "", f"x * (2 if '{VARIABLE}' in os.environ else 3)", f"del os.environ['{VARIABLE}']"),
    _case(
        "environment_imported",
        "from os import environ, getenv",
        f"x * float(getenv('{VARIABLE}')) * float(environ['{VARIABLE}'])",
        f"os.environ['{VARIABLE}'] = '3'",
    ),
    _case("arguments_of_process", "sys.argv.append('2')", "x * float(sys.argv[-1])", "sys.argv[-1] = '3'"),
    _case("standard_library", "math.by = 2.0", "x * math.by", "math.by = 3.0"),
    _case("of_torch", "torch.by_of_test = 2.0", "x * torch.by_of_test", "torch.by_of_test = 3.0"),
    _case(
        "other_module",
        "m = types.ModuleType('m_of_test'); m.by = 2.0; sys.modules['m_of_test'] = m\nimport m_of_test",
        "x * m_of_test.by",
        "m.by = 3.0",
    ),
    # other modules with weights
    _case(
        "other_weights",
        f"A = nn.Linear({SIZE}, {SIZE}); nn.init.ones_(A.weight); nn.init.ones_(A.bias)",
        "A(x)",
        "nn.init.zeros_(A.bias)",
    ),
    _case("other_buffer", f"A = nn.Module(); A.register_buffer('b', {_TWO})", "x * A.b", "A.b.add_(1)"),
    _case("other_attribute", "A = nn.Dropout(0.5); A.by = 2.0", "x * A.by", "A.by = 3.0"),
    _case("other_mode", "A = nn.Identity().eval()", "x * (2 if A.training else 3)", "A.train()"),
    _case("other_hook", "A = nn.Identity()", "A(x)", "A.register_forward_hook(lambda m, a, out: out * 3)"),
    _case("other_child", "A = nn.Sequential(nn.ReLU())", "A(x)", "A.append(nn.Tanh())"),
    _case(
        "hook_of_all",
        "",
        "x * 2",
        "nn.modules.module.register_module_forward_hook(lambda m, a, out: out * 3 if type(m) is Model else None)",
    ),
    # what the model holds, read in `__init__` or in `forward`
    _case("init_number", "A = 2.0", "x * self.a", "global A; A = 3.0", init="self.a = A"),
    _case("init_tensor", f"A = {_TWO}", "x * self.a", "A.add_(1)", init="self.a = A"),
    _case("init_tensor_copied", f"A = {_TWO}", "x * self.a", "A.add_(1)", init="self.a = A.clone()"),
    _case(
        "init_buffer",
        f"A = {_TWO}",
        "x * self.a",
        "A.add_(1)",
        init="self.register_buffer('a', A.clone())",
        is_followed=True,
    ),
    _case(
        "init_environment",
        "",
        "x * self.a",
        f"os.environ['{VARIABLE}'] = '3'",
        init=f"self.a = float(os.environ['{VARIABLE}'])",
    ),
    _case(
        "init_array",
        "A = np.full((4,), 2.0, np.float32)",
        "x * self.a",
        "A[:] = 3",
        init="self.a = torch.from_numpy(A)",
    ),
    _case(
        "init_array_kept",
        "A = np.full((4,), 2.0, np.float32)",
        "x * torch.from_numpy(self.a)",
        "A[:] = 3",
        init="self.a = A",
        is_kept=False,
    ),
    _case("init_list", "A = [2.0]", "x * self.a[0]", "A[0] = 3.0", init="self.a = A"),
    _case("init_object", "A = Plain(); A.by = 2.0", "x * self.a.by", "A.by = 3.0", init="self.a = A"),
    _case("init_function", "A = [2.0]", "self.a(x)", "A[0] = 3.0", init="self.a = lambda x: x * A[0]"),
    _case("init_closure", "A = [2.0]", "self.a(x)", "A[0] = 3.0", init="by = A[0]; self.a = lambda x: x * by"),
    _case(
        "init_partial", "A = [2.0]", "self.a(x)", "A[0] = 3.0", init="self.a = functools.partial(torch.mul, other=A[0])"
    ),
    _case(
        "init_weight_attribute",
        "A = [2.0]",
        "x * self.linear.weight.by",
        "A[0] = 3.0",
        init="self.linear.weight.by = A[0]",
    ),
    _case("init_name_or_path", "A = [2.0]", "x * self.name_or_path", "A[0] = 3.0", init="self.name_or_path = A[0]"),
    _case(
        "model_class_number", "", "x * self.by", "Model.by = 3.0", init="type(self).by = getattr(type(self), 'by', 2.0)"
    ),
    _case("model_class_tensor", f"A = {_TWO}", "x * self.by", "A.add_(1)", init="type(self).by = A"),
    _case("model_class_object", "A = Plain(); A.by = 2.0", "x * self.by.by", "A.by = 3.0", init="type(self).by = A"),
    _case(
        "model_class_array",
        "A = np.full((4,), 2.0, np.float32)",
        "x * torch.from_numpy(self.by)",
        "A[:] = 3",
        init="type(self).by = A",
    ),
    _case(
        "model_hook",
        "A = [2.0]",
        "x",
        "A[0] = 3.0",
        init="self.linear.register_forward_hook(lambda m, a, out: out * A[0])",
    ),
    _case("model_mode", "A = [True]", "x * (2 if self.training else 3)", "A[0] = False", init="self.train(A[0])"),
    _case(
        "model_by_id", "A = {}; B = [2.0]", "x * A[id(self)]", "B[0] = 3.0", init="A[id(self)] = B[0]", is_kept=False
    ),
    # what no guard is on because it failed, or because nobody is supposed to change it
    _case(
        "composite_op",
        _LIBRARY.format("reads_ci", "'CompositeImplicitAutograd'", "x * N"),
        "torch.ops.reads_ci.op.default(x)",
        "global N; N = 3",
    ),
    _case(
        "fake_kernel",
        _LIBRARY.format("reads_fake", "'CompositeExplicitAutograd'", "x.repeat(N, 1)")
        + "LIBRARY.impl('op', lambda x: x.new_empty(x.shape[0] * N, x.shape[1]), 'Meta')",
        "torch.ops.reads_fake.op.default(x)",
        "global N; N = 3",
    ),
    _case(
        "kernel_of_unknown_function",
        "def add(k):\n    library = torch.library.Library('reads_made', 'DEF')\n"
        "    library.define('op(Tensor x) -> Tensor')\n"
        "    library.impl('op', lambda x: x * k[0], 'CompositeImplicitAutograd')\n    return library\n"
        "N = [2.0]\nLIBRARY = add(N)",
        "torch.ops.reads_made.op.default(x)",
        "N[0] = 3.0",
        is_kept=False,
    ),
    _case(
        "module_attribute_missing",
        "m = types.ModuleType('m_of_missing'); sys.modules['m_of_missing'] = m\nimport m_of_missing",
        "x * getattr(m_of_missing, 'by', 2.0)",
        "m.by = 3.0",
    ),
    _case(
        "module_has_attribute",
        "m = types.ModuleType('m_of_having'); sys.modules['m_of_having'] = m\nimport m_of_having",
        "x * (3.0 if hasattr(m_of_having, 'by') else 2.0)",
        "m.by = 3.0",
    ),
    _case("function_attribute_missing", "def f(): pass", "x * getattr(f, 'by', 2.0)", "f.by = 3.0"),
    _case(
        "weight_attribute_missing",
        "A = {}",
        "x * getattr(self.linear.weight, 'by', 2.0)",
        "A['by'] = 3.0",
        init="self.linear.weight.__dict__.update(A)",
    ),
    _case(
        "attribute_of_all_tensors",
        "",
        "x * (3.0 if hasattr(x, 'by_of_test') else 2.0)",
        "torch.Tensor.by_of_test = 3.0",
    ),
    _case("function_in_graph", _IN_GRAPH + "N = 2.0", "F(x)", "global N; N = 3.0"),
    _case("function_in_graph_closure", _IN_GRAPH + "N = [2.0]\nG = made(N)", "G(x)", "N[0] = 3.0"),
    _case("function_in_graph_of_object", _IN_GRAPH + "N = Plain(); N.by = 2.0", "H(x)", "N.by = 3.0", is_kept=False),
    _case("writes_counted", f"A = {_TWO}", "x * A._version", "A.add_(0)", is_kept=False),
    _case(
        "autocast_dtype",
        "def f(x):\n    with torch.autocast('cpu'):\n        return (x @ x.t()).float()",
        "f(x)",
        "torch.set_autocast_dtype('cpu', torch.float16)",
    ),
    _case("builtin", "import builtins\nbuiltins.by_of_test = 2.0", "x * by_of_test", "builtins.by_of_test = 3.0"),
    _case("builtin_shadowed", "", "x * abs(-3)", "global abs; abs = lambda number: 5"),
    _case(
        "namespace_tried",
        "A = types.SimpleNamespace()\ndef f():\n    try:\n        return A.k\n    except AttributeError:\n"
        "        return 2.0",
        "x * f()",
        "A.k = 3.0",
    ),
    _case(
        "import_tried",
        "sys.modules['tried_of_test'] = types.ModuleType('tried_of_test')\ndef f():\n    try:\n"
        "        import tried_of_test\n        return 2.0\n    except ImportError:\n        return 3.0",
        "x * f()",
        "del sys.modules['tried_of_test']",
    ),
    _case(
        "registered",
        "import abc\nclass A(abc.ABC):\n    pass",
        "x * (2.0 if isinstance(self, A) else 3.0)",
        "A.register(Model)",
    ),
    _case(
        "registered_with_a_library",
        "import collections.abc",
        "x * (2.0 if isinstance(self, collections.abc.Sequence) else 3.0)",
        "collections.abc.Sequence.register(Model)",
    ),
    _case(
        "registered_with_a_library_elsewhere",
        "import io\nclass Other:\n    pass",
        "x * (2.0 if issubclass(Other, io.IOBase) else 3.0)",
        "io.IOBase.register(Other)",
    ),
    _case(
        "subclasses_of_class",
        "class C:\n    pass",
        "x * len(C.__subclasses__())",
        "global D; D = type('D', (C,), {})",
    ),
    _case(
        "subclasses_of_unnamed",
        "class C:\n    pass\nA = [C]",
        "x * len(A[0].__subclasses__())",
        "global D; D = type('D', (C,), {})",
        is_kept=False,
    ),
    _case(
        "recursion_limit",
        "",
        "x * sys.getrecursionlimit()",
        "sys.setrecursionlimit(sys.getrecursionlimit() + 100)",
    ),
    _case(
        "recursion_limit_imported",
        "from sys import getrecursionlimit as limit",
        "x * limit()",
        "sys.setrecursionlimit(sys.getrecursionlimit() + 100)",
    ),
    _case(
        "recursion_limit_in_table",
        "T = {'limit': sys.getrecursionlimit}",
        "x * T['limit']()",
        "sys.setrecursionlimit(sys.getrecursionlimit() + 100)",
    ),
    _case(
        "instance_check",
        "N = 2\nclass T(type):\n    def __instancecheck__(cls, value):\n        return N == 3\n"
        "class A(metaclass=T):\n    pass",
        "x * (2.0 if isinstance(self, A) else 3.0)",
        "global N; N = 3",
    ),
    _case(
        "subclass_hook",
        "import abc\nN = 2\nclass A(abc.ABC):\n    @classmethod\n    def __subclasshook__(cls, kind):\n"
        "        return N == 3",
        "x * (2.0 if isinstance(self, A) else 3.0)",
        "global N; N = 3; abc._reset_caches(A)",
    ),
    _case(
        "bases",
        "class B:\n    pass\nclass C:\n    pass\nclass D(B):\n    pass\nA = D()",
        "x * (2.0 if isinstance(A, C) else 3.0)",
        "D.__bases__ = (C,)",
    ),
    _case("tensor_method", "", "x.relu()", "torch.Tensor.relu = lambda tensor: tensor * 5"),
    _case(
        "constructor_default",
        "class A:\n    def __init__(self, k=2.0):\n        self.k = k",
        "x * A().k",
        "A.__init__.__defaults__ = (3.0,)",
    ),
    _case(
        "field_default",
        "@dataclasses.dataclass\nclass A:\n    k: float = 2.0",
        "x * A().k",
        "A.__init__.__defaults__ = (3.0,)",
    ),
    _case(
        "default_factory",
        "N = 2.0\n@dataclasses.dataclass\nclass A:\n    k: float = dataclasses.field(default_factory=lambda: N)",
        "x * A().k",
        "global N; N = 3.0",
    ),
    # what no guard is on
    _case(
        "default_dtype",
        "",
        "x * torch.ones(1).element_size()",
        "torch.set_default_dtype(torch.float64)",
        init="self.float()",
    ),
    _case(
        "matmul_in_tf32",
        "",
        "x * (2 if torch.backends.cuda.matmul.allow_tf32 else 3)",
        "torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cuda.matmul.allow_tf32",
    ),
    _case(
        "deterministic",
        "",
        "x * (2 if torch.are_deterministic_algorithms_enabled() else 3)",
        "torch.use_deterministic_algorithms(True)",
    ),
    _case(
        "assumed_constant",
        "A = [2.0]\n@torch._dynamo.assume_constant_result\ndef f():\n    return A[0]",
        "x * f()",
        "A[0] = 3.0",
        is_kept=False,
    ),
)


def inputs() -> torch.Tensor:
    return torch.arange(3 * SIZE, dtype=torch.float32).reshape(3, SIZE) / 7 - 0.5


@dataclass(frozen=True)
class Start:
    """What the cache knows of a start before it traces, and what the model computes."""

    key: str | None
    result: torch.Tensor

    @classmethod
    def of(cls, model: Any) -> Start:
        config = pg.CompileConfig(passes=(), compile_workers=0)
        call = ExampleCall.of(model, (inputs(),), {}, DIMS)
        key = PlanStore.of(CompileCache(None, False), model, call, config).key
        with torch.no_grad():
            return cls(key, model(inputs()))

    def is_like(self, other: Start) -> bool:
        """Both compute the same."""
        return self.result.dtype == other.result.dtype and torch.equal(self.result, other.result)


def reads(model: Any) -> TracedReads:
    """What a trace of `model` reads."""
    return trace(model, (inputs(),), {}, DIMS).reads


@contextmanager
def as_it_was() -> Iterator[None]:
    """After the block, process-wide settings are what they were before it."""
    torch_settings = (
        torch.get_default_dtype(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cuda.flash_sdp_enabled(),
    )
    environment, arguments, limit = dict(os.environ), list(sys.argv), sys.getrecursionlimit()
    hooks = torch.nn.modules.module._global_forward_hooks
    os.environ[VARIABLE] = "2"
    try:
        yield
    finally:
        hooks.clear()
        if "relu" in vars(torch.Tensor):
            del torch.Tensor.relu
        if "by_of_test" in vars(torch.Tensor):
            del torch.Tensor.by_of_test  # type: ignore[attr-defined]
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[:] = arguments
        sys.setrecursionlimit(limit)
        torch.set_default_dtype(torch_settings[0])
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.matmul.allow_tf32 = torch_settings[1]
        torch.backends.cuda.enable_flash_sdp(torch_settings[2])


@contextmanager
def imported(case: Case, folder: Path) -> Iterator[ModuleType]:
    """The module of `case`, written to `folder`, which is on the path; afterwards nothing of it is left."""
    case.write(folder)
    importlib.invalidate_caches()
    with as_it_was():
        try:
            yield importlib.import_module(case.module)
        finally:
            sys.modules.pop(case.module, None)
