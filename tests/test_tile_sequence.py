"""Position-wise modules tile by tile of tokens: outputs and gradients of the whole sequence, at every stage, and what cannot be so is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zk
from tests.models import DEVICE
from tests.test_linear_cross_entropy import Largest, error
from tests.world import run_world
from zk import token_tiles
from zk.core.store import State, UnitStore

WIDTH, INNER = 16, 40
# relative norm of the difference: a sum over tiles is added up in another order; in 16 bits tiles are rounded before they are added, in fp32
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER)
        self.down, self.dropout = nn.Linear(INNER, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.silu(self.gate(x)) * self.up(x)))


class Mixture(nn.Module):
    """Each token goes to one of four experts; returns the router's logits too, token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 160), nn.GELU(), nn.Linear(160, WIDTH)) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.reshape(-1, WIDTH)
        logits = self.gate(rows)
        weights, chosen = logits.softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().flatten()
            if len(mine):
                out = out.index_add(0, mine, expert(rows[mine]) * weights[mine, None])
        return out.view(x.shape), logits


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module] = Mlp, checkpointed: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "mix": nn.Linear(WIDTH, WIDTH), "mlp": kind()}) for _ in range(2)
        )
        self.norm, self.checkpointed = nn.RMSNorm(WIDTH), checkpointed
        self.blocks = nn.ModuleList(map(Block, self.blocks))
        self.to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        aux = x.new_zeros(())
        for block in self.blocks:
            x, more = checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant") if self.checkpointed else block(x)
            aux = aux + more
        return self.norm(x).sigmoid()[..., ::2].mean() + 0.1 * aux


class Block(nn.Module):
    """A mean over tokens, and an MLP or a mixture."""

    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.norm, self.mix, self.mlp = parts["norm"], parts["mix"], parts["mlp"]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.mix(x).mean(-2, keepdim=True)
        out = self.mlp(self.norm(x))
        out, logits = out if isinstance(out, tuple) else (out, x.new_zeros(()))
        return x + out, logits.square().mean()


@pytest.fixture(autouse=True)
def tiles_of_five() -> Iterator[None]:
    with mock.patch.object(token_tiles, "TOKENS", 5), mock.patch.object(token_tiles, "TOKENS_ON_DEVICE", 5):
        yield


def pair(kind: type[nn.Module] = Mlp, checkpointed: str = "", **options: Any) -> tuple[Model, Model]:
    """A model, and one of the same values whose modules run in tiles."""
    torch.manual_seed(0)
    plain = Model(kind, checkpointed)
    tiled = copy.deepcopy(plain)
    names = zk.tile_sequence(tiled, **options)
    assert set(names) == {"norm", *(f"blocks.{number}.{name}" for number in (0, 1) for name in ("norm", "mlp"))}
    return plain, tiled


def batch(seed: int = 0, rows: int = 2, tokens: int = 9) -> Tensor:
    return torch.randn(rows, tokens, WIDTH, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.device
@pytest.mark.parametrize("kind", (Mlp, Mixture))
@pytest.mark.parametrize("checkpointed", ("", "reentrant", "not reentrant"))
def test_loss_and_gradients_are_those_of_the_whole_sequence(kind: type[nn.Module], checkpointed: str) -> None:
    plain, tiled = pair(kind, checkpointed)
    xs = [batch().requires_grad_() for _ in range(2)]
    losses = [model(x) for model, x in zip((plain, tiled), xs, strict=True)]
    for loss in losses:
        (3 * loss).backward()
    assert error(losses[1], losses[0]) < 1e-6 and error(xs[1].grad, xs[0].grad) < TOLERANCE[torch.float32]
    for (name, want), got in zip(plain.named_parameters(), tiled.parameters(), strict=True):
        assert (want.grad is None) == (got.grad is None), name
        assert want.grad is None or error(got.grad, want.grad) < TOLERANCE[torch.float32], name


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", [(6,), (5,), (1,), (11,), (2, 7), (0,), (1, 1, 23)])
def test_ragged_tiles_one_token_and_none_are_right(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = Mlp().to(DEVICE, dtype)
    tiled = copy.deepcopy(plain)
    zk.tile_sequence(nn.Sequential(tiled), ["0"])
    x = torch.randn(*shape, WIDTH, device=DEVICE, dtype=dtype)
    upstream = torch.randn(*shape, WIDTH, device=DEVICE, dtype=dtype)
    found = []
    for module in (plain, tiled):
        mine = x.clone().requires_grad_()
        out = module(mine)
        found.append([out, *torch.autograd.grad(out, [mine, *module.parameters()], upstream)])
    assert all(error(got, want) < TOLERANCE[dtype] and got.dtype == dtype and got.shape == want.shape for want, got in zip(*found, strict=True))


def test_the_same_sequence_has_the_same_bits_and_few_tokens_those_of_the_module() -> None:
    plain, tiled = pair()
    grads = []
    for _ in range(2):
        tiled.zero_grad()
        tiled(batch()).backward()
        grads.append([param.grad.clone() for param in tiled.parameters()])
    assert all(torch.equal(*two) for two in zip(*grads, strict=True))
    for model in (plain, tiled):
        model.zero_grad()
        model(batch(tokens=2, rows=2)).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), tiled.parameters(), strict=True))


