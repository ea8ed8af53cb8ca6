"""What the pages say of commands, adapters and CI is what the code knows."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from goldenppo.adapters import interface
from goldenppo.conformance import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("spec/*.md"))]


def commands(text: str) -> list[str]:
    """The goldenppo commands of a page: lines of its code blocks, and code in its sentences."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^```(?:sh|console|text|yaml)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip().removeprefix("$ ").removeprefix("run: ") for block in blocks for line in block.split("\n")]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = [*lines, *re.findall(r"`(goldenppo [^`]+)`", prose)]
    return [re.split(r"\s+#|\s{3,}| > | \| ", line)[0] for line in found if line.startswith("goldenppo ")]


ALL = sorted({(page.relative_to(ROOT).as_posix(), command) for page in PAGES for command in commands(page.read_text())})


@pytest.mark.parametrize(("page", "command"), ALL, ids=[f"{page}: {command}" for page, command in ALL])
def test_a_command_of_a_page_exists_with_its_flags(page, command, capsys):
    words = shlex.split(command)[1:]
    if words[0].startswith("--") or (len(words) == 1 and words[0] in cli.COMMANDS):  # the command by its name only
        return
    cli.parser().parse_args(words)


def test_commands_were_found():
    assert len(ALL) > 40
    assert {command.split()[1] for _, command in ALL} >= set(cli.COMMANDS)


def test_every_name_that_an_adapter_may_set_is_on_its_page():
    page = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    read = "".join((ROOT / "adapters" / f"{name}.py").read_text(encoding="utf-8") for name in ("session", "loader"))
    first = [line.strip().split("  ")[0] for line in (interface.__doc__ or "").split("\n") if re.match(r" {4}[A-Z]", line)]
    names = {*", ".join(first).split(", "), *re.findall(r'module, "(\w+)"', read)}
    assert {"MASK", "VARIANTS", "setup"} <= names
    assert [name for name in sorted(names) if f"`{name}" not in page] == []


def test_the_workflow_is_whole():
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    workflow = yaml.safe_load(re.search(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1])
    steps = workflow["jobs"]["check"]["steps"]
    ran = [shlex.split(step["run"])[1:] for step in steps if step.get("run", "").startswith("goldenppo ")]
    assert [words[0] for words in ran] == ["check", "report"]
    args = cli.parser().parse_args(ran[0])
    assert all((args.baseline, args.junit, args.json, args.markdown))
    kept = next(step["with"]["path"] for step in steps if "upload-artifact" in step.get("uses", ""))
    assert all(Path(name).match(kept) for name in (args.junit, args.json, args.markdown))
