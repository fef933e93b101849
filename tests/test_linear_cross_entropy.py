"""The loss of a linear head without its logits: against F.cross_entropy(F.linear(...)), with every option, at every stage, over ranks."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zk
from tests.models import DEVICE
from tests.world import run_world
from zk import linear_loss
from zk.core.store import State, UnitStore
from zk.kernels import reference
from zk.nn.tiled_linear import TiledLinear

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# relative norm of the difference to plain torch: sums in another order; in 16 bits plain torch rounds logits and their gradient, zk the latter alone
TOLERANCE = {F32: 5e-6, BF16: 2e-2, F16: 3e-3}
TOKENS, WIDTH, VOCAB = 37, 24, 203
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"label_smoothing": 0.1},
    {"softcap": 3.0},
    {"z_loss": 1e-2},
    {"ignore_index": 5},
    {"label_smoothing": 0.2, "softcap": 2.0, "z_loss": 1e-3, "ignore_index": -1},
)


@contextlib.contextmanager
def pieces(tokens: int = 8, columns: int = 64) -> Iterator[None]:
    """Context: pieces, and steps of sums over the vocabulary, are so small that little data has several."""
    with contextlib.ExitStack() as stack:
        for name in ("PIECE", "PIECE_ON_DEVICE"):
            stack.enter_context(mock.patch.object(linear_loss, name, (tokens, columns)))
        stack.enter_context(mock.patch.object(reference, "COLUMNS", columns))
        stack.enter_context(mock.patch.object(importlib.import_module("zk.kernels.cross_entropy"), "BLOCK", columns))
        yield


@pytest.fixture(autouse=True)
def small_pieces() -> Iterator[None]:
    with pieces():
        yield


def given(tokens: int = TOKENS, dtype: torch.dtype = F32, with_bias: bool = False, ignored: int = -100) -> tuple[Any, Any, Tensor, Any]:
    """Hidden states, weight, targets of which some do not count, and a bias."""
    draws = torch.Generator().manual_seed(tokens)
    hidden, weight = torch.randn(tokens, WIDTH, generator=draws), torch.randn(VOCAB, WIDTH, generator=draws) / 3
    targets = torch.randint(0, VOCAB, (tokens,), generator=draws)
    targets[2::5] = ignored
    bias = torch.randn(VOCAB, generator=draws) if with_bias else None
    made = [None if t is None else t.to(DEVICE, dtype).requires_grad_() for t in (hidden, weight, bias)]
    return made[0], made[1], targets.to(DEVICE), made[2]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """The same, with logits: in fp32, as transformers computes it."""
    reduction, softcap, z_loss = (options.pop(name, default) for name, default in (("reduction", "mean"), ("softcap", None), ("z_loss", 0.0)))
    logits = F.linear(hidden, weight, bias).float()
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    if not z_loss:
        return F.cross_entropy(logits, targets, reduction=reduction, **options)
    counts = targets != options.get("ignore_index", -100)
    losses = F.cross_entropy(logits, targets, reduction="none", **options) + z_loss * logits.logsumexp(-1).square() * counts
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / counts.sum()}[reduction]


def grads(loss: Tensor, tensors: tuple[Tensor | None, ...], upstream: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [t for t in tensors if t is not None], upstream.to(loss.dtype)))


def error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach(), want.detach()
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-12))


@pytest.mark.parametrize(
    ("reduction", "dtype"),
    (("mean", F32), ("mean", F16), ("sum", BF16), *(pytest.param("none", dtype, marks=pytest.mark.device) for dtype in (F32, BF16))),
)
def test_loss_and_gradients_are_those_of_plain_torch(reduction: str, dtype: torch.dtype) -> None:
    for number, options in enumerate(OPTIONS if DEVICE.type == "cpu" else OPTIONS[-1:]):
        hidden, weight, targets, bias = given(dtype=dtype, with_bias=number % 2 == 1, ignored=options.get("ignore_index", -100))
        want = plain(hidden, weight, targets, bias, reduction=reduction, **options)
        got = zk.linear_cross_entropy(hidden, weight, targets, bias, reduction=reduction, **options)
        assert got.dtype == F32 and got.shape == want.shape
        assert error(got, want) < TOLERANCE[dtype], options
        upstream = torch.randn(want.shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)) * 3
        wanted = (hidden, weight, bias)
        for made, exact in zip(grads(got, wanted, upstream), grads(want, wanted, upstream), strict=True):
            assert made.dtype == dtype and error(made, exact) < TOLERANCE[dtype], options


@pytest.mark.parametrize("tokens", (0, 1, 8, 37))
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_tiles_of_the_vocabulary_change_no_bit(tokens: int, reduction: str) -> None:
    hidden, weight, targets, bias = given(tokens, with_bias=True)
    found = []
    for tiles in (None, 4 * 8 * 64, 4 * 8 * 130):  # one, four, two
        loss = zk.linear_cross_entropy(hidden, weight, targets, bias, label_smoothing=0.1, reduction=reduction, max_nbytes=tiles)
        found.append([loss, *grads(loss, (hidden, weight, bias), torch.ones_like(loss))])
    assert found[0][1].isfinite().all()
    for other in found[1:]:
        assert all(torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0)) for one, two in zip(found[0], other, strict=True))


def test_pieces_of_the_usual_size_give_the_same_bits_in_any_tiles() -> None:
    with pieces(256, 4096):
        hidden, weight, targets = torch.randn(700, 48, requires_grad=True), torch.randn(9001, 48, requires_grad=True), torch.randint(0, 9001, (700,))
        found = []
        for tiles in (None, "4MiB", "9MiB"):
            loss = zk.linear_cross_entropy(hidden, weight, targets, max_nbytes=tiles)
            found.append([loss, *grads(loss, (hidden, weight), torch.ones(()))])
        assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))
        want = plain(hidden, weight, targets)
        assert all(error(*pair) < TOLERANCE[F32] for pair in zip(found[0][1:], grads(want, (hidden, weight), torch.ones(())), strict=True))


class Largest(TorchDispatchMode):
    """Context: the most elements that any tensor has which an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return out


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_no_tensor_has_more_logits_than_a_block_of_tokens(reduction: str) -> None:
    hidden, weight, targets = torch.randn(400, 4, requires_grad=True), torch.randn(VOCAB, 4, requires_grad=True), torch.randint(0, VOCAB, (400,))
    with Largest() as largest:
        zk.linear_cross_entropy(hidden, weight, targets, reduction=reduction).sum().backward()
    assert largest.numel <= 8 * 224 < 400 * VOCAB / 40