def test_no_tensor_inside_has_more_tokens_than_a_tile() -> None:
    module = Mlp()
    zk.tile_sequence(nn.Sequential(module), ["0"])
    x = torch.randn(2000, WIDTH, requires_grad=True)
    with mock.patch.object(token_tiles, "TOKENS", 100), Largest() as largest:
        module(x).sum().backward()
    assert largest.numel <= 2000 * WIDTH < 2000 * INNER / 2


def test_max_nbytes_refuses_a_module_whose_tile_takes_more_and_changes_no_bit() -> None:
    def trained(max_nbytes: int | None, autocast: bool = False) -> list[Tensor]:
        torch.manual_seed(0)
        module, x = Mlp().to(DEVICE), batch()
        zk.tile_sequence(nn.Sequential(module), ["0"], max_nbytes)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            out = module(x)
        out.sum().backward()
        return [out, *(param.grad for param in module.parameters())]

    tile = 5 * 2 * 4 * (4 * INNER + WIDTH)  # what silu, the product and the three layers save, of five tokens, and as much for gradients
    assert all(torch.equal(*two) for two in zip(trained(tile), trained(None), strict=True))
    trained(tile, autocast=True)  # the casts of weights are not of a token
    with pytest.raises(ValueError, match=f"at least {tile}: as much as a tile of 5 tokens of '0' takes"):
        trained(tile - 1)
    module = Mlp().to(DEVICE)
    zk.tile_sequence(nn.Sequential(module), ["0"], tile - 1)
    with torch.inference_mode():
        module(batch())  # nothing is kept for a gradient
    with pytest.raises(ValueError, match="at least"):
        module(batch())


def test_a_checkpoint_that_ends_with_tiles_computes_them_as_often_as_it_would_without() -> None:
    """Forward and, tile by tile, backward: what computes the block again stops when it has the inputs of the last tiles."""
    _, model = pair(Mlp, "not reentrant")
    model(batch()).backward()  # each module is tried
    with mock.patch.object(Mlp, "forward", autospec=True, side_effect=Mlp.forward) as calls:
        model(batch()).backward()
    tokens = [call.args[1].shape[-2] for call in calls.call_args_list]
    assert sum(tokens) == 2 * 18 * len(model.blocks) and max(tokens) == 5


def test_autocast_frozen_weights_and_evaluation_are_as_without_tiles() -> None:
    plain, tiled = pair()
    for model in (plain, tiled):
        for block in model.blocks:
            block.mlp.up.requires_grad_(False)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(batch())
        loss.backward()
    for want, got in zip(plain.parameters(), tiled.parameters(), strict=True):
        assert (want.grad is None) == (got.grad is None)
        assert want.grad is None or error(got.grad, want.grad) < TOLERANCE[torch.bfloat16]
    with torch.no_grad():
        assert torch.equal(plain.eval()(batch()), tiled.eval()(batch()))


def test_a_copy_has_tiles_of_its_own_and_tiles_can_be_taken_back() -> None:
    _, tiled = pair()
    other = copy.deepcopy(tiled)
    assert other.blocks[0].mlp.forward.module is other.blocks[0].mlp
    tiled.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="runs in tiles already"):
        zk.tile_sequence(tiled)
    zk.untile_sequence(tiled)
    assert all("forward" not in vars(module) for module in tiled.modules()) and "forward" in vars(other.norm)


