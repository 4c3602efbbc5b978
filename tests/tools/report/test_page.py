"""`piecegraph explain --html` writes a page that a browser shows, whatever the names in it."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from piecegraph.tools.cli import main
from tests.runner.tiny_models import llama_config

pytestmark = pytest.mark.usefixtures("models_are_traced_once")

HEADINGS = ["What is slower than asked for", "Pieces", "Passes", "Attention", "Dispatch table", "Memory", "Timeline"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(autouse=True)
def libraries_keep_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command quietens its own process, which here is that of the tests."""
    monkeypatch.setattr("piecegraph.tools.command_line.quiet.quiet_libraries", lambda: None)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a model whose folder has a name that would be a script."""
    folder = tmp_path_factory.mktemp("models") / "<script>alert(1)<"
    folder.mkdir()
    llama_config().save_pretrained(str(folder))
    file = tmp_path_factory.mktemp("pages") / "report.html"
    flags = ["--assume-gpu", "--max-num-seqs", "8", "--max-num-batched-tokens", "16", "--quiet"]
    assert main(["explain", str(folder), "--html", str(file), *flags]) == 0
    return file


class _Balance(HTMLParser):
    """What is open, and all headings."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def test_it_is_one_whole_page(page: Path) -> None:
    """Its elements are balanced, it loads nothing, and names are text."""
    text = page.read_text(encoding="utf-8")
    parser = _Balance()
    parser.feed(text)
    assert not parser.open
    assert [heading for heading in parser.headings if heading != "Notes"] == HEADINGS
    assert "<script" not in text and "&lt;script&gt;alert(1)&lt;" in text
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|https?://", text)


def test_the_dispatch_table_is_drawn(page: Path) -> None:
    """A rectangle for each range of both tables, whose title says what runs."""
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 2
    assert "<title>1: FULL, padded to 1</title>" in text
    assert re.search(r'<rect class="PIECEWISE" [^>]*>\s*<title>2 to 16: PIECEWISE, padded to 16', text)


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is explained if its directory is missing."""
    llama_config().save_pretrained(str(tmp_path / "model"))
    assert main(["explain", str(tmp_path / "model"), "--html", str(tmp_path / "no" / "a.html")]) == 2
    assert "is not a directory" in capsys.readouterr().err


def test_a_browser_shows_it(page: Path, tmp_path: Path) -> None:
    """Headless: the headings are there, and the chart has a size."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=2000", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert all(f"<h2>{heading}</h2>" in shown for heading in HEADINGS)
    picture = tmp_path / "page.png"
    command[-2:] = [f"--screenshot={picture}", "--window-size=1000,2400", page.as_uri()]
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    from PIL import Image

    with Image.open(picture) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(maxcolors=2**24) or ()}
    assert (0x46, 0x66, 0xD0) in colours and (0x7F, 0xB0, 0x7A) in colours, "bars of FULL and PIECEWISE"