def test_without_any_target_that_counts_it_is_what_torch_makes_of_it() -> None:
    hidden, weight, targets, bias = given(with_bias=True)
    targets.fill_(-100)
    for reduction in ("mean", "sum", "none"):
        loss = zk.linear_cross_entropy(hidden, weight, targets, bias, reduction=reduction)
        want = plain(hidden, weight, targets, bias, reduction=reduction)
        assert torch.equal(loss.isnan(), want.isnan()) and not loss.nan_to_num().any()
        for made in grads(loss, (hidden, weight, bias), torch.ones_like(loss)):
            assert not made.any() and made.isfinite().all()


def test_what_requires_no_gradient_costs_none_and_gets_none() -> None:
    hidden, weight, targets, bias = given(with_bias=True)
    exact = grads(plain(hidden, weight, targets, bias), (hidden, weight, bias), torch.ones(()))
    for wanted in range(8):
        tensors = [t.detach().requires_grad_(bool(wanted >> place & 1)) for place, t in enumerate((hidden, weight, bias))]
        for reduction in ("mean", "none"):
            loss = zk.linear_cross_entropy(tensors[0], tensors[1], targets, tensors[2], reduction=reduction)
            assert loss.requires_grad == bool(wanted)
            if not wanted:
                continue
            loss = loss.sum() / (targets >= 0).sum() if reduction == "none" else loss
            loss.backward()
            for tensor, want in zip(tensors, exact, strict=True):
                assert (tensor.grad is None) != tensor.requires_grad
                assert tensor.grad is None or error(tensor.grad, want) < TOLERANCE[F32]
                tensor.grad = None
    with torch.no_grad():
        assert not zk.linear_cross_entropy(hidden, weight, targets).requires_grad


