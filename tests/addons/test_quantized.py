"""Adapters of PEFT over bases in 4 bits (bitsandbytes): the bits of a plain run, ranks, checkpoints, what is refused."""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zk
from tests.models import adamw, descend, small_chunks
from tests.parity import place
from tests.world import run_world
from zk.addons.quantized import PACKS

bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.usefixtures("torch_engine"), pytest.mark.filterwarnings("ignore")]
Linear4bit = bitsandbytes.nn.Linear4bit


class Case(NamedTuple):
    place: str = "3 host"
    kind: str = "nf4"
    double: bool = True  # scales are quantized, too
    dtype: Any = None
    seed: int = 0  # of rank 1's base


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        computed = torch.bfloat16 if case.dtype else torch.float32  # bitsandbytes casts the bias to it, in place
        options = {"compute_dtype": computed, "compress_statistics": case.double, "quant_type": case.kind}
        self.up, self.down = Linear4bit(64, 128, **options), Linear4bit(128, 64, bias=False, **options)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    is_loaded_in_4bit = True  # as PEFT asks

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(case) for _ in range(3))
        self.case = case

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.case.dtype else block(x)
        return x


def adapted(case: Case, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = Net(case).to("cpu")  # which quantizes
    torch.manual_seed(9)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["up", "down"])).train()


def wrapped(case: Case, model: nn.Module, folder: Any = None) -> zk.ZeroOptimizer:
    return zk.ZeroOptimizer(model, adamw(model), dtype=case.dtype, **place(case.place, folder))


def train(model: nn.Module, optimizer: Any, start: int = 0, stop: int = 2) -> list[float]:
    batches = [torch.randn(4, 64, generator=torch.Generator().manual_seed(step)) for step in range(start, stop)]
    return [descend(optimizer, model(x).square().mean() + model(x).sin().mean()) for x in batches]


def unlike(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    return [*(got.keys() ^ want.keys()), *(name for name in got.keys() & want.keys() if not torch.equal(got[name], want[name]))]


def differences(case: Case) -> list[Any]:
    """What differs from a plain run, or of another dtype from stage 0, before and after an evaluation, whole, and closed."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    plain, model = adapted(case), adapted(case, case.seed * rank)
    for module in filter(lambda module: hasattr(module, PACKS), model.modules()):
        setattr(module, PACKS, True)  # also on CPUs that cannot
    with tempfile.TemporaryDirectory() as folder, small_chunks():
        other: Any = adamw(plain) if case.dtype is None else wrapped(Case("0 device", dtype=case.dtype), plain)
        want = [*train(plain, other), *train(plain, other, 2, 3)]
        optimizer = wrapped(case, model, folder)
        got = train(model, optimizer)
        with torch.no_grad():
            model.eval()(torch.ones(1, 64))
        got += train(model.train(), optimizer, 2, 3)
        found: list[Any] = [] if got == want else [f"losses {got} instead of {want}"]
        kinds = {param.dtype for param in model.parameters() if hasattr(param, "quant_state")}
        found += [kinds] * (kinds != {torch.uint8}) + unlike(optimizer.consolidated_state_dict(), plain.state_dict())
        optimizer.close()
    found += [*unlike(model.state_dict(), plain.state_dict()), *(name for name, _ in model.named_buffers())]
    for module in model.modules():
        found += [PACKS] * (not getattr(module, PACKS, True))
        setattr(module, PACKS, False)
    x = torch.ones(2, 64, dtype=torch.bfloat16 if case.dtype else torch.float32)
    return found + ["merged"] * (not torch.equal(model.merge_and_unload()(x), plain.merge_and_unload()(x)))


CASES = [
    *(Case(where) for where in ("0 device", "1 nvme", "3 host")),
    Case("2 host", kind="fp4", double=False),
    Case("3 nvme", dtype="bf16", double=False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_adapters_over_codes_train_as_in_a_plain_run(case: Case) -> None:
    assert differences(case) == []


def on_a_rank(case: Case) -> Any:
    if case.kind != "other":
        return differences(case)
    with pytest.raises(ValueError) as error:
        wrapped(case, adapted(Case(double=not dist.get_rank())))
    return str(error.value)


def test_all_ranks_have_the_scales_of_the_first_one_or_refuse_others_by_name() -> None:
    cases = [Case("3 nvme"), *(Case(where, kind="fp4", double=False, seed=1) for where in ("2 host", "3 host"))]
    *found, said = run_world(2, on_a_rank, [*cases, Case(kind="other")])
    assert found == [[[], []]] * len(cases) and all("ranks have other quantized bases" in words for words in said)


@pytest.mark.parametrize("where", ["1 host", "3 host"])
def test_a_checkpoint_has_the_scales_and_the_number_that_is_no_tensor(where: str, tmp_path: Path) -> None:
    models = adapted(Case()), adapted(Case(), 1)
    for model, number in zip(models, (0.25, 0.75), strict=True):
        for param in model.parameters():
            if hasattr(param, "quant_state"):
                param.quant_state.offset.fill_(number)
    first, second = (wrapped(Case(where), model) for model in models)
    train(models[0], first)
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path)
    assert train(models[1], second, 2, 4) == train(models[0], first, 2, 4)
    assert unlike(second.consolidated_state_dict(), first.consolidated_state_dict()) == []
    with pytest.raises(ValueError, match=r"other buffers than this model, or of other shapes: .*quant_state\.bitsandbytes__nf4"):
        wrapped(Case(where), adapted(Case(), 2)).load_checkpoint(tmp_path)  # with numbers of more digits
    second.load_checkpoint(tmp_path)
    second.close()  # before any forward
    assert {p.quant_state.offset.item() for p in models[1].parameters() if hasattr(p, "quant_state")} == {0.25}


def test_what_cannot_be_right_is_refused_by_name() -> None:
    packed = Linear4bit(64, 64, quant_type="nf4").to("cpu")
    packed.weight.quant_state.packing_format_for_cpu = True
    halves = Linear4bit(64, 64, quant_storage=torch.bfloat16).to("cpu")
    eight = bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
    for module, about in ((packed, "Params4bit of torch.uint8"), (halves, "torch.bfloat16"), (Linear4bit(64, 64), "torch.float32"), (eight, "Int8")):
        model = nn.Sequential(module, nn.Linear(64, 1))
        with pytest.raises(ValueError, match=f"parameter '0.weight' is a .*{about}.*load_in_4bit=True"):
            zk.ZeroOptimizer(model, torch.optim.SGD(model[1].parameters(), lr=0.1), stage=2)
