"""Random programs of views, writes in place and cuts, as modules: what a compiled model must compute as they do."""

from __future__ import annotations

import linecache
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_library = torch.library.Library("pgalias", "DEF")  # kept alive: ops live as long as it does

_library.define("cut(Tensor x) -> Tensor")
_library.impl("cut", lambda x: torch.cos(x), "CompositeExplicitAutograd")
_library.impl("cut", lambda x: torch.empty_like(x), "Meta")
_library.define("write(Tensor x, Tensor(a!) out) -> ()")
_library.impl("write", lambda x, out: [out.add_(x.sum() * 0.1), None][1], "CompositeExplicitAutograd")
_library.impl("write", lambda x, out: None, "Meta")
_library.define("part(Tensor(a) x) -> Tensor(a)")
_library.impl("part", lambda x: x[1:], "CompositeExplicitAutograd")
_library.impl("part", lambda x: x[1:], "Meta")

SPLIT_OPS = ("pgalias::cut",)
ALL_SPLIT_OPS = ("pgalias::cut", "pgalias::write", "pgalias::part")
WIDTH = 8

Shape = tuple[str, ...]  # sizes as Python expressions over `n`

_VIEWS: tuple[tuple[str, Any], ...] = (
    ("{a}[:, :4]", lambda s: (s[0], "4")),
    ("{a}[:, 4:]", lambda s: (s[0], "4")),
    ("{a}[..., ::2]", lambda s: (*s[:-1], "4")),
    ("{a}.view(-1, 2, 4)", lambda s: None),
    ("{a}.transpose(0, 1)", lambda s: (s[1], s[0])),
    ("{a}.unsqueeze(0).squeeze(0)", lambda s: s),
    ("{a}.chunk(2, -1)[1]", lambda s: (*s[:-1], "4")),
    ("torch.split({a}, [3, 1, 4], -1)[2]", lambda s: (*s[:-1], "4")),
    ("{a}.unbind(-1)[3]", lambda s: s[:-1]),
    ("{a}.detach()", lambda s: s),
    ("{a}.data", lambda s: s),
    ("torch.narrow({a}, 1, 2, 4)", lambda s: (s[0], "4")),
    ("{a}.as_strided(({a}.shape[0], 3), (8, 2), 1)", lambda s: (s[0], "3")),
    ("{a}.reshape({a}.shape[0], 8)", lambda s: s),
    ("{a}.contiguous()", lambda s: s),
    ("{a}.to(torch.float32)", lambda s: s),
    ("{a}.expand_as(x)", lambda s: s),
    ("{a}.flatten(1)", lambda s: s),
    ("{a}.permute(1, 0)", lambda s: (s[1], s[0])),
    ("{a}.diagonal()", lambda s: None),
    ("{a}[1]", lambda s: s[1:]),
)
"""Of a whole tensor `[n, 8]`, and the shape; None: a shape nothing more is made of."""

_NEW = ("{a} * 0.5", "torch.tanh({a})", "{a}.clone()", "{a} + {b}.sum() * 0.1", "{a} * 1", "{a} + 0", "{a}.float() * 2")
_WRITES = (
    "{a} += 0.25",
    "{a} *= {b}.mean()",
    "{a}.add_({b}.sum() * 0.1)",
    "{a}.mul_(0.75)",
    "{a}[:1] += 1.0",
    "{a}[0] = {b}.mean()",
    "{a}.copy_(torch.cos({a}))",
    "{a}.masked_fill_({a} > 0.5, 0.125)",
    "F.relu({a}, inplace=True)",
    "{a}.zero_()",
    "{a}.fill_(0.5)",
    "{a}.clamp_(max=0.25)",
    "{a}.index_put_((torch.tensor([0]),), {b}.mean())",
    "{a}.index_add_(0, torch.tensor([1]), torch.ones_like({a}[:1]))",
    "{a}[:2].zero_()",
)
_WHOLE_WRITES = (
    "torch.add({a} * 0.5, {b}.sum() * 0.1, out={a})",
    "{a}.scatter_(0, torch.zeros(1, {a}.shape[1], dtype=torch.long), 2.0)",
)
_CUTS = ("{v} = torch.ops.pgalias.cut({a})", "{v} = torch.ops.pgalias.cut({a})", "torch.ops.pgalias.write({b}, {a})")
_VIEW_CUT = "{v} = torch.ops.pgalias.part({a})"


@dataclass(slots=True)
class Program:
    """A forward of `x [n, 8]` and `y [n, 8]`, over a buffer `[8, 8]`."""

    seed: int
    lines: list[str] = field(default_factory=list)

    @property
    def source(self) -> str:
        return "def forward(self, x, y):\n" + "".join(f"    {line}\n" for line in self.lines)

    def module(self) -> nn.Module:
        """A module that computes it."""
        filename = f"<alias program {self.seed} {hash(self.source)}>"
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(keepends=True), filename)
        namespace: dict[str, Any] = {"torch": torch, "F": nn.functional}
        exec(compile(self.source, filename, "exec"), namespace)
        kind = type("Drawn", (nn.Module,), {"forward": namespace["forward"]})
        made: nn.Module = kind()
        buffer = torch.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH)
        made.register_buffer("buffer", buffer)
        made.register_buffer("top", buffer[:3])  # of the same memory
        return made


def draw(seed: int, num_lines: int = 12, *, views_between: bool = False) -> Program:
    """A program; the same for the same seed. With `views_between`, a split op may return a view."""
    rng = random.Random(seed)
    program = Program(seed)
    shapes: dict[str, Shape | None] = {"x": ("n", "8"), "y": ("n", "8")}

    def name() -> str:
        return f"v{len(shapes)}"

    def add(line: str, variable: str | None = None, shape: Shape | None = None) -> None:
        program.lines.append(line)
        if variable is not None:
            shapes[variable] = shape

    add("v2 = x * 0.5", "v2", ("n", "8"))
    if rng.random() < 0.5:
        add("v3 = self.buffer", "v3", ("8", "8"))
    if rng.random() < 0.2:
        add(f"{name()} = self.top", name(), ("3", "8"))
    inputs_too = rng.random() < 0.4
    for _ in range(num_lines):
        mine = [v for v in shapes if inputs_too or v not in ("x", "y")]
        whole = [v for v in mine if shapes[v] is not None and len(shapes[v] or ()) == 2 and (shapes[v] or ())[1] == "8"]
        a, b, v = rng.choice(mine), rng.choice(list(shapes)), name()
        kind = rng.random()
        if kind < 0.3:
            a = rng.choice(whole)
            text, shape = rng.choice(_VIEWS)
            if text.endswith("expand_as(x)") and (shapes[a] or ())[0] != "n":
                continue
            add(f"{v} = {text.format(a=a)}", v, shape(shapes[a]))
        elif kind < 0.4:
            add(f"{v} = {rng.choice(_NEW).format(a=a, b=b)}", v, shapes[a])
        elif kind < 0.7:
            writes = _WRITES + (_WHOLE_WRITES if a in whole else ())
            add(rng.choice(writes).format(a=a, b=b))
        else:
            if views_between and rng.random() < 0.3:
                a = rng.choice(whole)
                add(_VIEW_CUT.format(v=v, a=a), v, None)
                continue
            text = rng.choice(_CUTS)
            made = v if text.startswith("{v}") else None
            add(text.format(v=v, a=a, b=b), made, shapes[a])
    results = rng.sample([v for v in shapes if v not in ("x", "y")], k=min(3, len(shapes) - 2))
    add(f"return {', '.join(results)}, " + " + ".join(f"{v}.sum()" for v in shapes))
    return program