class Bad(Mlp):
    kind = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "mean":
            x = x - x.mean(-2, keepdim=True)
        elif self.kind == "random":
            x = x * torch.rand_like(x)
        elif self.kind == "in place":
            x *= 2
        out = super().forward(x)
        return out.sum(-2) if self.kind == "shape" else out


@pytest.mark.parametrize(
    ("kind", "error_type", "says"),
    [
        ("mean", ValueError, "'0' gives a token another output beside another token"),
        ("random", RuntimeError, "'0' draws random numbers"),
        ("in place", RuntimeError, "'0' changes its input in place"),
        ("shape", ValueError, "'0'"),
    ],
)
def test_modules_whose_tiles_would_compute_something_else_are_refused(kind: str, error_type: type[Exception], says: str) -> None:
    module = Bad()
    module.kind = kind
    zk.tile_sequence(nn.Sequential(module), ["0"])
    state, x = torch.get_rng_state(), torch.randn(12, WIDTH, requires_grad=True) * 1
    state = torch.get_rng_state()
    with pytest.raises(error_type, match=says):
        module(x)
    assert torch.equal(state, torch.get_rng_state())


def test_dropout_is_refused_in_training_alone() -> None:
    module = Mlp(dropout=0.1)
    zk.tile_sequence(nn.Sequential(module), ["0"])
    module.eval()(torch.randn(12, WIDTH))
    with pytest.raises(RuntimeError, match="set its dropout"):
        module.train()(torch.randn(12, WIDTH))
    module.dropout.p = 0.0
    module(torch.randn(12, WIDTH)).sum().backward()
    module.dropout.p = 0.5
    with pytest.raises(RuntimeError, match="set its dropout"):
        module(torch.randn(12, WIDTH))


def test_what_would_see_tiles_is_refused() -> None:
    model = nn.Sequential(Mlp())
    zk.tile_sequence(model, [Mlp])
    x = torch.randn(12, WIDTH)
    handle = model[0].up.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(RuntimeError, match="would see the gradient of each tile"):
        model(x)
    handle.remove()
    handle = model[0].up.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="once for each tile of tokens"):
        model(x)
    handle.remove()
    handle = model[0].up.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="once for each tile of tokens"):
        model(x)
    handle.remove()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=True)
    with pytest.raises(ValueError, match="is called 'nothing'"):
        zk.tile_sequence(model, ["nothing"])
    with pytest.raises(TypeError, match="a list of names"):
        zk.tile_sequence(model, "mlp")
    with pytest.raises(ValueError, match="no position-wise module was found"):
        zk.tile_sequence(nn.Sequential(nn.Linear(3, 3)))


def test_tiles_train_where_inputs_of_parts_are_cast() -> None:
    """``dtype=`` puts hooks on all parts of a model, for those that are called by themselves."""
    losses = []
    for model in pair():
        with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, dtype="bf16") as optimizer:
            for step in range(2):
                loss = model(batch(step))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    assert losses[2:] == pytest.approx(losses[:2], rel=1e-2)


def test_a_tensor_that_is_given_twice_gets_its_gradient_once() -> None:
    class Gated(Mlp):
        def forward(self, x: Tensor, by: Tensor) -> Tensor:
            return super().forward(x) * by

    torch.manual_seed(0)
    module = Gated()
    grads = []
    for tiles in (False, True):
        if tiles:
            zk.tile_sequence(nn.Sequential(module), ["0"])
        x = batch().cpu().requires_grad_()
        between = x * 2
        module(between, between).square().sum().backward()
        grads.append(x.grad)
    assert error(grads[1], grads[0]) < TOLERANCE[torch.float32]


