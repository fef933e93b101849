"""The programs of the guide to other parallelism, over four ranks: they print what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import Program, rank_of
from tests.world import free_port

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "guides" / "parallelism.md").read_text()
NUMBER = r"-?\d+\.\d+"
PAIRS = re.findall(r"tests/test_parallelism_guide.py -->\n```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


def test_each_section_with_a_program_has_its_output() -> None:
    assert len(PAIRS) == PAGE.count("tests/test_parallelism_guide.py -->") == 2


def said_by(*arguments: str, world: int) -> str:
    """What the first rank prints; the others print nothing."""
    port = free_port()
    ranks = [Program(*arguments, env=rank_of(world, rank, port)) for rank in range(world)]
    try:
        said = [rank.communicate() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, said
    assert not any(out for out, _ in said[1:])
    return said[0][0]


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_a_program_prints_what_the_page_says(number: int) -> None:
    program, output = PAIRS[number]
    printed = said_by("-c", program, world=4)
    assert re.sub(NUMBER, "#", printed) == re.sub(NUMBER, "#", output)
    found, wanted = ([float(word) for word in re.findall(NUMBER, text)] for text in (printed, output))
    assert found == pytest.approx(wanted, rel=0.02)  # other processors round in another order


def test_the_example_of_tensor_parallel_ranks_learns_what_one_process_learns() -> None:
    path, text = str(ROOT / "examples" / "tensor_parallel.py"), str(ROOT / "LICENSE")
    two, alone = (said_by(path, text, "3", str(world), world=world) for world in (2, 1))
    assert re.sub(NUMBER, "#", two) == re.sub(NUMBER, "#", alone) and "(512, 128)" in two
    found, wanted = ([float(word) for word in re.findall(NUMBER, said)] for said in (two, alone))
    assert found == pytest.approx(wanted, rel=1e-3) and found[2] < found[0]
