"""Train a small GPT with Lightning's Trainer and zk: two lines are zk's, the import and the name of the strategy.

usage: python lightning_gpt.py [--steps N] [--devices N] [--text FILE]
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import zk.integrations.lightning  # noqa: F401  (registers the names of strategies)

WIDTH, LAYERS, HEADS, CONTEXT = 64, 3, 4, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(L.LightningModule):
    def configure_model(self):  # built here, it takes no memory before it is partitioned
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch, index):
        (ids,) = batch
        loss = F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        self.log("loss", loss)
        if index == 0 and self.trainer.is_global_zero:
            print(f"first loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--text", default=argparse.__file__)  # some text that is there
    args = parser.parse_args()

    text = torch.frombuffer(bytearray(Path(args.text).read_bytes()), dtype=torch.uint8).long()
    rows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy="zk_stage_3_offload",
        precision="bf16-mixed",
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(GPT(), DataLoader(TensorDataset(rows), batch_size=8, shuffle=True))
    if trainer.is_global_zero:
        print(f"{trainer.world_size} ranks, {args.steps} steps, last loss {trainer.callback_metrics['loss'].item():.3f}")


if __name__ == "__main__":
    main()
