"""The built site: complete, with an anchor for everything that has a name, and nothing fetched to show it."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the site is built and checked by tox -e docs")
pytest.importorskip("latex2mathml", reason="the site is built and checked by tox -e docs")

from goldenppo.conformance.cases import clauses, read_yaml, table

ROOT = Path(__file__).resolve().parents[2]
_LOADS = {
    "script": ("src",),
    "link": ("href",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src",),
    "object": ("data",),
    "form": ("action",),
}


class Page(HTMLParser):
    """What a page loads, where it links to, and what can be linked to."""

    def __init__(self, text: str):
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.formulas = 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.loads += [given[name] for name in _LOADS.get(tag, ()) if given.get(name)]
        self.loads += re.findall(r"url\(([^)]+)\)", given.get("style") or "")
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if given.get("id"):
            self.ids.add(given["id"])
        self.formulas += tag == "math"


def remote(address: str) -> bool:
    """Whether a browser would leave the folder for it."""
    return bool(re.match(r"([a-z]+:)?//", address.strip("'\" ")))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built in strict mode: a warning is a failure."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[str, Page]:
    return {path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_pages_load_nothing_from_elsewhere(site, pages):
    assert len(pages) > 30
    assert [(name, address) for name, page in pages.items() for address in page.loads if remote(address)] == []
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        loaded = re.findall(r"url\(([^)]+)\)|@import\s+['\"]([^'\"]+)", text)
        assert [address for found in loaded for address in found if remote(address)] == [], sheet


def test_a_remote_address_is_noticed():
    page = Page('<script src="https://cdn.example.org/a.js"></script><link href="//fonts.example.org/x"><a href="https://x.org">')

    assert [address for address in page.loads if remote(address)] == ["https://cdn.example.org/a.js", "//fonts.example.org/x"]


def test_links_inside_the_site_lead_somewhere(site, pages):
    lost = []
    for name, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link) or link.startswith("//") or name == "404.html":
                continue
            path, _, anchor = link.partition("#")
            target = ((site / name).parent / path).resolve() if path else site / name
            goal = pages.get(target.relative_to(site).as_posix())
            if not target.is_file() or (anchor and goal is not None and anchor not in goal.ids):
                lost.append((name, link))
    assert lost == []


def test_what_has_a_name_has_an_anchor(pages):
    known = read_yaml("deviations.yaml")
    assert {*known["deviations"], *known["precision"], *table()["ops"]} <= pages["docs/deviations.html"].ids
    assert set(table()["axes"]) <= pages["docs/variants.html"].ids
    assert set(table()["ops"]) <= pages["docs/ops.html"].ids
    for label, about in clauses().items():
        assert any(name.startswith(f"{label.lower()}-") for name in pages[f"spec/{about['op']}.html"].ids), label


def test_formulas_are_drawn_without_a_script(site, pages):
    written = {path.stem: path.read_text(encoding="utf-8").count("$$") // 2 for path in (ROOT / "spec").glob("*.md")}
    assert sum(written.values()) > 20
    for chapter, count in written.items():
        name = "index" if chapter == "README" else chapter
        assert pages[f"spec/{name}.html"].formulas == count, chapter
        assert "$$" not in (site / "spec" / f"{name}.html").read_text(encoding="utf-8")


def test_every_command_has_its_help(site):
    from goldenppo.conformance.cli import COMMANDS

    text = (site / "docs" / "commands.html").read_text(encoding="utf-8")
    for command in COMMANDS:
        assert f"usage: goldenppo {command} " in text


def test_text_of_the_catalogue_arrives_as_it_stands(site):
    """Formulas hold signs that Markdown would read as markup; none is lost."""
    parser = HTMLParser()
    seen: list[str] = []
    parser.handle_data = seen.append
    parser.feed((site / "docs" / "deviations.html").read_text(encoding="utf-8"))
    text = " ".join("".join(seen).split())
    for name, entry in read_yaml("deviations.yaml")["deviations"].items():
        for key in ("title", "computed", "should", "fix"):
            said = " ".join(entry[key].split()).rstrip(".")
            assert said in text, (name, key)