def test_a_graph_that_is_kept_gives_the_same_gradients_again_and_one_that_is_not_says_so() -> None:
    hidden, weight, targets, _ = given()
    for reduction in ("mean", "none"):
        loss = zk.linear_cross_entropy(hidden, weight, targets, reduction=reduction).sum()
        first = torch.autograd.grad(loss * 3, (hidden, weight), retain_graph=True)
        second = torch.autograd.grad(loss * 3, (hidden, weight))
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    loss = zk.linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_hidden_states_and_weights_may_be_used_twice_and_elsewhere() -> None:
    def total(loss_of: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        states = hidden * 2
        return loss_of(states, weight, targets) + 0.3 * loss_of(states + 1, weight * 1.5, targets.roll(1)) + (states @ weight.t()).square().mean()

    hidden, weight, targets, _ = given()
    want, got = (total(loss_of, hidden, weight, targets) for loss_of in (plain, zk.linear_cross_entropy))
    assert error(got, want) < TOLERANCE[F32]
    for made, exact in zip(grads(got, (hidden, weight), torch.ones(())), grads(want, (hidden, weight), torch.ones(())), strict=True):
        assert error(made, exact) < TOLERANCE[F32]


def test_it_may_be_in_a_checkpoint_under_autocast_and_beside_activations_that_leave(tmp_path: Any) -> None:
    hidden, weight, targets, _ = given()
    want = grads(zk.linear_cross_entropy(hidden, weight, targets), (hidden, weight), torch.ones(()))
    for reentrant in (True, False):
        loss = checkpoint(zk.linear_cross_entropy, hidden, weight, targets, use_reentrant=reentrant)
        loss.backward()
        assert torch.equal(hidden.grad, want[0]) and torch.equal(weight.grad, want[1])
        hidden.grad = weight.grad = None
    for reduction in ("sum", "none"):
        with zk.offload_activations(min_nbytes=0, keep_last=0, nvme_path=tmp_path):
            loss = zk.linear_cross_entropy(hidden * 1, weight, targets, reduction=reduction).sum() / (targets >= 0).sum()
        assert all(error(*pair) < 1e-6 for pair in zip(grads(loss, (hidden, weight), torch.ones(())), want, strict=True))
    with torch.autocast(DEVICE.type, BF16):
        loss = zk.linear_cross_entropy(hidden, weight, targets)
        exact = plain(hidden, weight, targets)
    assert error(loss, exact) < TOLERANCE[BF16]
    for made, other in zip(grads(loss, (hidden, weight), torch.ones(())), grads(exact, (hidden, weight), torch.ones(())), strict=True):
        assert made.dtype == F32 and error(made, other) < TOLERANCE[BF16]


def test_a_small_loss_scale_loses_no_small_probability_in_fp16() -> None:
    hidden, weight, targets, _ = given(dtype=F16)
    with torch.no_grad():
        weight.mul_(4)
    loss = zk.linear_cross_entropy(hidden, weight, targets)
    exact = plain(hidden.double(), weight.double(), targets)
    for made, want in zip(grads(loss, (hidden, weight), torch.full((), 64.0)), grads(exact, (hidden, weight), torch.full((), 64.0)), strict=True):
        assert error(made, want) < 1e-3


def test_memory_of_any_layout_infinities_and_no_dimension_are_as_in_torch() -> None:
    hidden, weight = torch.randn(WIDTH, 20).t().requires_grad_(), torch.randn(WIDTH, 33).t().requires_grad_()
    targets, bias = torch.full((1,), 5).expand(20), torch.where(torch.arange(33) > 9, -torch.inf, 0.0).requires_grad_()
    want = F.cross_entropy(F.linear(hidden, weight, bias), targets)
    exact = grads(want, (hidden, weight, bias), torch.ones(()))
    for reduction in ("mean", "none"):
        loss = zk.linear_cross_entropy(hidden, weight, targets, bias, reduction=reduction).mean()
        assert error(loss, want) < TOLERANCE[F32]
        for made, one in zip(grads(loss, (hidden, weight, bias), torch.ones(())), exact, strict=True):
            assert error(made, one) < TOLERANCE[F32]
    with torch.inference_mode():
        alone = zk.linear_cross_entropy(hidden[3], weight, targets[3], bias)
        assert error(alone, F.cross_entropy(F.linear(hidden[3], weight, bias), targets[3])) < TOLERANCE[F32]
        assert zk.linear_cross_entropy(torch.full((2, WIDTH), torch.inf), weight, targets[:2]).isnan()


@pytest.mark.parametrize("out_splits", (1, 3))
@pytest.mark.parametrize("bias", (True, False))
def test_a_tiled_head_has_the_loss_and_the_gradients_of_a_whole_one(out_splits: int, bias: bool) -> None:
    hidden, weight, targets, values = given(with_bias=bias)
    head = nn.Linear(WIDTH, VOCAB, bias=bias, device=DEVICE)
    head.load_state_dict({"weight": weight.detach(), **({"bias": values.detach()} if values is not None else {})})
    tiled = TiledLinear.from_linear(head, 1, out_splits)
    for options in ({}, {"reduction": "none", "softcap": 2.0, "label_smoothing": 0.1}):
        want = plain(hidden, weight, targets, values, **options)
        upstream = torch.randn_like(want)
        exact = grads(want, (hidden, weight, values), upstream)
        for other in (head, tiled):
            for param in head.parameters():
                param.grad = None
            states = hidden.detach().requires_grad_()
            loss = zk.linear_cross_entropy(states, other, targets, **options)
            loss.backward(upstream)
            made = [states.grad, other.weight.grad, *([other.bias.grad] if bias else [])]
            assert error(loss, want) < TOLERANCE[F32] and all(error(*pair) < TOLERANCE[F32] for pair in zip(made, exact, strict=True))
            other.zero_grad()
            tiled.zero_grad()


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"targets": torch.zeros(4, dtype=torch.int64)}, ValueError, "must fit together"),
        ({"weight": torch.randn(7, 5)}, ValueError, "must fit together"),
        ({"weight": torch.randn(0, 6)}, ValueError, "must fit together"),
        ({"targets": torch.rand(3)}, TypeError, "numbers of classes"),
        ({"targets": torch.tensor([0, 1, 9])}, IndexError, "between 0 and 8"),
        ({"targets": torch.tensor([0, -1, 3])}, IndexError, "ignore_index=-100"),
        ({"hidden": torch.randn(3, 6, dtype=torch.float64)}, TypeError, "fp32, bf16 or fp16"),
        ({"hidden": torch.randn(3, 6, dtype=BF16)}, ValueError, "autocast would cast it"),
        ({"bias": torch.randn(3)}, ValueError, "one for each row"),
        ({"weight": nn.Linear(6, 9), "bias": torch.randn(9)}, ValueError, "bias has no place"),
        ({"weight": nn.Conv1d(6, 9, 1)}, TypeError, "an nn.Linear or a TiledLinear"),
        ({"weight": TiledLinear(6, 9, in_splits=2)}, ValueError, "in_splits=1"),
        ({"reduction": "average"}, ValueError, "'mean', 'sum' or 'none'"),
        ({"label_smoothing": 2.0}, ValueError, "between 0 and 1"),
        ({"softcap": 0.0}, ValueError, "softcap must be more than 0"),
        ({"max_nbytes": 32}, ValueError, "at least 288"),
        ({"weight": torch.randn(9, 6, device="meta")}, ValueError, "weight is on meta"),
    ],
)
def test_what_cannot_be_right_is_refused(change: dict[str, Any], kind: type[Exception], says: str) -> None:
    arguments = {"hidden": torch.randn(3, 6), "weight": torch.randn(9, 6), "targets": torch.zeros(3, dtype=torch.int64), **change}
    with pytest.raises(kind, match=says):
        zk.linear_cross_entropy(**arguments)


