"""The page on harnesses is built along: its file is written and changed, its commands called, and they print what it shows."""

import re
import shutil
from pathlib import Path

import pytest

from goldenppo.conformance.cli import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "process.md").read_text(encoding="utf-8")


def words(text: str) -> list[str]:
    """Lines in which only words count: neither widths of columns nor numbers of cases, which grow with every new one."""
    return [" ".join(re.sub(r"\d+/\d+", "n/m", line).split()) for line in text.strip().splitlines()]


def shown(expected: list[str], printed: list[str]) -> bool:
    """Whether the lines that the page shows are printed, in this order; `...` stands for any lines between."""
    rest = iter(printed)
    return all(line in rest for line in expected if line != "...")


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH")
def test_the_page_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file, ran = tmp_path / "harness.mjs", 0
    for kind, block in re.findall(r"^```(js|console)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        head, _, body = block.partition("\n")
        if kind == "js":
            old = re.fullmatch(r"// harness.mjs: in place of `(.+)`", head)
            text = file.read_text() if old else old
            assert text is None or text.count(old[1]) == 1
            file.write_text(text.replace(old[1], body.rstrip()) if old else block)
            continue
        main(["check", re.fullmatch(r'\$ goldenppo check "(.+)"', head)[1]])
        printed = capsys.readouterr().out
        assert shown(words(body), words(printed)), printed
        ran += 1
    assert ran == 3


def test_what_is_shown_is_compared():
    assert shown(["a", "...", "c"], ["a", "b", "c"])
    assert not shown(["a", "...", "d"], ["a", "b", "c"])
    assert not shown(["c", "a"], ["a", "b", "c"])
