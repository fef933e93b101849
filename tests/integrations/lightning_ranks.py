"""Two ranks that Lightning starts itself: usage: python -m tests.integrations.lightning_ranks FOLDER. Each writes what it found into FOLDER."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.integrations.test_lightning import CASES, OURS, fit, loop, rows, same_weights, saved, trainer
from tests.models import batch, loss_of


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[Any, Any] = {}
    for name, (options, _) in CASES.items():
        for strategy in ("ddp", *OURS[name]):
            module = fit(strategy, 4, devices=2, **options)
            found[name, strategy] = module.losses, module.trainer.callback_metrics["val"].item(), [p.detach().clone() for p in module.parameters()]
    saved(folder, "zk_stage_3_offload", 3, devices=2)
    resumed = [fit(strategy, 5, devices=2, ckpt=folder / "at.ckpt", seed=9) for strategy in ("zk_stage_3_offload", "zk_stage_1")]
    found["resumed"] = [module.losses for module in resumed]
    found["resumed alike"] = same_weights(*resumed)
    resumed[0].trainer.save_checkpoint(folder / "two.ckpt")
    found["tested"] = [trainer(name, devices=2).test(resumed[0], rows(), verbose=False)[0]["val"] for name in ("ddp", "zk_stage_3")]
    found["fabric"] = [loop(name, devices=2) for name in ("ddp", "zk_stage_1", "zk_stage_3_offload")]
    rank = torch.distributed.get_rank()
    if rank == 0:
        found["alone"] = loss_of(resumed[0], batch(0)).item()  # nothing collective
    torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
