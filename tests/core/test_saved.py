"""Tensors that autograd saves at stage 3: what is no parameter's is saved as torch saves it, by the user's hooks too."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import zk
from tests.models import GPT, batch, loss_of


class Exps(nn.Module):
    """Saves its output; or writes to what was saved."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.layers, self.writes = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), writes

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).exp()
            if self.writes:
                x.mul_(2)
        return x


def held(model: nn.Module) -> zk.ZeroOptimizer:
    return zk.ZeroOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, param_tier="host")


def test_an_output_that_backward_does_not_use_is_freed() -> None:
    model = Exps()
    optimizer = held(model)
    y = model(torch.randn(2, 8))
    storage = StorageWeakRef(y.untyped_storage())
    del y
    gc.collect()
    assert storage.expired()
    optimizer.close()


@pytest.mark.parametrize("reentrant", (True, False))
def test_quick_all_of_the_model_or_blocks_called_alone_may_be_checkpoints(reentrant: bool) -> None:
    model, x = Exps(), torch.randn(2, 8, requires_grad=True)
    wanted = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    optimizer = held(model)
    for alone in (False, True):
        optimizer.zero_grad()
        y = x
        for layer in model.layers if alone else ():
            y = checkpoint(layer, y, use_reentrant=reentrant).exp()
        (y if alone else checkpoint(model, x, use_reentrant=reentrant)).sum().backward()
        assert all(torch.equal(param.grad + 0, grad) for param, grad in zip(model.parameters(), wanted, strict=True))
    optimizer.close()


def test_a_write_to_what_was_saved_is_an_error_in_backward() -> None:
    model = Exps(writes=True)
    optimizer = held(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(2, 8)).sum().backward()
    optimizer.close()


def test_quick_hooks_of_the_user_get_what_is_no_parameter() -> None:
    grads = []
    for hooked in (False, True):
        torch.manual_seed(0)
        model, packed = GPT("checkpointed"), []
        optimizer = held(model)

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor.shape)  # noqa: B023
            return tensor.detach() * 2 if tensor.is_floating_point() else tensor.detach()  # (seen if not undone)

        def unpack(tensor: Tensor) -> Tensor:
            return tensor / 2 if tensor.is_floating_point() else tensor

        if hooked:
            with saved_tensors_hooks(pack, unpack):
                loss = loss_of(model, batch(0))
        else:
            loss = loss_of(model, batch(0))
        loss.backward()
        grads.append([param.grad + 0 for param in model.parameters() if param.grad is not None])
        assert bool(packed) == hooked and not any(shape == param.shape for shape in packed for param in model.parameters() if param.ndim > 1)
        optimizer.close()
    assert len(grads[0]) > 4 and all(map(torch.equal, *grads))
