"""The formulas of the ZeRO papers.

ZeRO: arXiv 1910.02054. ZeRO-Offload: arXiv 2101.06840. ZeRO-Infinity: arXiv 2104.07857. Model states are the papers': full fp32 masters,
where zk splits them.
"""

from __future__ import annotations

import dataclasses

# bytes of one parameter in mixed precision with Adam: parameter and gradient in fp16; fp32 master, momentum, variance
PARAM, GRAD, OPTIMIZER = 2, 2, 12
# the same where the optimizer also keeps an fp32 gradient, as ZeRO-Infinity counts (section 3)
INFINITY_STATES = 20


def zero_nbytes(num_params: float, ranks: int, stage: int) -> float:
    """Bytes of model states on each rank (ZeRO, section 5): stage 0 is plain data parallelism."""
    optimizer, grad, param = (ranks if stage >= since else 1 for since in (1, 2, 3))
    return num_params * (PARAM / param + GRAD / grad + OPTIMIZER / optimizer)


def zero_largest(memory_nbytes: float, ranks: int, stage: int) -> float:
    """Parameters whose model states fill ``memory_nbytes`` on each rank, with room for nothing else: an upper bound."""
    return memory_nbytes / zero_nbytes(1, ranks, stage)


def offload_largest(memory_nbytes: float) -> float:
    """Parameters that fill ``memory_nbytes`` on each rank where gradients and optimizer are in host memory (ZeRO-Offload, section 3)."""
    return memory_nbytes / PARAM


def infinity_largest(memory_nbytes: float) -> float:
    """Parameters whose model states, all partitioned, fill so much memory of one kind on all machines together: an upper bound."""
    return memory_nbytes / INFINITY_STATES


@dataclasses.dataclass(frozen=True, slots=True)
class Transformer:
    """A model of ZeRO-Infinity's section 3. Bytes per batch are for sequences of ``seq`` tokens."""

    layers: int
    hidden: int
    heads: int
    seq: int = 1024

    @property
    def num_params(self) -> int:
        """Equation 1."""
        return 12 * self.layers * self.hidden**2

    @property
    def states_nbytes(self) -> int:
        """Equation 2."""
        return INFINITY_STATES * self.num_params

    def checkpoints_nbytes(self, batch: int, blocks: int = 1) -> float:
        """Equation 3: inputs of every ``blocks``-th block, kept between forward and backward."""
        return 2 * batch * self.seq * self.hidden * self.layers / blocks

    @property
    def states_working_nbytes(self) -> int:
        """Equation 4: parameters and gradients of the largest layer, hidden x 4 hidden."""
        return linear_nbytes(self.hidden)

    def activations_working_nbytes(self, batch: int, blocks: int = 1) -> int:
        """Equation 5: what is between two checkpoints."""
        return batch * self.seq * blocks * (16 * self.hidden + 2 * self.heads * self.seq)


def linear_nbytes(hidden: int, tiles: int = 1) -> int:
    """Parameters and gradients, 2 bytes each, of a hidden x 4 hidden layer; of one tile at a time if it is cut into ``tiles``."""
    return (PARAM + GRAD) * hidden * 4 * hidden // tiles


# floating point operations for each byte that is moved (ZeRO-Infinity, section 4.1)


def params_intensity(seq: int, batch: int) -> float:
    """Of parameters and gradients: equation 9."""
    return seq * batch


def optimizer_intensity(seq: int, batch: int) -> float:
    """Of optimizer states: equation 10."""
    return seq * batch / 4


def checkpoints_intensity(hidden: int, blocks: int = 1) -> float:
    """Of activation checkpoints: equation 11."""
    return 24 * hidden * blocks


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """Share of ``peak`` (operations/s) that is left if what moves at ``bandwidth`` (bytes/s) is never hidden: equation 6."""
    return intensity * bandwidth / (intensity * bandwidth + peak)


def bandwidth_for(wanted: float, intensity: float, peak: float) -> float:
    """Bytes/s at which ``efficiency`` is ``wanted``."""
    return wanted * peak / ((1 - wanted) * intensity)
