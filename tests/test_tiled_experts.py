"""Experts that are rows of one parameter, in groups: numbers of the whole layer, state of the whole layer, and only what is in use is fetched."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zk
from tests.models import DEVICE
from tests.world import run_world
from zk.checkpoint.export import export
from zk.core.store import State, UnitStore
from zk.nn.tiles import Tile
from zk.tiled_experts import ExpertTile, TiledExperts

pytestmark = pytest.mark.usefixtures("torch_engine")

WIDTH, INNER, NUM = 32, 48, 8
EXPERT = 3 * WIDTH * INNER + 2 * INNER  # elements
PAIR = 2 * EXPERT * 4  # bytes


class Experts(nn.Module):
    """As in transformers, written by hand: all experts in one parameter, and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = NUM
        self.up = nn.Parameter(torch.randn(NUM, 2 * INNER, WIDTH) / WIDTH**0.5)
        self.up_bias = nn.Parameter(torch.randn(NUM, 2 * INNER) / 10)
        self.down = nn.Parameter(torch.randn(NUM, WIDTH, INNER) / INNER**0.5)
        self.act = nn.SiLU()

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = nn.functional.one_hot(chosen, self.num_experts + 1).permute(2, 1, 0)
        for expert in range(self.num_experts):
            slot, token = torch.where(mask[expert])
            if not len(token):
                continue
            gate, up = nn.functional.linear(x[token], self.up[expert], self.up_bias[expert]).chunk(2, -1)
            values = nn.functional.linear(self.act(gate) * up, self.down[expert])
            out.index_add_(0, token, (values * weights[token, slot, None]).to(out.dtype))
        return out


class Block(nn.Module):
    """Each token goes to the best ``slots`` of its experts, of those that are open."""

    def __init__(self, slots: int = 3) -> None:
        super().__init__()
        self.norm, self.gate, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM, bias=False), Experts()
        self.open, self.slots, self.wrap = list(range(NUM)), slots, 0

    def mixed(self, x: Tensor) -> Tensor:
        flat = self.norm(x).reshape(-1, WIDTH)
        weights, chosen = torch.softmax(self.gate(flat)[:, self.open], -1).topk(min(self.slots, len(self.open)), -1)
        return x + self.experts(flat, torch.tensor(self.open, device=x.device)[chosen], weights).view_as(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.mixed, x, use_reentrant=self.wrap == 2) if self.wrap else self.mixed(x)  # type: ignore[no-any-return]


class Mixture(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(layers)), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def set(self, **values: Any) -> None:
        for block in self.blocks:
            vars(block).update(values)


