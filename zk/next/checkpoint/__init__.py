"""Checkpoints: written by name, read at any number of ranks, stage, tier and dtype."""

from zk.next.checkpoint.files import CheckpointError

__all__ = ["CheckpointError"]
