"""Plans over tensor parallel ranks and replicas: bytes on a rank, bytes that come to it, and what cannot be divided."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tests.test_plan import CONFIGS, machine
from zk.config import ZeroConfig
from zk.core.precision import stored_dtypes
from zk.core.units import ALIGN, Layout, find_units
from zk.tools.cli import app
from zk.tools.plan.choose import footprint, plan
from zk.tools.plan.shape import Shape, decoder_of, shape_of
from zk.tools.plan.speed import step_of

WIDTH, LAYERS, VOCAB, CONTEXT, TENSOR, SHARDS = 25_600, 128, 50_304, 2048, 8, 64


class PartOfABlock(nn.Module):
    """A block of the 1T model as the first of eight tensor parallel ranks has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH // TENSOR)
        self.up = nn.Linear(WIDTH, 4 * WIDTH // TENSOR)
        self.out = nn.Linear(WIDTH // TENSOR, WIDTH)
        self.down = nn.Linear(4 * WIDTH // TENSOR, WIDTH)


class Part(nn.Module):
    """All of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB // TENSOR, WIDTH), nn.Linear(WIDTH, VOCAB // TENSOR, bias=False)
        self.positions, self.norm = nn.Embedding(CONTEXT, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList([PartOfABlock() for _ in range(LAYERS)])


def test_a_trillion_parameters_on_64_machines_of_8_take_16_bytes_each_over_all_ranks() -> None:
    shape = shape_of(f"gpt:layers={LAYERS},width={WIDTH},heads=200,vocab={VOCAB},context={CONTEXT}")
    assert shape.num_params > 1e12
    config = ZeroConfig(stage=3, dtype="bf16")
    found = footprint(shape, config, machine(world=512, per_machine=8, tensor=TENSOR))
    with torch.device("meta"):
        model = Part()
    units = find_units(model, dict.fromkeys(model.parameters(), 0), stored_dtypes(model, torch.bfloat16))
    layouts = [Layout.of([param.numel() for param in unit.params], SHARDS) for unit in units]
    shard = sum(layout.shard_numel for layout in layouts)
    for kind, size in (("param", 2), ("grad", 2), ("master", 2), ("moments", 8)):
        assert found.sizes["device", kind] == size * shard  # zk keeps of the fp32 master what bf16 lacks
    assert found.sizes["device", "gathered"] == 2 * sum(layouts[index].numel for index in (0, 1, -1))  # a block, the next, and the rest
    # against the formula: what is whole on each tensor parallel rank, and padding
    part = sum(param.numel() for param in model.parameters())
    whole = sum(param.numel() for param in model.parameters() if param.dim() == 1 or param.shape[0] == CONTEXT)
    whole -= sum(block.qkv.bias.numel() + block.up.bias.numel() for block in model.blocks)  # type: ignore[union-attr, operator]
    assert TENSOR * (part - whole) + whole == shape.num_params
    padding = shard * SHARDS - part
    assert 0 <= padding < len(units) * (SHARDS + len(units[0].params)) * ALIGN
    states = 2 + 2 + 12
    formula = states * shape.num_params / (TENSOR * SHARDS)
    real = states * shard  # with the 2 + 2 + (2 + 8) of zk it is 14
    assert real - formula == pytest.approx(states * ((1 - 1 / TENSOR) * whole + padding) / SHARDS)
    assert (real - formula) / formula < 1e-3
    assert 31e9 < formula < 32e9  # of an accelerator's 80 GB


def test_the_part_of_a_tensor_parallel_rank_is_the_same_for_families_of_decoders() -> None:
    """Elements of matrices that are cut add up to the whole; the rest is whole on each."""
    for name, ranks in (("llama-3-8b", 8), ("gpt2", 4), ("pythia-160m", 2), ("mixtral-8x7b", 4), ("qwen3-30b-a3b", 4), ("gpt-oss-20b", 8)):
        decoder = decoder_of(CONFIGS[name][1])
        whole, part = (Shape.of(one, name) for one in (decoder, decoder.part(ranks)))
        padded = -decoder.vocab % ranks * decoder.width * (1 if decoder.tied else 2)
        assert set(part.units[0].numels) <= {numel // share for numel in whole.units[0].numels for share in (1, ranks)}
        twice = ranks * part.num_params - whole.num_params - padded  # what is whole is there ranks times
        assert 0 < twice < 0.02 * ranks * whole.num_params, name
        if name == "llama-3-8b":  # two norms of a block, and the last one
            assert twice == (ranks - 1) * 65 * 4096
        assert ranks * (part.num_active - whole.num_active / ranks) < 0.1 * ranks * whole.num_active


def test_replicas_divide_states_over_fewer_ranks_and_send_only_the_mean_between_machines() -> None:
    shape = shape_of("gpt:1.3b")
    rest = {"world": 32, "per_machine": 8, "fabric_gbps": 200.0, "network_gbps": 10.0}
    flat, hybrid = machine(**rest), machine(**rest, replicas=4)
    nbytes = 2 * shape.num_params
    for stage, rows in ((2, 2), (3, 3)):  # gradients and updated parameters; parameters twice and gradients
        config = ZeroConfig(stage=stage, dtype="bf16")
        one, other = footprint(shape, config, flat), footprint(shape, config, hybrid)
        assert other.sizes["device", "moments"] == pytest.approx(4 * one.sizes["device", "moments"], rel=1e-3)
        assert other.sizes["device", "replicas"] == (4 + 4 + 4 + 2) * (max(unit.numel for unit in other.units) // 8)
        steps = [step_of(shape, found, config, where, 8192) for found, where in ((one, flat), (other, hybrid))]
        assert steps[0].sent["between"] == pytest.approx(rows * nbytes * 24 / 32, rel=1e-6)
        assert steps[0].sent["within"] == pytest.approx(rows * nbytes * 7 / 32, rel=1e-6)
        shard = shape.num_params / 8
        assert steps[1].sent["between"] == pytest.approx((4 + 2) * shard * 3 / 4, rel=1e-6)
        assert steps[1].sent["within"] == pytest.approx(rows * nbytes * 7 / 8, rel=1e-6)
        assert steps[1].busy["ranks"] == pytest.approx(sum(steps[1].sent[where] / rate for where, rate in (("within", 200e9), ("between", 10e9))))
        assert steps[1].busy["ranks"] < 0.5 * steps[0].busy["ranks"] and steps[1].seconds <= steps[0].seconds


def test_sums_over_tensor_parallel_ranks_are_waited_for() -> None:
    shape, tokens, ranks = shape_of("gpt:layers=24,width=2048,heads=16"), 4096, 8
    config, where = ZeroConfig(stage=2, dtype="bf16"), machine(world=ranks, per_machine=ranks, tensor=ranks)
    step = step_of(shape, footprint(shape, config, where), config, where, tokens)
    sums = 6 * shape.layers + 2  # a block's two in forward, backward and forward again; the embedding's, and that before the head
    assert step.sent == {"within": pytest.approx(2 * sums * tokens * 2 * shape.width * (ranks - 1) / ranks, rel=1e-6), "between": 0}
    assert step.busy["ranks"] == 0  # no rank has the same part
    assert step.busy["compute"] == pytest.approx(8 * shape.part(ranks).num_params * tokens / 100e12)
    assert step.seconds >= 0.99 * (step.busy["compute"] + step.busy["tensor"])
    slow = dataclasses.replace(where, fabric_gbps=0.1)
    assert step_of(shape, footprint(shape, config, slow), config, slow, tokens).bound == "tensor"


@pytest.mark.parametrize(
    ("arguments", "said"),
    (
        ("gpt:10b --world 12 --tensor 8", "must divide the ranks; --world is 12, so take a multiple of 8"),
        ("gpt:10b --world 12 --tensor 2 --replicate 4", "must divide the ranks; --world is 12, so take a multiple of 8"),
        ("gpt:10b --world 4 --replicate 4", "nothing would be partitioned; --world must be at least twice .* 8, or leave"),
        ("gpt:layers=2,width=64,heads=4 --world 8 --tensor 8", "--tensor must divide the model's heads; .* has 4, and --tensor is 8"),
        ("tests.test_plan:a_factory --world 2 --tensor 2", "builds the part of one tensor parallel rank"),
        ("gpt:10b --world 2 --tensor 2 --adapters rank=8", "without --adapters"),
        ("gpt:10b --network 0", "--network must be a rate above 0"),
    ),
)
def test_what_cannot_be_divided_is_refused_with_the_rule(arguments: str, said: str) -> None:
    done = CliRunner().invoke(app, ["plan", *arguments.split(), "--gpu", "80GiB", "--ram", "1TiB"], env={"COLUMNS": "1000"})
    assert done.exit_code
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(done.output)


def test_the_command_shows_the_mesh_and_what_it_sends() -> None:
    model = "gpt:layers=80,width=10240,heads=80"
    options = "--gpu 80GiB --ram 1TiB --world 128 --tensor 8 --replicate 2 --fabric 300 --network 25 --tokens 2048"
    arguments = [model, *options.split(" ")]
    done = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "128 ranks (replicate 2, shard 8, tensor 8), 8 on each machine" in done.output and "between machines 25 GB/s" in done.output
    assert "from its machine" in done.output and "from other machines" in done.output
    found = json.loads(CliRunner().invoke(app, ["plan", *arguments, "--json"]).stdout)
    step = found["recommended"]
    assert min(step["sent_nbytes"].values()) > 0 and found["machine"]["tensor"] == 8
    assert found["model"]["num_params"] > 9e10  # of the whole
    assert found["largest"]["device"]["num_params"] > 0
    rate = 2048 * 16 / step["step_s"]
    assert f"({rate:,.0f} tokens/s)" in done.output


def test_a_plan_of_one_rank_sends_nothing() -> None:
    assert {sum(option.step.sent.values()) for option in plan(shape_of("gpt:125m"), machine(), 1024).options} == {0}
