"""announce=True: ranks that go different ways are told who does what, before an update; a known order costs one exchange a step."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import zk
from tests.models import batch, gpt, loss_of
from tests.world import run_world
from zk.parallel.comm import Comm


def trained(case: tuple[Any, int | None]) -> tuple[list[int], str]:
    """Exchanges of words in each of four steps; in one of them, ``turns``, rank 1 leaves out a block. And the error of that."""
    announce, turns = case
    model = gpt()
    optimizer = zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters()), stage=3, announce=announce, prefetch=0)
    said, original = [], Comm.words

    def words(comm: Comm, about: str, value: Any) -> list[Any]:
        said[-1] += "step(), state_dict()" in about
        return original(comm, about, value)

    with mock.patch.object(Comm, "words", words):
        for step in range(4):
            said.append(0)
            if step == turns and dist.get_rank():
                model.blocks = model.blocks[1:]
            before = optimizer.num_steps
            try:
                loss_of(model, batch(step)).backward()
                optimizer.step()
                if step == 2:
                    optimizer.state_dict()
            except (ValueError, RuntimeError) as error:
                assert optimizer.num_steps == before
                return said, str(error)
            optimizer.zero_grad()
    optimizer.close()
    return said, ""


def test_a_known_order_is_not_compared_again_and_ranks_that_go_different_ways_say_who_does_what() -> None:
    always, learned, *apart = run_world(2, trained, [(True, None), ("learned", None), (True, 3), ("learned", 0)], timeout=20)
    for (every, error), (once, other) in zip(always, learned, strict=True):
        assert not error + other
        assert min(every) > 5
        assert once[0] > 5 and once[1] < once[0], once
    for turns, said, error in [(turns, *of) for turns, ranks in zip((3, 0), apart, strict=True) for of in ranks]:
        first, _, second = error.partition(" on rank 0 and ")
        assert len(said) == turns + 1 and "must be the same on all ranks: the next one is all_gather of 'blocks.0', " in first, error
        assert "all_gather of 'blocks.1', " in second and second.endswith("on rank 1")


def test_in_a_known_order_each_rank_says_where_it_was_at_the_end_of_the_groups_timeout() -> None:
    (_, first), (_, second) = run_world(2, trained, [("learned", 3)], timeout=3)[0]
    assert "all_gather of 'blocks.0'" in first and "step(), state_dict()" in second, (first, second)
