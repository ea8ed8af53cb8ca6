"""What docs/adding.md shows of the repository is what stands there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("file", "shown"), BLOCKS, ids=[file for file, _ in BLOCKS])
def test_a_block_stands_in_its_file(file, shown):
    assert shown in (ROOT / file).read_text(encoding="utf-8")


def test_blocks_were_found():
    assert len(BLOCKS) == 3
