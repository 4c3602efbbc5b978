"""Files and headings that the documentation's pages refer to exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_house import ROOT

PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    """Files are named as `folder/file.py` in backticks, or linked to; a page that lies is worse than none."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", text)
    linked = [str(Path(page).parent / link) for link in re.findall(r"\]\(([^):#]+)(?:#[^)]*)?\)", text)]
    assert [name for name in (*named, *linked) if not (ROOT / name).exists()] == []


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub names them. Comments in blocks of code are no headings."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


ALL_PAGES = sorted(
    str(page.relative_to(ROOT)) for folder in (ROOT.glob("*.md"), (ROOT / "docs").rglob("*.md")) for page in folder
)


@pytest.mark.parametrize("page", ALL_PAGES)
def test_pages_and_headings_that_a_page_links_to_exist(page: str) -> None:
    """This holds for measurements, decisions and the changelog, too, whose sources may be gone."""
    file = ROOT / page
    links = re.findall(r"\]\(((?:[^):#]+\.md)?)#([^)]+)\)", file.read_text(encoding="utf-8"))
    targets = [(file.parent / path if path else file, anchor) for path, anchor in links]
    assert [to for to, _ in targets if not to.exists()] == []
    assert [f"{to.name}#{anchor}" for to, anchor in targets if anchor not in anchors(to.read_text("utf-8"))] == []


def test_a_heading_that_is_not_there_is_noticed() -> None:
    text = "# A page\n\n## Of one, two: `three`\n```sh\n# a comment\n```\n"
    assert anchors(text) == {"a-page", "of-one-two-three"}
