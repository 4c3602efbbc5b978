"""The table of docs/generation.md that compares with vLLM, made of the lists in runner/common/vllm_interface.py and
of our signatures. `python -m tests.vllm_table` writes it anew."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path

from piecegraph import LLM, CompletionOutput, RequestOutput, SamplingParams
from piecegraph.runner.common import vllm_interface as vllm
from tests import vllm_names

PAGE = Path(__file__).resolve().parent.parent / "docs" / "generation.md"
BEGIN, END = "<!-- vLLM: begin -->", "<!-- vLLM: end -->"


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """Names of one kind: vLLM's, ours, and what is said of those that differ or are missing."""

    title: str
    theirs: tuple[str, ...]
    ours: frozenset[str]
    different: Mapping[str, str]
    unavailable: Mapping[str, str]
    without_effect: frozenset[str] = frozenset()

    def verdict(self, name: str) -> tuple[str, str]:
        """`same`, `differs`, `no effect` or `not here`, and a word on it."""
        if name in self.ours:
            return ("differs", self.different[name]) if name in self.different else ("same", "")
        note = self.unavailable.get(name, "")
        return ("no effect" if name in self.without_effect else "not here"), note

    def faults(self) -> list[str]:
        """What of the lists contradicts our signatures."""
        theirs = set(self.theirs)
        found = [
            f"{name}: it is ours, so delete it from the unavailable" for name in self.unavailable if name in self.ours
        ]
        found += [
            f"{name}: it is not ours; say what to do instead" for name in theirs - self.ours - {*self.unavailable}
        ]
        found += [f"{name}: vLLM has none" for name in {*self.unavailable, *self.different} - theirs]
        found += [f"{name}: it differs, but is not ours" for name in self.different if name not in self.ours]
        return [f"{self.title}: {fault}" for fault in sorted(found)]


def _names(kind: type) -> frozenset[str]:
    """Public fields, properties and methods of a dataclass."""
    fields = {field.name for field in dataclasses.fields(kind)}
    return frozenset(fields | {name for name in vars(kind) if not name.startswith("_")})


def sections() -> tuple[Section, ...]:
    arguments = vllm.UNAVAILABLE_ARGUMENTS
    return (
        Section(
            "Arguments of `LLM`",
            vllm_names.VLLM_ARGUMENTS,
            frozenset(inspect.signature(LLM.__init__).parameters) - {"self", "unknown"},
            vllm.DIFFERENT_ARGUMENTS,
            {name: one.instead for name, one in arguments.items()},
            frozenset(name for name, one in arguments.items() if one.accepts_any),
        ),
        Section(
            "Fields of `SamplingParams`",
            vllm_names.VLLM_SAMPLING_PARAMS,
            _names(SamplingParams),
            vllm.DIFFERENT_SAMPLING_PARAMS,
            vllm.UNAVAILABLE_SAMPLING_PARAMS,
        ),
        Section(
            "Fields of `RequestOutput`",
            vllm_names.VLLM_OUTPUTS,
            _names(RequestOutput),
            vllm.DIFFERENT_OUTPUTS,
            vllm.UNAVAILABLE_OUTPUTS,
        ),
        Section(
            "Fields of `CompletionOutput`",
            vllm_names.VLLM_COMPLETIONS,
            _names(CompletionOutput),
            vllm.DIFFERENT_COMPLETIONS,
            vllm.UNAVAILABLE_COMPLETIONS,
        ),
        Section(
            "Methods of `LLM`",
            tuple(vllm.VLLM_METHODS),
            frozenset(name for name in dir(LLM) if not name.startswith("_")),
            vllm.DIFFERENT_METHODS,
            vllm.UNAVAILABLE_METHODS,
        ),
    )


def table() -> str:
    """The part of the page, in Markdown: names of which the same is said share a row."""
    lines = [f"vLLM {vllm.VLLM_VERSION}, name by name."]
    for section in sections():
        rows: dict[tuple[str, str], list[str]] = {}
        for name in sorted(section.theirs):
            rows.setdefault(section.verdict(name), []).append(name)
        lines += ["", f"| {section.title} | | |", "|---|---|---|"]
        lines += _rows(rows)
    return "\n".join(lines)


def _rows(rows: Mapping[tuple[str, str], list[str]]) -> Iterable[str]:
    order = ("same", "differs", "no effect", "not here")
    for (verdict, note), names in sorted(rows.items(), key=lambda row: (order.index(row[0][0]), row[1])):
        yield f"| {', '.join(f'`{name}`' for name in names)} | {verdict} | {note.rstrip('.')} |"


def written() -> str:
    """The table as the page has it."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()


def write() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write()
