"""The gradient norm that clipping goes by is that of the parameters' gradients, whatever buckets they passed through."""

from __future__ import annotations

import contextlib
import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
from tests.world import run_world

PLACES = (("device", "device"), ("device", "host"), ("host", "host"), ("device", "nvme"), ("nvme", "nvme"))


class Crossed(nn.Module):
    """Units of one padded length and different paddings, used in another order than defined, some of them not always."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 5), nn.Linear(8, 8, bias=False), nn.Linear(8, 5, bias=False)
        self.d = nn.Linear(5, 8)

    def forward(self, x: Tensor, short: bool) -> Tensor:
        x = self.b(x)
        return self.a(x) if short else self.a(x) + self.c(self.d(self.a(x)))


def norms_differ(case: tuple[int, str, str, str]) -> str:
    """Train with zk on this rank's rows; "" if every norm is that of plain torch on all rows."""
    stage, param_tier, optimizer_tier, folder = case
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = Crossed()
    plain = copy.deepcopy(model)
    place = {"param_tier": param_tier if stage == 3 else "device", "optimizer_tier": optimizer_tier}
    place |= {"nvme_path": folder} if "nvme" in place.values() else {}
    draws = torch.Generator().manual_seed(1)
    with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=stage, units=["a", "b", "c", "d"], **place) as optimizer:
        for number in range(6):
            x = torch.randn(4, 8, generator=draws)
            if number == 3:
                x[0] = math.nan
            short = number % 2 == 1
            plain(x, short).square().mean().backward()
            want = float(nn.utils.get_total_norm(param.grad for param in plain.parameters() if param.grad is not None))
            plain.zero_grad()
            model(x[rank::size], short).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            got = optimizer.metrics()["grad_norm"]
            if not (math.isclose(got, want, rel_tol=1e-5) or (math.isnan(want) and not math.isfinite(got))):
                return f"step {number}: {got} instead of {want}"
        if optimizer.metrics()["skipped_steps"] != 1:
            return f"{optimizer.metrics()['skipped_steps']} steps skipped"
    return ""


# below stage 3 parameters are on the device
@pytest.mark.parametrize(
    ("stage", "place"),
    [(0, PLACES[0]), (1, PLACES[1]), (2, PLACES[0]), (2, PLACES[3]), *((3, place) for place in PLACES)],
)
def test_the_norm_is_that_of_the_gradients_at_every_step(stage: int, place: tuple[str, str], tmp_path: object) -> None:
    assert norms_differ((stage, *place, str(tmp_path))) == ""


def test_the_norm_over_two_ranks_is_that_of_the_whole_batch(tmp_path: object) -> None:
    below = ((0, PLACES[1]), (1, PLACES[3]), (2, PLACES[1]), (2, PLACES[3]))
    cases = [(stage, *place, str(tmp_path)) for stage, place in (*below, *((3, place) for place in (PLACES[1], PLACES[2], PLACES[4])))]
    for case, found in zip(cases, run_world(2, norms_differ, cases), strict=True):
        assert found == ["", ""], case


def test_uneven_tiles_are_clipped_like_their_twin(tmp_path: object) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 130), nn.Tanh(), nn.Linear(130, 130))
    plain = copy.deepcopy(model)
    zk.tile_linears(model, 9000)
    place = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path}
    adam = torch.optim.SGD(plain.parameters(), lr=0.5)
    with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=3, clip_grad_norm=0.1, **place) as optimizer:
        for number in range(4):
            x = torch.randn(4, 70, generator=torch.Generator().manual_seed(number))
            for net, each in ((model, optimizer), (plain, adam)):
                net(x).square().mean().backward()
                if each is adam:
                    nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                each.step()
                each.zero_grad()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)


def left_to_nccl(_: None) -> str:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"exact_reduce=False leaves the reduction .* connected by gloo") as caught:
        zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), exact_reduce=False)
    return str(caught.value)


def test_a_reduction_by_nccl_is_refused_where_there_is_none() -> None:
    (ranks,) = run_world(2, left_to_nccl, [None], backend="gloo")
    assert all(isinstance(rank, str) and "remove it" in rank for rank in ranks), ranks


def used_on_one_rank(_: None) -> list[float]:
    """The weight of a unit that both ranks have accumulated gradients for, and that one of them then does not use."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    rank = dist.get_rank()
    with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.25), stage=2, dtype="bf16", units=["a", "b"]) as optimizer:
        for step in range(3):
            for micro_batch in range(2 if step == 0 else 1):
                y = model["a"](torch.ones(2, 4))
                with optimizer.no_sync() if step == 0 and micro_batch == 0 else contextlib.nullcontext():
                    (y if rank and step else model["b"](y)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model["b"].weight.flatten().tolist()  # type: ignore[no-any-return]


def test_a_rank_without_a_gradient_takes_part_in_the_precision_of_the_others() -> None:
    (ranks,) = run_world(2, used_on_one_rank, [None], backend="gloo")
    assert isinstance(ranks[0], list) and ranks[0] == ranks[1] and all(map(math.isfinite, ranks[0])), ranks