# ---- stage 3 -----------------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Blocks, and a head that is tied to the embedding, whole or in tiles; returns the loss."""

    def __init__(self, head: str, loss_of: Any, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=head == "tiled")
        if head == "tied":
            self.head.weight = self.embedding.weight
        self.loss_of, self.options = loss_of, options

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids[:, :-1])
        for block in self.blocks:
            hidden = hidden + block(hidden)
        head = self.head if isinstance(self.head, TiledLinear) or self.loss_of is not plain else self.head.weight
        loss = self.loss_of(hidden.flatten(0, 1), head, ids[:, 1:].flatten(), *([self.head.bias] if self.loss_of is plain else []), **self.options)
        return loss.mean()


def batches(rank: int = 0, world: int = 1) -> Iterator[Tensor]:
    draws = torch.Generator().manual_seed(3)
    for _ in range(2):
        yield torch.randint(0, VOCAB, (4 if DEVICE.type == "cpu" else 2, 12), generator=draws).to(DEVICE)[rank::world]


def trained(case: tuple[str, str, int, str]) -> str:
    """Train at a stage on this rank's part of the batch; "" if every rank has what plain torch has on all of it."""
    head, reduction, stage, folder = case
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    exact, model = Model(head, plain, reduction=reduction).to(DEVICE), Model(head, zk.linear_cross_entropy, reduction=reduction)
    model.load_state_dict(exact.state_dict())
    model.to(DEVICE)
    if head == "tiled":
        model.head = TiledLinear.from_linear(model.head, 1, 3)
    place = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": folder} if folder else {}
    adam = torch.optim.AdamW(exact.parameters(), lr=1e-2)
    with pieces(), zk.ZeroOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage, **place) as optimizer:
        for mine, whole in zip(batches(rank, world), batches(), strict=True):
            for it, by, ids in ((model, optimizer, mine), (exact, adam, whole)):
                it(ids).backward()
                by.step()
                by.zero_grad()
        state = optimizer.consolidated_state_dict()
    worst = max(float((state[name].cpu() - value.cpu()).abs().max()) for name, value in exact.state_dict().items())
    return "" if worst < 2e-4 else f"{case}: parameters differ by {worst}"


