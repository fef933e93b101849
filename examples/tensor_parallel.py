"""Train a small GPT whose layers torch cuts over ranks, on several batches at once, with zk.

usage: torchrun --nproc_per_node 4 tensor_parallel.py TEXT_FILE [STEPS] [TENSOR_PARALLEL_RANKS]
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import zk

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 128, 4, 4, 128, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        normed = self.norm1(x)
        q, k, v = (layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# each rank has some of the heads, and some of the MLP's inner features
PLAN = {name: ColwiseParallel() for name in ("query", "key", "value", "up")} | {name: RowwiseParallel() for name in ("proj", "down")}


def main(path, steps=50, tensor_parallel_ranks=2):
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    shape = int(os.environ["WORLD_SIZE"]) // tensor_parallel_ranks, tensor_parallel_ranks
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("data", "tensor"))

    torch.manual_seed(0)  # the same model on all ranks
    model = GPT().to(kind)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    where = {"stage": 3, "param_tier": "host", "optimizer_tier": "host", "process_group": mesh["data"].get_group()}
    optimizer = zk.ZeroOptimizer(model, optimizer, clip_grad_norm=1.0, **where)

    text = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(mesh.get_local_rank("data"))  # ranks of one model have the same batches
    for step in range(steps):
        starts = torch.randint(0, len(text) - CONTEXT - 1, (BATCH,), generator=generator)
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).to(kind)
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach().div_(dist.get_world_size()))
        if dist.get_rank() == 0 and (step % 10 == 0 or step == steps - 1):
            print(f"step {step:4d}  loss {loss.item():.4f}  norm {optimizer.metrics()['grad_norm']:.3f}")

    optimizer.close()  # parameters are DTensors again
    weight = model.blocks[0].up.weight.full_tensor()
    if dist.get_rank() == 0:
        print("blocks.0.up.weight of the whole model:", tuple(weight.shape))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
