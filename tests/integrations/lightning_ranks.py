"""Two ranks that Lightning starts: python -m tests.integrations.lightning_ranks FOLDER."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.integrations.test_lightning import CASES, OURS, fit, saved
from tests.models import batch, loss_of


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[Any, Any] = {}
    for name, (options, _) in CASES.items():
        for strategy in ("ddp", *OURS):
            module = fit(strategy, 4, devices=2, **options)
            val = module.trainer.callback_metrics["val"].item()
            weights = torch.cat([param.detach().flatten() for param in module.parameters()])
            found[name, strategy] = [module.losses, val, weights.tolist()]
    saved(folder, "zk_stage_3_offload", 3, devices=2)
    resumed = [fit(name, 5, ckpt=folder / "at.ckpt", seed=9, devices=2) for name in OURS]
    found["resumed"] = [module.losses for module in resumed]
    resumed[0].trainer.save_checkpoint(folder / "two.ckpt")
    rank = torch.distributed.get_rank()
    found["alone"] = loss_of(resumed[0], batch(0)).item()
    torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