CASES = [("tied", "mean", 2), ("tied", "mean", 3), ("own", "none", 3), ("tiled", "mean", 2), ("tiled", "mean", 3), ("tiled", "none", 3)]


@pytest.mark.device
def test_a_model_trains_as_with_logits_at_every_stage(tmp_path: Any) -> None:
    if DEVICE.type != "cpu":
        assert trained(("tied", "mean", 3, "")) == ""
        return
    for case in CASES:
        assert trained((*case, "")) == ""
    assert trained(("tied", "mean", 3, str(tmp_path))) == trained(("tiled", "mean", 3, str(tmp_path))) == ""


def test_over_ranks_it_trains_as_with_logits() -> None:
    cases = [(*case, "") for case in CASES[1:5]]
    assert run_world(2, trained, cases) == [["", ""]] * len(cases)


@pytest.mark.parametrize("head, most", [("tied", 2), ("tiled", 2)])
def test_a_head_is_gathered_once_for_all_tokens_in_each_direction(head: str, most: int, tmp_path: Any) -> None:
    model = Model(head, zk.linear_cross_entropy).to(DEVICE)
    if head == "tiled":
        model.head = TiledLinear.from_linear(model.head, 1, 3)
    place = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path, "prefetch": 0}
    with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, **place) as optimizer:
        counts: dict[str, int] = {}
        gather = UnitStore.gather

        def counted(store: UnitStore) -> None:
            counts[store.unit.name] = counts.get(store.unit.name, 0) + (store.state is not State.GATHERED)
            gather(store)
            tiles = [other for other in optimizer.held if ".tiles." in other.unit.name and other.state is State.GATHERED]
            assert len(tiles) <= 1

        with mock.patch.object(UnitStore, "gather", counted):
            model(next(batches())).backward()
        assert max(counts.values()) <= most and len(counts) == len(optimizer.held)


def test_a_head_of_stage_3_may_be_read_outside_of_the_forward(tmp_path: Any) -> None:
    for reduction in ("mean", "none"):
        model = Model("own", plain).to(DEVICE)
        hidden, _, targets, _ = given()
        want = plain(hidden, model.head.weight, targets)
        exact = grads(want, (hidden, model.head.weight), torch.ones(()))
        place = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme_path": tmp_path}
        with zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, **place):
            loss = zk.linear_cross_entropy(hidden, model.head.weight, targets, reduction=reduction)
            loss = loss.sum() / (targets >= 0).sum() if reduction == "none" else loss
            loss.backward()
            assert error(loss, want) < TOLERANCE[F32] and error(hidden.grad, exact[0]) < TOLERANCE[F32]
            assert error(model.head.weight.grad, exact[1]) < TOLERANCE[F32]


# ---- ranks with other numbers of targets -------------------------------------------------------------------------------------


def weighted(stage: int) -> str:
    """Train on sequences of which each rank has a part, with other numbers of targets; "" if it is the loss over all of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    weight, hidden = torch.randn(VOCAB, WIDTH), torch.randn(12, WIDTH)
    targets = torch.randint(0, VOCAB, (12,))
    targets[:5] = -100  # the first rank has one target, the second all
    exact = nn.Parameter(weight.clone())
    want = F.cross_entropy(hidden @ exact.t(), targets)
    want.backward()
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    head.weight.data.copy_(weight)
    mine, own = hidden.chunk(world)[rank], targets.chunk(world)[rank]
    optimizer = zk.ZeroOptimizer(head, torch.optim.SGD(head.parameters(), lr=1.0), stage=stage)
    count = (own != -100).sum()
    dist.all_reduce(count)
    loss = zk.linear_cross_entropy(mine, head.weight, own, reduction="sum") * world / count  # zk averages over ranks
    loss.backward()
    optimizer.step()
    total = loss.detach() / world
    dist.all_reduce(total)
    with zk.gather(head.parameters()):
        worst = float((head.weight - (weight - exact.grad)).abs().max())
    optimizer.close()
    return "" if worst < 1e-5 and abs(float(total - want.detach())) < 1e-5 else f"stage {stage}: {worst}, loss {total} instead of {want}"


def test_ranks_with_other_numbers_of_targets_train_on_the_mean_over_all_targets() -> None:
    assert run_world(2, weighted, (2, 3)) == [["", ""]] * 2
