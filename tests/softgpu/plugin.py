"""pytest plugin, given with ``-p tests.softgpu.plugin``: there are two CUDA devices, and a test in which something raced has failed.

It collects the files of tests/device_files.py and no others: those whose tests take the device that is there (tests/models.py: ``DEVICE``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.threads  # noqa: F401
from tests import softgpu
from tests.device_files import IN_PART, WHOLE

TESTS = Path(__file__).resolve().parent.parent
softgpu.install()
os.environ.update(softgpu.environment())  # programs and ranks that tests start have them too


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out test files that are for the host."""
    name = collection_path.relative_to(TESTS).as_posix() if collection_path.is_relative_to(TESTS) else ""
    return True if collection_path.name.startswith("test_") and collection_path.suffix == ".py" and name not in (*WHOLE, *IN_PART) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the other tests of files that are taken in part."""
    in_part, marks = {TESTS / name for name in IN_PART}, ("device", "device_only")
    here = {item for item in items if item.path not in in_part or any(map(item.get_closest_marker, marks))}
    config.hook.pytest_deselected(items=[item for item in items if item not in here])
    items[:] = [item for item in items if item in here]


@pytest.fixture(autouse=True)
def _races(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test for each race, unless it is marked ``races`` (then it races on purpose, and must)."""
    softgpu.races.clear()
    yield
    if request.node.get_closest_marker("races"):
        assert softgpu.races, "this test is to race, and nothing was found"
        softgpu.races.clear()
    softgpu.check()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Nothing to run on the device is no failure: the suite runs twice, and a selection may have nothing for it."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
