"""Every link of the repository's Markdown leads somewhere: files and anchors exist, addresses are well formed."""

import re
import unicodedata
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for pattern in ("*.md", "spec/*.md", "docs/*.md", "adapters/*.md") for path in ROOT.glob(pattern))
_LINK = re.compile(r"(?<!\\)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\)")


def prose(text: str) -> str:
    """Markdown without its code, which has no links."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        kept = [c for c in shown if c in "-_ " or unicodedata.category(c)[0] in "LN"]
        slug = "".join(kept).replace(" ", "-")
        number = next(n for n in range(len(found) + 1) if (f"{slug}-{n}" if n else slug) not in found)
        found.add(f"{slug}-{number}" if number else slug)
    return found


def wrong(page: Path) -> list[str]:
    """The links of a page that lead nowhere, each with the reason."""
    problems = []
    for target in _LINK.findall(prose(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            parts = urlsplit(target)
            if parts.scheme not in ("https", "http") or "." not in parts.netloc or re.search(r"[\s<>\"]", target):
                problems.append(f"{target}: no address")
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or not file.is_relative_to(ROOT):
            problems.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            problems.append(f"{target}: no such heading")
    return problems


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    assert wrong(page) == []


def test_a_wrong_link_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# One · Two\n\n```sh\n# no heading\n```\n\n## One · Two\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#one--two) [b](other.md#one--two-1) [c](other.md) [d](https://example.org/a_(b)) `[e](in-code.md)`\n"
        "[f](missing.md) [g](other.md#no-heading) [h](ftp:example.org) [i](https://nowhere)\n"
    )

    assert [problem.split(":")[0] for problem in wrong(page)] == ["missing.md", "other.md#no-heading", "ftp", "https"]


def test_pages_have_links():
    assert sum(len(_LINK.findall(prose(page.read_text(encoding="utf-8")))) for page in PAGES) > 60
