"""`docs/models.md`: what runs of every causal language model of transformers, and what is missing where one is refused.

`python -m tests.runner.models_page` writes the page anew, or the rows of the model types that are named.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import transformers

from piecegraph.errors import PiecegraphError
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.inspect.explanation import AttentionRow, explain
from tests.runner.architectures import architectures, class_name, save_tiny, tiny_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
ANSWERS = RUNS, REFUSED, NOT_BUILT = "runs", "refused", "not built"

HEAD = """# Models

Every architecture that transformers {version} has as a causal language model. \
`python -m tests.runner.models_page` writes this page from what `piecegraph explain` says of a tiny random model of \
each. `tests/runner/test_models_page.py` builds each model that runs, and compares its greedy tokens with \
transformers', in chunks, preempted, and with cached prefixes.

Of {total} architectures, {runs} run and {refused} are refused; of {not_built} no tiny model could be made. A model is \
let through or refused by its mechanisms, never by its name, so a config with other options than those of the tiny \
model may be answered differently. Architectures that can be encoders are listed as decoders (`is_decoder=true`); as \
encoders they are refused, and can pool ([pooling.md](pooling.md)). Models of several modalities run on text where \
their class is a causal language model. [hybrid_models.md](hybrid_models.md) says which layers with states run, \
[models_under_inductor.md](models_under_inductor.md) which were compiled by Inductor as well.

| model type | class | answer | mechanisms, or what is missing |
|---|---|---|---|
"""

_STATES = {
    "piecegraph::linear_attention": "linear attention",
    "piecegraph::mamba_mixer": "state space",
    "piecegraph::short_conv": "short convolution",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One architecture: whether it runs, and with which mechanisms, or what is missing."""

    model_type: str
    class_name: str
    answer: str  # one of RUNS, REFUSED, NOT_BUILT
    mechanisms: str

    def line(self) -> str:
        """Return the row of the page's table."""
        return f"| {self.model_type} | {self.class_name} | {self.answer} | {self.mechanisms} |"


def row_of(model_type: str) -> Row:
    """Return what `explain` says of a tiny model."""
    name = class_name(model_type)
    try:
        model = tiny_model(model_type)
    except Exception as error:  # whatever a model's constructor raises
        return Row(model_type, name, NOT_BUILT, f"no tiny model can be made: {plain(error)}")
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            source=ModelSource(model=str(save_tiny(model_type, model, Path(folder)))), device="cpu", max_model_len=48
        )
        try:
            explained = explain(config)
            ops = [each.op for each in explained.split_ops]
            return Row(model_type, name, RUNS, mechanisms(explained.attention, ops, explained.notes))
        except PiecegraphError as error:
            return Row(model_type, name, REFUSED, plain(error))


def mechanisms(
    layers: Iterable[AttentionRow] | Iterable[AttentionLayer], split_ops: Iterable[str], notes: Iterable[str]
) -> str:
    """Return the kinds of a model's layers, in words."""
    found: dict[str, None] = {}
    for layer in layers:
        if layer.is_latent:
            found["latent attention"] = None
            continue
        kind = "sliding window" if layer.window else "chunked attention" if layer.chunk_size else "full attention"
        found[kind] = None
        if layer.softcap:
            found["soft cap"] = None
        if layer.has_sinks:
            found["sinks"] = None
        if layer.has_slopes:
            found["ALiBi"] = None
        if layer.key_dim != layer.value_dim:
            found["keys and values of different sizes"] = None
    found.update(dict.fromkeys(_STATES[op] for op in split_ops if op in _STATES))
    if any(note.startswith("positions begin at") for note in notes):
        found["positions that do not begin at 0"] = None
    return ", ".join(found)


def plain(error: Exception) -> str:
    """Return a message without folders and table marks, or the beginning of a long one."""
    text = re.sub(r"\S*/(?=transformers/)", "", " ".join(str(error).split())).replace("|", "/")
    return text if len(text) <= 420 else text[:420].rsplit(" ", 1)[0] + " ..."


def rows_of(page: str) -> dict[str, Row]:
    """Return the rows of a page, by model type."""
    lines = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| model type")]
    rows = [Row(*(cell.strip() for cell in line.strip("|").split(" | "))) for line in lines]
    return {row.model_type: row for row in rows}


def page_of(rows: Mapping[str, Row]) -> str:
    """Return the page."""
    ordered = [rows[name] for name in sorted(rows)]
    head = HEAD.format(
        version=transformers.__version__,
        total=len(ordered),
        **{answer.replace(" ", "_"): sum(row.answer == answer for row in ordered) for answer in ANSWERS},
    )
    return head + "\n".join(row.line() for row in ordered) + "\n"


def main(names: Iterable[str]) -> None:
    """Write the page with new rows for `names`, or for all."""
    known = rows_of(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    for name in names or architectures():
        known[name] = row_of(name)
        sys.stderr.write(f"{known[name].line()}\n")
    rows = {name: row for name, row in known.items() if name in architectures()}
    PAGE.write_text(page_of(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
