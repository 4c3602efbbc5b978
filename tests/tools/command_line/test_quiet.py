from __future__ import annotations

import subprocess
import sys


def test_quiet_libraries_show_no_bars_and_no_warnings() -> None:
    """The test runs in a process of its own, because the call changes the process for good."""
    code = (
        "import warnings\n"
        "from piecegraph.tools.command_line.quiet import quiet_libraries\n"
        "quiet_libraries()\n"
        "from transformers.utils import logging\n"
        "list(logging.tqdm(range(3)))\n"
        "logging.get_logger('transformers').warning('advice')\n"
        "warnings.warn('advice')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
