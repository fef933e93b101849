"""A rank that is killed: the others end soon, say who is gone and in what, and leave nothing behind."""

from __future__ import annotations

import re
import signal
import textwrap
from pathlib import Path

import pytest

from tests.programs import Program, rank_of, run
from tests.world import free_port

PROGRAM = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from tests.test_checkpoint import make, train
    setting, folder = sys.argv[1], Path(sys.argv[2])
    model, optimizer, scheduler = make(setting, folder)
    for step in range(10_000):
        train(model, optimizer, scheduler, step, step + 1)
        if step in (2, 3):
            optimizer.save_checkpoint(folder / "saved", scheduler=scheduler, async_save=step == 3)
        print("step", step, flush=True)
    """
)


ENDS = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from tests.test_checkpoint import SlowWriter, make, mock, save, train
    mock.patch.object(save, "Writer", SlowWriter).start()
    setting, folder = sys.argv[1], Path(sys.argv[2])
    model, optimizer, scheduler = make(setting, folder)
    train(model, optimizer, scheduler, 0, 1)
    optimizer.save_checkpoint(folder / "saved", async_save=True)
    """
)


def test_ranks_that_end_end_their_save_first(tmp_path: Path) -> None:
    port = free_port()
    ranks = [start(rank, port, "2-host-overlapped", tmp_path, ENDS) for rank in range(2)]
    said = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0] and "not saved" not in "".join(said), said
    assert (tmp_path / "saved" / "latest").read_text() == "step-00000001\n"


def start(rank: int, port: int, setting: str, folder: Path, program: str = PROGRAM) -> Program:
    return Program("-c", program, setting, str(folder), env=rank_of(2, rank, port))


@pytest.mark.parametrize(("setting", "victim"), (("3-nvme", 1), ("2-host-overlapped", 1), ("3-host", 0)))
def test_the_survivor_of_a_killed_rank_ends_soon_and_names_it(setting: str, victim: int, tmp_path: Path) -> None:
    port = free_port()
    ranks = [start(rank, port, setting, tmp_path) for rank in range(2)]
    try:
        for line in ranks[victim].stdout:
            if line.split()[:2] == ["step", "4"]:
                break
        ranks[victim].send_signal(signal.SIGKILL)
        _, said = ranks[1 - victim].communicate()  # sooner than the half hour that torch would wait
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[1 - victim].returncode == 1
    gone = r"rank 1 ended" if victim == 1 else r"(rank 0 ended|the store .* is gone, .*rank 0)"
    assert re.search(rf"rank {1 - victim} of 2 failed in collective \d+ \((gather|reduce|norm|broadcast|state).*\): {gone}", said), said[-3000:]
    if "nvme" in setting:  # what the killed one left is removed by the next run
        program = "import sys; from pathlib import Path; from tests.test_checkpoint import make; make('3-nvme', Path(sys.argv[1]))[1].close()"
        run("-c", program, str(tmp_path), check=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]
