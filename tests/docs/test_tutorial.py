"""The tutorial is run: its files are written, its commands called, and what they print is what the page shows."""

import re
import sys
from pathlib import Path

import pytest

from goldenppo.conformance.cli import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def lines(text: str) -> list[str]:
    """Lines in which only words count: no widths of columns, and no numbers of cases, which grow with every new case."""
    text = re.sub(r"\d+/\d+", "n/m", re.sub(r"-{2,}", "--", text))
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def shown(expected: list[str], printed: list[str]) -> bool:
    """Whether what was printed is what the page shows; a line `...` stands for any number of lines."""
    if not expected:
        return not printed
    if expected[0] == "...":
        return any(shown(expected[1:], printed[start:]) for start in range(len(printed) + 1))
    return bool(printed) and expected[0] == printed[0] and shown(expected[1:], printed[1:])


def edit(folder: Path, block: str) -> None:
    """Writes the file of a block, or makes the change that it describes."""
    head, _, body = block.partition("\n")
    name, _, change = head.removeprefix("# ").partition(":")
    if change.startswith(" in place of "):
        old = re.fullmatch(r" in place of `(.+)`", change)[1]
        text = (folder / name).read_text()
        assert text.count(old) == 1
        (folder / name).write_text(text.replace(old, body.strip()))
    else:
        (folder / name).write_text(block)
    # as a new process would: the old module is forgotten
    for module in ("mini", "my_trainer"):
        sys.modules.pop(module, None)


def test_the_tutorial_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two edits within a second would share a cached file
    monkeypatch.setenv("NO_COLOR", "1")
    code, ran = None, 0
    for kind, block in _BLOCK.findall(PAGE):
        if kind == "python":
            edit(tmp_path, block)
            continue
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            if command == "echo $?":
                assert expected.strip() == str(code)
                continue
            for module in ("mini", "my_trainer"):
                sys.modules.pop(module, None)
            code = main(command.split()[1:])
            printed = capsys.readouterr().out
            assert shown(lines(expected), lines(printed)), f"{command} printed:\n{printed}"
            ran += 1
    assert ran == 5


@pytest.mark.parametrize(
    ("expected", "printed", "right"),
    [
        ("a\n...\nb", "a\nx\ny\nb", True),
        ("a\n...\nb", "a\nx\ny\nc", False),
        ("a 3/4", "a  5/6", True),
        ("a 0.5", "a 0.6", False),
        ("a", "a\nb", False),
    ],
)
def test_what_is_shown_is_compared(expected, printed, right):
    assert shown(lines(expected), lines(printed)) is right
