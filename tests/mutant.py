"""A mutant of tests/mutate_waits.py in the processes that a test starts: its module is imported from other source than its file's.

Whatever imports zk for such a process imports this before: tests/softgpu, whose interpreter imports zk's kernels, and tests/world.py.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
VARIABLE = "ZK_MUTANT"  # a file that has [the mutated file, its source]


class _Serve(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from other source than its file's."""

    def __init__(self, file: str, source: str) -> None:
        self.path, self.source = ROOT / file, source
        self.name = file.removesuffix(".py").replace("/", ".")

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self, origin=str(self.path)) if fullname == self.name else None

    def get_source(self, fullname: str) -> str:
        return self.source

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self.path)
        exec(compile(self.source, str(self.path), "exec"), module.__dict__)


def carry() -> None:
    """Serve the mutant that the environment names, if it names one; once. Raises RuntimeError if its module is imported already."""
    carried = os.environ.get(VARIABLE)
    if not carried or any(isinstance(finder, _Serve) for finder in sys.meta_path):
        return
    serve = _Serve(*json.loads(Path(carried).read_text()))
    if serve.name in sys.modules:
        raise RuntimeError(f"{serve.name} was imported before its mutant: this process would run without it")
    sys.meta_path.insert(0, serve)


carry()
