"""The programs of the guide to other parallelism, over four ranks: they print what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import Program, rank_of
from tests.world import free_port

PAGE = (Path(__file__).parent.parent / "docs" / "guides" / "parallelism.md").read_text()
NUMBER = r"-?\d+\.\d+"
PAIRS = re.findall(r"tests/test_parallelism_guide.py -->\n```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


def test_each_section_with_a_program_has_its_output() -> None:
    assert len(PAIRS) == PAGE.count("tests/test_parallelism_guide.py -->") >= 3


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_a_program_prints_what_the_page_says(number: int) -> None:
    program, output = PAIRS[number]
    port = free_port()
    ranks = [Program("-c", program, env=rank_of(4, rank, port)) for rank in range(4)]
    try:
        said = [rank.communicate() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * 4, said
    printed = said[0][0]
    assert re.sub(NUMBER, "#", printed) == re.sub(NUMBER, "#", output) and not any(out for out, _ in said[1:])
    found, wanted = ([float(word) for word in re.findall(NUMBER, text)] for text in (printed, output))
    assert found == pytest.approx(wanted, rel=0.02)  # other processors round in another order
