"""Has every Python process that finds this folder in its path write down which files it opens, lists, loads and makes,
and the command of each process it starts: a line each, `event<tab>path or word`, in the file `TESTS_FILE_WATCH` names.
"""

from __future__ import annotations

import os
import sys
from typing import Any

FILE_EVENTS = {"open", "os.listdir", "os.scandir", "os.mkdir", "ctypes.dlopen"}

_record = os.open(os.environ["TESTS_FILE_WATCH"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def write_down(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        program, words = arguments[:2]
        named = [program, *([words] if isinstance(words, str | bytes | os.PathLike) else words)]
    elif event in FILE_EVENTS:
        named = [arguments[0]]
    elif event == "import":
        named = [arguments[1]]
    else:
        return
    texts = [os.fsdecode(each) for each in named if isinstance(each, str | bytes | os.PathLike)]
    for text in texts:
        os.write(_record, f"{event}\t{text.partition(os.linesep)[0]}\n".encode())


sys.addaudithook(write_down)