def test_a_loss_that_a_module_keeps_in_an_attribute_is_refused() -> None:
    class Balanced(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            self.up.loss = self.gate(x).softmax(-1).mean().square()
            return super().forward(x)

    module = Balanced()
    zk.tile_sequence(nn.Sequential(module), ["0"])
    module(torch.randn(4, WIDTH))
    with pytest.raises(RuntimeError, match="'0' keeps a tensor in an attribute"):
        module(torch.randn(12, WIDTH))


def test_what_is_returned_beside_tensors_has_to_be_the_same_for_all_tiles() -> None:
    class Returns(Mlp):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return self.made(super().forward(x))

    x = torch.randn(1, 6, WIDTH)  # (a last tile of one token is broadcast by what is computed with it)
    for made, is_right in (
        (lambda out: (out, None, "silu"), True),
        (lambda out: SimpleNamespace(out=out), False),
        (lambda out: (out, float(out.max())), False),
    ):
        module = Returns()
        module.made = made
        zk.tile_sequence(nn.Sequential(module), ["0"])
        if is_right:
            assert module(x)[1:] == (None, "silu")
        else:
            with pytest.raises(ValueError, match="'0' returns, beside tensors, "):
                module(x)


def test_a_module_that_counts_in_a_buffer_is_refused() -> None:
    class Counts(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("tokens", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.tokens += x.shape[:-1].numel()
            return super().forward(x)

    module = Counts()
    zk.tile_sequence(nn.Sequential(module), ["0"])
    module.eval()(torch.randn(12, WIDTH))
    with pytest.raises(RuntimeError, match="'0' changes its input in place, or a buffer"):
        module.train()(torch.randn(12, WIDTH))


# ---- stages, ranks, drives ---------------------------------------------------------------------------------------------------


def trained(case: tuple[type[nn.Module], str, int, str, bool]) -> str:
    """Train in tiles on this rank's part of the batch; "" if every rank has what plain torch has on all of it."""
    kind, checkpointed, stage, folder, accumulates = case
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with mock.patch.object(token_tiles, "TOKENS", 5), mock.patch.object(token_tiles, "TOKENS_ON_DEVICE", 5):
        plain, tiled = pair(kind, checkpointed, max_nbytes="1GiB")  # which has a token measured
        adam = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        place = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": folder} if folder else {}
        options = {"overlap_step": True} if folder else {}
        with zk.ZeroOptimizer(tiled, torch.optim.AdamW(tiled.parameters(), lr=1e-2), stage=stage, **place, **options) as optimizer:
            for step in range(2):
                parts = batch(step, rows=4).chunk(2)
                mine = parts if world == 1 else parts[rank : rank + 1]
                sum(plain(part) for part in parts).div(2).backward()
                adam.step()
                adam.zero_grad()
                if accumulates:
                    optimizer.accumulate(mine, lambda model, x: model(x) / (1 if world > 1 else 2))
                else:
                    for part in mine:
                        (tiled(part) / (1 if world > 1 else 2)).backward()
                optimizer.step()
                optimizer.zero_grad()
            state = optimizer.consolidated_state_dict()
    worst = max(float((state[name].cpu() - value.cpu()).abs().max()) for name, value in plain.state_dict().items())
    return "" if worst < 1e-4 else f"{case}: parameters differ by {worst}"


CASES: list[tuple[type[nn.Module], str, int, bool]] = [
    (Mlp, "", 2, False),
    (Mlp, "", 3, False),
    (Mlp, "", 3, True),
    (Mlp, "reentrant", 3, False),
    (Mlp, "not reentrant", 3, False),
    (Mixture, "", 3, False),
    (Mixture, "not reentrant", 3, False),
]


@pytest.mark.device
def test_tiles_train_at_every_stage_on_a_drive_and_block_by_block(tmp_path: Path) -> None:
    for number, (kind, checkpointed, stage, accumulates) in enumerate(CASES if DEVICE.type == "cpu" else CASES[1:2]):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert trained((kind, checkpointed, stage, str(folder) if stage == 3 else "", accumulates)) == ""


def test_tiles_train_over_ranks() -> None:
    cases = [(kind, checkpointed, stage, "", accumulates) for kind, checkpointed, stage, accumulates in (CASES[2], CASES[6])]
    for case, results in zip(cases, run_world(2, trained, cases), strict=True):
        assert results == ["", ""], case


@pytest.mark.parametrize("checkpointed", ("", "not reentrant"))
def test_a_block_is_gathered_once_for_all_tiles_in_each_direction(checkpointed: str, tmp_path: Path) -> None:
    _, tiled = pair(Mlp, checkpointed)
    place = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path, "prefetch": 0}
    with zk.ZeroOptimizer(tiled, torch.optim.SGD(tiled.parameters(), lr=0.1), stage=3, **place):
        counts: dict[str, int] = {}
        gather = UnitStore.gather

        def counted(store: UnitStore) -> None:
            counts[store.unit.name] = counts.get(store.unit.name, 0) + (store.state is not State.GATHERED)
            gather(store)

        with mock.patch.object(UnitStore, "gather", counted):
            tiled(batch()).backward()
        assert counts == {"blocks.0": 2, "blocks.1": 2, "rest": 1}