def make(nbytes: int = 0, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> Mixture:
    torch.manual_seed(seed)
    model = Mixture().to(DEVICE, dtype)
    if nbytes:
        assert zk.tile_experts(model, nbytes, **more) == ["blocks.0.experts", "blocks.1.experts"]
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def batch(seed: int, tokens: int, model: nn.Module) -> Tensor:
    dtype = next(param.dtype for param in model.parameters())
    return torch.randn(2, tokens // 2, WIDTH, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0, tokens: int = 4, part: slice = slice(None)) -> list[float]:
    losses = []
    for seed in range(start, start + steps):
        loss = model(batch(seed, tokens, model)[part]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    assert [name for name in want if not torch.equal(got[name].cpu(), want[name].cpu())] == []


# ---- the layer alone -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "dtype", "wrap"),
    ((1, torch.float32, 1), (PAIR, torch.float32, 0), (PAIR, torch.bfloat16, 2), (3 * PAIR // 2 + 5, torch.bfloat16, 1)),
)
def test_a_tiled_model_trains_in_plain_torch_to_the_bits_of_the_whole_one(nbytes: int, dtype: torch.dtype, wrap: int) -> None:
    plain, tiled = make(dtype=dtype), make(nbytes, dtype)
    one, other = adamw(plain), adamw(tiled)
    for model in (plain, tiled):
        model.set(wrap=wrap)
    for start, experts in enumerate((range(NUM), (0, 5), (2,), range(NUM))):
        plain.set(open=list(experts))
        tiled.set(open=list(experts))
        assert train(tiled, other, 2, 2 * start) == train(plain, one, 2, 2 * start)
        assert_equal(tiled.state_dict(), plain.state_dict())


def test_gradients_of_experts_without_tokens_are_zero_and_none_if_they_rest() -> None:
    plain, tiled, resting = make(), make(PAIR), make(PAIR, rest=True)
    for model in (plain, tiled, resting):
        model.set(open=[4, 5])
        model(batch(0, 4, model)).square().mean().backward()
    want = plain.blocks[0].experts.up.grad
    assert torch.equal(tiled.blocks[0].experts.up.grad, want) and not want[:4].any() and want[4:6].any()
    assert [tile.part.up.grad is None for tile in resting.blocks[0].experts.tiles] == [True, True, False, True]
    assert torch.equal(resting.blocks[0].experts.tiles[2].part.up.grad, want[4:6])


@pytest.mark.parametrize("family", ("Mixtral", "Qwen3Moe", "GptOss"))
def test_models_of_transformers_train_as_the_whole_ones(family: str, tmp_path: Path) -> None:
    """Bits, where products and sums are the same: eager, and grouped. Else what other numbers of rows make of the last bit."""
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 32)
    sizes |= {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "decoder_sparse_step": 1, "layer_types": ["full_attention"] * 2}
    heads = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    whole = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes, **heads))
    whole.eval()
    for implementation, dtype in (("eager", torch.bfloat16), ("grouped_mm", torch.float32), ("batched_mm", torch.float32)):
        plain = copy.deepcopy(whole).to(dtype)
        plain.set_experts_implementation(implementation)
        tiled = copy.deepcopy(plain)
        names = zk.tile_experts(tiled, 3 * 3 * 33 * 32 * dtype.itemsize)
        assert names == [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
        losses: dict[nn.Module, list[float]] = {}
        grads = {}
        for model in (plain, tiled):
            optimizer = adamw(model)
            for seed in range(2):
                ids = torch.randint(0, 64, (2, 4), generator=torch.Generator().manual_seed(seed))
                loss = model(input_ids=ids, labels=ids, output_router_logits=True).loss
                loss.backward()
                losses.setdefault(model, []).append(loss.item())
                grads[model] = [model.get_submodule(name).down_proj.grad.clone() for name in names]
                optimizer.step()
                optimizer.zero_grad()
        if implementation == "eager" or (implementation, family) in (("grouped_mm", "Mixtral"), ("grouped_mm", "Qwen3Moe")):
            assert losses[tiled] == losses[plain]
            assert_equal(tiled.state_dict(), plain.state_dict())
        assert losses[tiled] == pytest.approx(losses[plain], rel=1e-5)
        for got, want in zip(grads[tiled], grads[plain], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * want.abs().max().item())
        prompt = torch.tensor([[1, 2, 3]])
        assert torch.equal(tiled.generate(prompt, max_new_tokens=5, do_sample=False), plain.generate(prompt, max_new_tokens=5, do_sample=False))
    tiled.save_pretrained(tmp_path)
    assert_equal(dict(type(whole).from_pretrained(tmp_path, dtype=torch.float32).state_dict()), dict(tiled.state_dict()))


def test_routing_may_name_no_expert_or_have_one_of_each_token() -> None:
    class Single(Experts):
        def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return super().forward(x, chosen[:, None], weights[:, None])

    x, weights = torch.randn(6, WIDTH), torch.rand(6, 2)
    for kind, chosen in ((Experts, torch.tensor([[0, 8], [8, 8], [7, 1], [7, 3], [8, 2], [0, 1]])), (Single, torch.tensor([0, 8, 1, 7, 1, 0]))):
        model = nn.ModuleDict({"experts": kind()})
        want = model["experts"](x, chosen, weights if chosen.ndim == 2 else weights[:, 0])
        assert zk.tile_experts(model, PAIR) == ["experts"]
        layer = model["experts"]
        assert torch.equal(layer(x, weights=weights if chosen.ndim == 2 else weights[:, 0], chosen=chosen), want)
        assert not layer(x[:0], chosen[:0], weights[:0] if chosen.ndim == 2 else weights[:0, 0]).numel()


def test_frozen_experts_get_no_gradient() -> None:
    plain, tiled = make(), make(PAIR)
    for model in (plain, tiled):
        model.blocks[0].experts.requires_grad_(False)
        model.blocks[1].experts.down.requires_grad_(False)
        model(batch(0, 4, model)).square().mean().backward()
    assert torch.equal(plain.first.weight.grad, tiled.first.weight.grad)
    assert torch.equal(plain.blocks[1].experts.up.grad, tiled.blocks[1].experts.up.grad)
    assert all(tile.part.up.grad is None for tile in tiled.blocks[0].experts.tiles) and tiled.blocks[1].experts.down.grad is None


# ---- what is tiled, and what is refused ------------------------------------------------------------------------------------------


def test_groups_are_as_large_as_fits_and_an_expert_that_does_not_is_one_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    assert zk.tile_experts(model, NUM * PAIR // 2) == [] and type(model.blocks[0].experts) is Experts
    assert zk.tile_experts(model, 3 * PAIR // 2) == ["blocks.0.experts", "blocks.1.experts"]
    sizes = [tile.experts for tile in model.blocks[0].experts.tiles]
    assert sizes == [slice(0, 2), slice(2, 5), slice(5, 8)]
    assert [tile.part.num_experts for tile in model.blocks[0].experts.tiles] == [2, 3, 3] and model.blocks[0].experts.num_experts == NUM
    assert zk.tile_experts(model, 1) == [] and not caplog.records  # they are tiles
    assert len(make(1).blocks[1].experts.tiles) == NUM
    assert "an expert of 'blocks.0.experts' has 18816 bytes, more than max_nbytes=1" in caplog.text


class Adds(Experts):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return x + super().forward(x, chosen, weights)


class Normalizes(Experts):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, chosen, weights / weights.sum(-1, keepdim=True))


@pytest.mark.parametrize("kind", (Adds, Normalizes))
def test_experts_whose_outputs_are_not_just_added_are_refused_with_the_first_token(kind: type[Experts]) -> None:
    model = nn.ModuleDict({"experts": kind()})
    zk.tile_experts(model, PAIR)
    with pytest.raises(ValueError, match=rf"{kind.__name__} gives something else for a token than the sum of its experts' outputs"):
        model["experts"](torch.randn(2, WIDTH), torch.tensor([[1], [2]]), torch.ones(2, 1))


def test_what_cannot_be_tiled_is_refused_or_stays(caplog: pytest.LogCaptureFixture) -> None:
    class Other(Experts):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return x

    model = make()
    with pytest.raises(ValueError, match="max_nbytes must be a number of bytes"):
        zk.tile_experts(model, 0)
    with pytest.raises(ValueError, match="the model itself"):
        zk.tile_experts(Experts(), 1)
    other = nn.ModuleList([Other(), nn.Bilinear(4, 4, 4)])
    assert zk.tile_experts(other, 1) == [] and "'0' has parameters of 8 experts" in caplog.text
    model.blocks[1].experts.up = model.blocks[0].experts.up
    with pytest.raises(ValueError, match=r"the up of 'blocks\.0\.experts' is tied"):
        zk.tile_experts(model, PAIR)
    assert type(model.blocks[0].experts) is Experts
    with zk.ZeroOptimizer(held := make(), adamw(held)), pytest.raises(ValueError, match="call tile_experts before the optimizer"):
        zk.tile_experts(held, PAIR)
    with zk.deferred_init():
        late = make()
    with pytest.raises(ValueError, match=r"inside zk\.deferred_init"):
        zk.tile_experts(late, PAIR)
    layer = make(PAIR).blocks[0].experts
    x, numbers, weights = torch.randn(3, WIDTH), torch.tensor([[1], [2], [3]]), torch.ones(3, 1)
    with pytest.raises(TypeError, match=r"takes hidden states, the numbers .* got x torch.float32, chosen torch.float32, weights torch.float32"):
        layer(x, weights, weights)
    with pytest.raises(ValueError, match=r"a routing of \(tokens, experts of each\)"):
        layer(x, numbers, torch.ones(3, NUM))
    with pytest.raises(IndexError, match="8 experts, and a token is routed to expert 9"):
        layer(x, torch.tensor([[1], [9], [3]]), weights)


def test_parameters_of_the_whole_layer_can_be_read_and_written() -> None:
    plain, tiled = make().blocks[0].experts, make(PAIR).blocks[0].experts
    assert torch.equal(tiled.up, plain.up) and tiled.up.shape == plain.up.shape
    with torch.no_grad():
        tiled.up[3] = 1
        tiled.up_bias.mul_(2)
    assert (tiled.tiles[1].part.up[1] == 1).all() and torch.equal(tiled.tiles[3].part.up_bias, 2 * plain.up_bias[6:])
    tiled.up.square().sum().backward()
    assert torch.equal(tiled.tiles[2].part.up.grad, 2 * tiled.tiles[2].part.up)
    with pytest.raises(AttributeError, match="'up' of a TiledExperts is its tiles"):
        tiled.up = nn.Parameter(plain.up.detach())
    with pytest.raises(RuntimeError, match=r"size mismatch for down: .*\[8, 32, 47\]"):
        tiled.load_state_dict({**plain.state_dict(), "down": torch.zeros(NUM, WIDTH, INNER - 1)})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "down"'):
        tiled.load_state_dict({name: value for name, value in plain.state_dict().items() if name != "down"})


# ---- held by zk ------------------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "2-beside": {"stage": 2, "overlap_step": True, "optimizer_tier": "host"},
    "2-nvme": {"stage": 2, "optimizer_tier": "nvme"},
    "3-host": {"stage": 3, "param_tier": "host", "optimizer_tier": "host"},
    "3-nvme": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme"},
    "3-nvme-far": {"stage": 3, "param_tier": "nvme", "optimizer_tier": "nvme", "prefetch": 3},
}
ON_DEVICE = ("2-beside", "3-nvme-far")


def wrapped(model: nn.Module, setting: str, folder: Path | str, **more: Any) -> zk.ZeroOptimizer:
    options = {**SETTINGS[setting], **more, **({"nvme_path": folder} if "nvme" in setting else {})}
    return zk.ZeroOptimizer(model, adamw(model), **options)


@pytest.mark.parametrize("setting", [pytest.param(setting, marks=[pytest.mark.device] * (setting in ON_DEVICE)) for setting in SETTINGS])
def test_tiled_experts_train_as_the_whole_ones_in_plain_torch(setting: str, tmp_path: Path) -> None:
    model, plain = make(PAIR), make()
    other = adamw(plain)
    with wrapped(model, setting, tmp_path) as optimizer:
        assert sum(".experts.tiles." in store.unit.name for store in optimizer.held) == 2 * 4
        for start, experts in enumerate((range(NUM), (0, 5), (2, 3, 7), range(NUM))):
            for each in (model, plain):
                each.set(open=list(experts), wrap=start % 3)
            assert train(model, optimizer, 1, start) == train(plain, other, 1, start)
            x = batch(99, 4, model)
            with torch.no_grad():
                assert torch.equal(model.eval()(x), plain.eval()(x))
        assert_equal(optimizer.consolidated_state_dict(), plain.state_dict())
        assert_equal(dict(model.state_dict()), plain.state_dict())


def test_micro_batches_that_use_other_experts_add_up(tmp_path: Path) -> None:
    model, plain = make(PAIR), make()
    other = adamw(plain)
    with wrapped(model, "3-nvme", tmp_path) as optimizer:
        for experts in ((0, 1), (6, 7)):
            for each in (model, plain):
                each.set(open=list(experts))
                each(batch(0, 4, each)).square().mean().backward()
        for by in (optimizer, other):
            by.step()
            by.zero_grad()
        assert_equal(optimizer.consolidated_state_dict(), plain.state_dict())


def test_16_bit_experts_train_as_the_whole_ones_under_zk(tmp_path: Path) -> None:
    model, whole, options = make(PAIR), make(), {"dtype": "bf16", "clip_grad_norm": 0.1}
    with wrapped(model, "3-nvme", tmp_path, **options) as one, wrapped(whole, "2-beside", "", **options) as other:
        for start, experts in enumerate((range(NUM), (0, 5))):
            for each in (model, whole):
                each.set(open=list(experts))
            assert train(model, one, 2, 2 * start) == train(whole, other, 2, 2 * start)
        assert_equal(one.consolidated_state_dict("fp32"), other.consolidated_state_dict("fp32"))


@pytest.mark.parametrize(("setting", "rest"), (("3-nvme", True), ("3-nvme-far", False)))
def test_only_groups_in_use_are_fetched(setting: str, rest: bool, tmp_path: Path) -> None:
    """Bytes of a step with one group of two experts in each block, another one in each step; the update takes all groups, but for those that rest."""
    model, draw = make(PAIR, rest=rest), random.Random(0)
    with wrapped(model, setting, tmp_path) as optimizer:
        for step in range(12):
            if step == 4:
                optimizer.synchronize()
                before = optimizer.metrics()["fetched_nbytes"]
            first = 2 * draw.randrange(NUM // 2)
            model.set(open=[first, first + 1])
            train(model, optimizer, 1, step)
        optimizer.synchronize()
        nbytes = (optimizer.metrics()["fetched_nbytes"] - before) / 8
    in_use, others = 2 * 2 * EXPERT, 2 * (NUM - 2) * EXPERT
    small = sum(param.numel() for param in model.parameters()) - in_use - others
    update, compute = 4 + 8 + 4, 4 + 4  # bytes of an element: parameter, moments, gradient; the parameter for forward and for backward
    needed = (update + compute) * (in_use + small) + (0 if rest else update) * others
    pages = 4096 * 6 * len(optimizer.held)  # each piece begins on a page
    least = needed - (4 + compute) * (in_use + small) - (0 if rest else 4) * others  # parameters may be in memory still
    assert least <= nbytes <= 1.1 * needed + pages, (least, nbytes, needed)


def test_one_group_at_a_time_is_gathered_in_forward_and_in_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, gather = make(1), UnitStore.gather
    most = {"forward": 0, "backward": 0}
    with wrapped(model, "3-nvme", tmp_path, prefetch=0) as optimizer:

        def watched(store: UnitStore) -> None:
            gather(store)
            full = sum(other.state is State.GATHERED for other in optimizer.held if ".tiles." in other.unit.name)
            phase = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
            most[phase] = max(most[phase], full)

        monkeypatch.setattr(UnitStore, "gather", watched)
        train(model, optimizer, 2)
        monkeypatch.undo()
    assert most == {"forward": 1, "backward": 1}


def ranks(case: tuple[str, bool, str]) -> str:
    """Train on this rank's part of the batch, whose tokens go to experts of its own; "" if every rank has what the plain model has."""
    setting, rest, folder = case
    rank = dist.get_rank()
    model, plain = make(PAIR, rest=rest), make(PAIR, rest=rest) if rest else make()
    other, gathered, gather = adamw(plain), set[str](), UnitStore.gather

    def watched(store: UnitStore) -> None:
        gathered.add(store.unit.name.rpartition("tiles.")[2])
        gather(store)

    more = {"prefetch": 0} if setting == "3-host" else {}  # so that only what is used is gathered
    with wrapped(model, setting, folder, **more) as optimizer, mock.patch.object(UnitStore, "gather", watched):
        for step, ours in enumerate((([0, 1], [6, 7]), ([0, 5], [4, 5]), ([2], [2, 3, 7]))):
            model.set(open=ours[rank], wrap=step)
            model(batch(step, 4, model)[rank : rank + 1]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            groups = {str(expert // 2) for experts in ours for expert in experts}
            if more and not {*"0123"} & gathered <= groups:
                return f"{setting}: groups {gathered} were gathered in step {step}, and {groups} used"
            gathered.clear()
            for number, experts in enumerate(ours):
                plain.set(open=experts)
                (plain(batch(step, 4, plain)[number : number + 1]).square().mean() / 2).backward()
            other.step()
            other.zero_grad()
        with torch.no_grad():
            model(batch(9, 4 if rank else 0, model))
        worst = max((value - plain.state_dict()[name]).abs().max().item() for name, value in optimizer.consolidated_state_dict().items())
    # the mean over ranks is rounded otherwise than the sum of two halves
    return "" if worst < 2e-5 else f"{setting}: parameters differ by {worst}"


def test_ranks_with_other_experts_train_as_the_whole_model_does(tmp_path: Path) -> None:
    cases = [(setting, False, str(tmp_path)) for setting in ("3-host", "3-nvme-far")]
    cases += [(setting, True, str(tmp_path)) for setting in ("2-beside", "3-host")]
    for results in run_world(2, ranks, cases):
        assert results == ["", ""], "\n".join(map(str, results))


# ---- checkpoints -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", (2, 3))
def test_checkpoints_exports_and_files_are_those_of_the_whole_model(stage: int, tmp_path: Path) -> None:
    sizes = (0, PAIR, 3 * PAIR // 2)
    model = make(PAIR)
    optimizer = zk.ZeroOptimizer(model, adamw(model), stage=stage, dtype="bf16")
    train(model, optimizer, 3)
    optimizer.save_checkpoint(tmp_path / "run")
    want = optimizer.consolidated_state_dict("fp32")
    assert list(want) == [name for name, _ in make().named_parameters()]
    export(tmp_path / "run", tmp_path / "out", torch.float32)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert_equal({name: exported[name] for name in want}, want)
    moments = []
    for size in sizes:
        again = make(size, seed=7)
        second = zk.ZeroOptimizer(again, adamw(again), stage=5 - stage, dtype="bf16")
        second.load_checkpoint(tmp_path / "run")
        assert_equal(second.consolidated_state_dict("fp32"), want)
        train(again, second, 2, 3)
        moments.append(second.consolidated_state_dict("fp32"))
        second.save_checkpoint(tmp_path / f"again{size}")
        second.close()
    assert_equal(moments[1], moments[0])
    assert_equal(moments[2], moments[0])
    back = make(PAIR, seed=8)
    third = zk.ZeroOptimizer(back, adamw(back), stage=stage, dtype="bf16")
    third.load_checkpoint(tmp_path / "again0")  # of the whole model
    assert_equal(third.consolidated_state_dict("fp32"), moments[0])


@pytest.mark.parametrize("deferred", (False, True))
def test_models_without_memory_and_files_of_the_whole_model(deferred: bool, tmp_path: Path) -> None:
    plain, file = make(), make(seed=3)
    save_file(file.state_dict(), tmp_path / "model.safetensors")
    if deferred:
        with zk.deferred_init():
            model = make(PAIR)
    else:
        model = make(PAIR)
    with zk.ZeroOptimizer(model, adamw(model), stage=3, param_tier="host") as optimizer:
        assert_equal(optimizer.consolidated_state_dict(), plain.state_dict())
        zk.load_pretrained(model, tmp_path)
        assert_equal(optimizer.consolidated_state_dict(), file.state_dict())
        assert sorted(optimizer.consolidated_state_dict(names=["blocks.0.experts.up"])) == ["blocks.0.experts.up"]
        with pytest.raises(KeyError, match=r"by tile: optimizer.state\[layer.tiles\[0\].part.up\]"), zk.gather(model.parameters()):
            optimizer.state[model.blocks[0].experts.up]


def test_a_copy_is_a_tiled_model_of_its_own() -> None:
    model = make(PAIR)
    twin = copy.deepcopy(model)
    assert isinstance(twin.blocks[0].experts, TiledExperts) and all(isinstance(tile, (Tile, ExpertTile)) for tile in twin.blocks[0].experts.tiles)
    train(twin, adamw(twin), 1)
    assert_equal(model.state_dict(), make().state_dict())
