"""In: reduced gradients of one unit's slice. Out: the slice of the parameters, updated. Holds master, moments and gradient on their tier."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zk.kernels.split import join, split_
from zk.offload.rules import Rule
from zk.offload.tiers import Grads, Store

Fields = dict[str, Tensor]


def state_fields(dtype: torch.dtype, rule: Rule, names: Sequence[str], state_dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Name -> dtype of what is kept for each element of a ``dtype`` parameter: the master (its lower half where that is enough), moments."""
    fields: dict[str, torch.dtype] = {}
    if dtype == torch.bfloat16 and rule.splits_master and "exp_avg_sq" in names:
        fields["master"] = torch.int16
    elif dtype != torch.float32:
        fields["master"] = torch.float32
    for name in names:
        fields[name] = state_dtype if name != "max_exp_avg_sq" else torch.float32
    return fields


class OptimizerShard:
    """Optimizer state of the slice of a unit that this rank updates.

    Args:
        rule: the optimizer's arithmetic.
        param: the slice of the parameters where the update reaches it, as the field "param".
        state: master and moments, as ``state_fields`` names them.
        grads: the gradient.
        names: the moments.
        home: (n,) where parameters compute, if that is other memory than ``param``; they are uploaded there.

    All three stores have the same chunks.
    """

    def __init__(self, rule: Rule, param: Store, state: Store, grads: Grads, names: Sequence[str], home: Tensor | None) -> None:
        self.rule, self.param, self.state, self.grads, self.names, self.home = rule, param, state, grads, tuple(names), home
        self.chunks = state.chunks
        self.split = self.has_master = False  # known with the first fields

    def start(self, initial: Tensor) -> None:
        """Masters start from ``initial`` (n,), the values in the model's original precision; moments from zero."""
        for index, chunk in enumerate(self.chunks):
            with self._chunk(index, changes=True, read=False) as fields:
                for name, field in fields.items():
                    if name != "param":
                        field.zero_()
                self.has_master = "master" in fields
                self.split = self.has_master and fields["master"].dtype == torch.int16
                self._set_master(fields, slice(0, chunk.stop - chunk.start), initial[chunk])
        self.upload()

    # ---- chunks --------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _chunk(self, index: int, changes: bool, read: bool = True, keep: bool = False) -> Iterator[Fields]:
        """The fields of a chunk, put back whatever happens inside."""
        state = self.state.open(index, read)
        try:
            param = self.param.open(index, read)
            try:
                yield {**state, **param}
            finally:
                self.param.close(index, changes)
        finally:
            self.state.close(index, changes, keep)

    def _overlap(self, part: slice) -> Iterator[tuple[int, slice, slice]]:
        """For each chunk that ``part`` touches: its index, the slice of the chunk, the slice of ``part``."""
        for index, chunk in enumerate(self.chunks):
            start, stop = max(part.start, chunk.start), min(part.stop, chunk.stop)
            if start < stop:
                yield index, slice(start - chunk.start, stop - chunk.start), slice(start - part.start, stop - part.start)

    def _read(self, part: slice, read: Callable[[Fields, slice], Tensor]) -> Tensor:
        """What ``read(fields, slice of the chunk)`` gives for ``part``; a view where one chunk holds all and rests in memory."""
        whole = self.state.resident and self.param.resident and len(self.chunks) == 1 and part.stop > part.start
        pieces = []
        for index, here, _ in self._overlap(part):
            with self._chunk(index, changes=False) as fields:
                value = read(fields, here)
                pieces.append(value if whole else value.clone())
        return pieces[0] if whole else torch.cat(pieces) if pieces else torch.empty(0)

    def _write(self, part: slice, write: Callable[[Fields, slice, slice], None]) -> None:
        """Call ``write(fields, slice of the chunk, slice of part)`` for ``part``, and keep what it changed."""
        for index, here, there in self._overlap(part):
            with self._chunk(index, changes=True) as fields:
                write(fields, here, there)

    # ---- update --------------------------------------------------------------------------------------------------------------

    def fetch(self, index: int) -> bool:
        """Ask for all that the update of a chunk needs; False if not all of it can be asked for now."""
        return self.state.fetch(index) and self.param.fetch(index) and self.grads.fetch(index)

    def update(self, index: int, runs: Sequence[tuple[slice, Mapping[str, Any], int]], grad_scale: float, num_threads: int, keep: bool) -> None:
        """Update and cast chunk ``index``: of each run (elements, group, step), what lies in it. ``keep`` as for Store.close."""
        chunk = self.chunks[index]
        with self._chunk(index, changes=True, keep=keep) as fields:
            grad = self.grads.open(index)
            try:
                for elements, group, step in runs:
                    start, stop = max(elements.start, chunk.start), min(elements.stop, chunk.stop)
                    if start < stop:
                        here = slice(start - chunk.start, stop - chunk.start)
                        flat: dict[str, Tensor | None] = {name: field[here] for name, field in fields.items()}
                        flat["grad"] = grad[here]
                        flat.setdefault("master", None)
                        self.rule.update(flat, group, step, grad_scale, num_threads)
            finally:
                self.grads.close(index)

    def upload(self) -> None:
        """Bring the updated parameters to where they compute."""
        if self.home is not None:
            for index, chunk in enumerate(self.chunks):
                self.home[chunk].copy_(self.param.open(index)["param"])
                self.param.close(index, changed=False)

    # ---- reading and writing state -------------------------------------------------------------------------------------------

    def _master(self, fields: Fields, here: slice) -> Tensor:
        if self.split:
            return join(fields["param"][here], fields["master"][here], fields["exp_avg_sq"][here])
        return fields["master" if self.has_master else "param"][here]

    def _set_master(self, fields: Fields, here: slice, values: Tensor) -> None:
        param = fields["param"][here]
        values = values.to(param.device)
        if self.split:
            split_(values.float(), param, fields["master"][here], fields["exp_avg_sq"][here])
            return
        if self.has_master:
            fields["master"][here].copy_(values)
        if param.data_ptr() != values.data_ptr():
            param.copy_(values)

    def get_master(self, part: slice) -> Tensor:
        """The fp32 master of ``part``; may be a view."""
        return self._read(part, self._master)

    def set_master(self, part: slice, values: Tensor) -> None:
        """Write (n,) ``values`` of any precision into master and parameter of ``part``."""
        self._write(part, lambda fields, here, there: self._set_master(fields, here, values[there]))
        self.upload()

    def adopt(self, part: slice) -> None:
        """Parameters of ``part`` were written from outside: elements that changed replace their master, the others keep it."""
        if not self.has_master and self.home is None:
            return

        def adopt(fields: Fields, here: slice, there: slice) -> None:
            master = self._master(fields, here)
            written = fields["param"][here].clone() if self.home is None else self.home[part][there].to(master.device, copy=True)
            self._set_master(fields, here, torch.where(master.to(written.dtype) == written, master, written.float()))

        self._write(part, adopt)
        self.upload()

    def _moment(self, name: str, fields: Fields, here: slice) -> Tensor:
        state = fields[name][here].float()
        return state.abs() if self.split and name == "exp_avg_sq" else state

    def get_state(self, name: str, part: slice) -> Tensor:
        """The state ``name`` of ``part`` in fp32; a view where that is what is stored."""
        return self._read(part, lambda fields, here: self._moment(name, fields, here))

    def set_state(self, name: str, part: slice, values: Tensor) -> None:
        """Overwrite the state ``name`` of ``part``; the master keeps its value."""

        def write(fields: Fields, here: slice, there: slice) -> None:
            if self.split and name == "exp_avg_sq":
                master = self._master(fields, here)
                fields[name][here].copy_(values[there])
                self._set_master(fields, here, master)
            else:
                fields[name][here].copy_(values[there])

        self._write(part, write)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by kind: master, moments, gradient, and the parameter copy where there is one."""
        sizes = {"moments": sum(self.state.nbytes(name) for name in self.names), "master": self.state.nbytes("master") if self.has_master else 0}
        sizes["grad"] = self.grads.nbytes
        sizes["param_copy"] = 0 if self.home is None else self.param.nbytes("param")
        return sizes
