"""The update of host memory as a plain optimizer over whole parameters: what zk's flat slices are compared with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zk.kernels import codec
from zk.kernels.reference import AdamStep
from zk.offload.cpu_adam import adam_

MOMENTS = "exp_avg", "exp_avg_sq"


class CPUAdam(torch.optim.Optimizer):
    """AdamW, or Adam with ``decoupled=False``, by ``adam_``."""

    def __init__(self, params: Any, *, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 1e-2,
                 maximize: bool = False, decoupled: bool = True, split_master: bool = True, state_dtype: torch.dtype = torch.float32,
                 **how: Any) -> None:  # fmt: skip
        self.decoupled, self.split_master, self.state_dtype, self.how = decoupled, split_master, state_dtype, how
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state, flat = self.state[param], param.detach().view(-1)
                if not state:
                    fields = codec.state_fields(param.dtype, MOMENTS, self.state_dtype, self.split_master)
                    state |= {name: torch.zeros_like(flat, dtype=dtype) for name, dtype in fields.items()}
                    codec.start({**state, "param": flat}, flat)
                    state["step"] = torch.tensor(0.0)
                state["step"] += 1
                scalars = AdamStep.of(group, self.decoupled, int(state["step"]))
                fields = (flat, param.grad.reshape(-1), state.get("master"), *(state[name] for name in MOMENTS))
                adam_(*fields, scalars, **self.how)

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's, with the master of 16-bit parameters beside the moments, all in fp32."""
        plain = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        for index, state in plain["state"].items():
            fields: dict[str, Tensor] = {**state, "param": params[index].detach().view(-1)}
            read = {name: codec.read(fields, name).float().view(params[index].shape) for name in state.keys() - {"step"}}
            plain["state"][index] = {"step": state["step"], **read}
        return plain
