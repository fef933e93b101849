"""Ceilings on the size and shape of the package. They go down with the code; one that must rise says beside it for which capability.

    python -m tests.test_walls      prints today's numbers
"""

from __future__ import annotations

import ast
import collections
import functools
import gc
import io
import re
import sys
import tokenize
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from zk import ZeroOptimizer

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "zk"
BESIDE = {"tiled_linear", "activations", "materialize", "pretrained", "access", "timeline", "cli", "doctor", "terminal", "__main__", "__init__"}
BESIDE |= {"stash", "tiled_matmul", "tiles", "tiled_experts", "prequantized", "cross_entropy", "linear_cross_entropy", "linear_loss"}
BESIDE |= {"tile_sequence", "token_tiles", "long_context", "deferred_logits"}

# room: lines, code tokens (comments and docstrings not counted)
SIZES = {
    # 140 lines and 1,545 tokens for what is unfrozen, or new, and trained later; 25 and 345 for experts; 105 and 770 for wrappers;
    # 185 and 1,650 for experts of which each rank uses other ones; 15 and 150 for chunks of one-byte codes, which end within a page;
    # 345 and 2,665 for frozen units that are read in place: excerpts of the user's files, their homes, and what ranks agree on;
    # 50 and 265 for codes that stay as they are in evaluation, and what modules add to state_dict(); 5 and 40 for codes in 16 bits, and scales;
    # 285 and 2,410 for model parallel ranks, their place in the whole model, and replicas of shards;
    # 75 and 500 for stages of a pipeline: gradients divided by a factor, reduced once, and those of weights apart;
    # 245 and 1,990 for DTensors, which are refused by name where they cannot be right; 20 and 160 for tables that wrappers share;
    # 10 and 25 for ranks that use no expert in a step; 10 and 120 for blocks in dicts, and for stages of a pipeline beside updates over NCCL;
    # 115 and 685 for micro-batches that go block by block: several backward passes as one, forwards that stop and go on, the choice
    # 450 and 3,725 for updates that begin in backward: shadows and room for them, attempts, when to try; 160 and 1,190 for delayed updates;
    # 70 and 615 for the reference of cross entropy, and backward passes inside of one
    # 40 and 310 for the user's cache folder; 75 and 585 for a CPU update that is compiled ahead, and for what notebooks show; 10 and 65 for rates
    # 5 and 50 for the checkpoint to resume from
    # 230 and 1,835 for memory that is given back and taken again (parked)
    # 10 and 90 for folders of files, and errors that name them
    # 300 and 2,900 for optimizers that run their own step(), and the trial of unknown ones; 60 and 790 for lists of optimizers;
    # 60 and 870 for whole matrices
    # 385 and 3,430 for states that stream through the device: buffers, streams of their own, shadows there, and the share of each side
    # 345 and 4,200 for state in 8 bits: codes and masters of 24 bits in plain torch, on the host and as a kernel, which are bits of many short words
    # 205 and 1,300 for NUMA nodes; 35 and 180 for chunks that stream while the next one is read; 35 and 340 for page-locked sums of gradients,
    # and page-locked memory that is given back
    # 35 and 320 for connections that later optimizers take
    # 545 and 5,740 for what optimizers keep of whole parameters in other shapes than these: its place in the bytes of a chunk, its way to
    # torch's state dicts and back, wrappers around tensors, and the trial of unknown ones
    # 195 and 1,470 for gradients that go to their update in memory, what is refused then, and parameters that need not be read twice
    # 25 and 225 for sums of gradients in 16 bits; 87 and 515 for parameters that rest in 16 bits and are fp32 while they are gathered
    # 43 and 485 for small blocks that travel together
    # 20 and 135 for what a checkpoint computes again in the precision of forward, and for what is written before updates in backward
    # 22 and 195 for memory that the norm's pass asks for ahead
    # 55 and 510 for rates of drives, as transfers show them
    # 17 and 156 for one process of a machine that compiles the CPU update, and the others that wait for it
    # 16 and 127 for the processor time of threads that read and write, and for transfers that are counted in two calls, a third of the time
    # 2 and 26 for a clock that stands while states are parked
    # 76 and 526 for errors of one rank that all of them raise, which were in checkpoint
    # 21 and 163 for what is done within zk.gather: a new ``data``, graphs whose backward comes later; for a step() that is called in a function
    # that is compiled, for states that are copied, or gone, and for the 8-bit state in an error
    # 2 and 39 for groups that are none; 44 and 269 for Ctrl-C at any line of a forward or backward, of which torch tells no hook
    "core": (14_704, 111_638),
    # 3 and 80 for units of several blocks
    # 40 and 420 for checkpoints around blocks and more
    # 617 and 5,620 for tiles of a sequence: cutting them, their keys and values, attention in parts and its gradients, and what is refused;
    # 75 of these lines and 560 tokens for tensors without memory
    # 68 and 526 for positions that a model does not take, labels that it shifts again, padding on the right, and memory that malloc keeps
    "accumulation": (1_661, 14_150),  # all micro-batches block by block; 12 and 110 for the choice of it, which was in the core
    # 60 and 400 for places of values in files; 95 and 540 for tiles of any shape, of any parameter; 405 and 3,205 for experts in one;
    # 12 and 70 for options of adapters, and what the export has not; 95 and 835 for codes in 4 bits in files, and their scales
    # 650 and 5,050 for the loss of a head without its logits, and its kernel; 450 and 4,070 for modules that run tile by tile of tokens;
    # 315 and 2,660 for logits that are computed when they are used, and both in one call
    # 30 and 240 for a head that takes the place of another; 30 and 230 for checkpoints that stop before tiles, and limits of both
    # 25 and 135 for waits that are always counted; 24 and 168 for a clock that stands while states are parked
    # 5 and 35 for Ctrl-C in commands; 5 and 45 for terminals without some characters; 30 and 310 for two commands
    # 20 and 70 for names of rows for people; 5 and 30 for the rate of host memory; 35 and 330 for arrows from reads to their uses
    # 32 and 360 for NUMA nodes in the doctor, and the side of the update in plans; 4 and 30 for the optimizer of a plan;
    # 1 and 50 for the precision of compute; 6 and 66 for tiles of a sequence, in the options of zk plan
    # 51 and 310 for tensors that rest until somebody who knows the order of use fetches them, and 2 and 24 for requests that end with a write
    # 14 and 141 for graphs that are made within zk.gather, for names that are given to it, and for memory that cannot be had
    # 1 and 20 for the system's errors in words
    "beside the core": (5_457, 42_623),
    # 130 and 1,080 for checkpoints without what is frozen, and for loading what was unfrozen; 45 and 430 for scales that belong to a base;
    # 75 and 830 for the parts of a model on model parallel ranks
    # 15 and 210 for numbers that optimizers keep of a parameter
    # 215 and 2,130 for state dicts and for the begin of a save, which were in the core
    # 13 tokens for the digest of a base that is computed with in fp32
    # 75 and 1,020 for tensors of any shape and dtype that optimizers keep of whole parameters
    # 27 and 196 for schedulers of schedulers, for manifests that are gone, and for an optimizer whose state is gone
    # 4 and 19 for exports into a folder that is there and may not be replaced
    "checkpoint": (3_072, 25_834),
    # 210 and 1,630 for adapters over bases in 4 and 8 bits; 95 and 770 for tensor parallel ranks and replicas;
    # 55 and 525 for both orders of micro-batches; 10 and 180 for shadows; 30 and 300 for long sequences; 13 and 144 for those in tiles
    # 105 and 1,400 for names that people type, rows that are folded, and what would make a step shorter; 15 and 135 for the closest name
    # 25 and 285 for what DeepSpeed's estimator says of the same; 3 and 20 for names of models in an error
    # 30 and 470 for updates on the device: their bytes, times and share; 87 and 595 for those that begin in backward, both ways of the link
    # 17 and 150 for the share of no-offload speed, and either side of the update; 3 and 20 for what is kept of whole parameters
    # 45 and 500 for mixtures of experts, also with experts that travel alone; 5 and 50 for what lies in the user's files
    # 12 and 134 for units that are gathered in fp32; 10 and 55 for 8-bit state where it makes a model fit
    # 70 and 490 for micro-batches that go block by block; 25 and 105 for long sequences; 5 and 30 for words that name only memory that there is
    # 1 and 10 for a side of the update that is none, where there is no GPU
    "plan": (2_248, 20_558),
    # 30 and 230 for rates in logs; 10 and 50 for what to resume from
    # 265 and 1820 for DeepSpeed's monitors, and names of its engine
    # 125 and 990 for DeepSpeed's JSON under the Trainer and accelerate
    # 35 and 345 for callbacks that write traces
    # 75 and 675 for the callbacks that write the file of a run; 90 and 780 for DeepSpeed's flops_profiler; 15 and 75 for --deepspeed of a Trainer
    # 25 for sums of gradients in DeepSpeed's JSON; 6 and 25 for the precision of compute beside Lightning's
    # 33 and 275 for states that a DeepSpeed engine gives back, and for ranks that see what was saved
    # 12 and 140 for sequences in tiles
    "integrations": (3_214, 22_116),
    # 10 and 50 for Ctrl-C, and a line every ten seconds
    # 2 and 25 for the precision of compute
    # 2 and 20 for rows of the picture that have their names in the trace
    # 3 and 15 for runs that diverge
    "train": (1_038, 8_931),  # 240 and 2,020 for mixtures of experts, sizes from text (which was in plan), and bytes of experts in use
    "bench": (744, 6_892),  # 35 for 8-bit state; 20 for the reduction over several ranks
    # 60 and 310 for Ctrl-C
    # 145 and 1115 for traces of a few steps
    # 55 and 515 for rates of both sides of the update, and what the summary says of them
    # 565 and 5735 for runs that are watched, and reported as one HTML file: pages are made of many short pieces
    # 135 and 1,040 for runs that end as their process does, one run in a folder, advice for updates, and narrow terminals
    # 7 and 75 for losses that are not finite, and for names of 8-bit state
    # 9 and 60 for NUMA nodes
    # 1 and 16 for the precision of compute
    # 26 and 195 for drives that are nearly full, losses that are none, and profiles that end in any order
    # 12 and 95 for a floor by the rates that training sees; 14 and 108 for the processor time that I/O takes from work
    # 17 and 97 for traces that cannot be written, reports without a step, time that is parked, and lines of their own
    # 5 and 42 for a damaged checkpoint that Ctrl-C does not name, and a file of a run that has not all it must
    # 1 and 2 for reports into folders that are not there
    "monitor": (1_688, 14_137),  # summaries, and what is said at the start; rates, and progress
    # 7 and 75 for losses that are not finite, and for names of 8-bit state; 10 tokens for gradients that do not move
    # 20 and 175 for metrics(), which was in the core
}
# 7.61 without sizes and pieces of models that are cut over ranks, 7.64 without micro-batches block by block, 7.66 without shadows, 7.71 without
# optimizers that run their own step(), 7.77 without pages of HTML, which are made of many short pieces, 7.81 without states that stream,
# 7.83 without codes in 8 bits, 7.90 without rates of drives that are seen and tiles of a sequence, 7.92 with a heading for each of ten files that
# are parts of others now, and the link of a given speed, of few tokens each
TOKENS_PER_LINE = 7.89
CYCLE = 0  # files that import each other in a circle; imports for types, and those inside of functions, count
# stage, on the host tier: files of zk that one backward and step enter, and functions in them; objects of zk per unit, and their classes
# one looks what was unfrozen, two look for wrappers, one for gradients of other ranks, one takes gradients that were assigned,
# seven look for DTensors, one looks if backward is to come later, six look if a unit has been updated early, or has to be
# one asks the rule for the numbers of a parameter, one for the rule of each group; one (with its file) leaves what is packed out of slices,
# one asks what is kept of a whole parameter
# one has the scalars of Adam, which are also checked before training; three are on the way to threads of an update, which may be bound,
# and one ends a chunk
# at stage 3 one asks if a unit of several blocks is used no more
STEPS = {2: (27, 146, 12, 8), 3: (27, 147, 12, 8)}
# one asks for what a section's update needs, one gives back gradients that were handed over
# one has the scalars of Adam, which are also checked before training
# files: three more for what was in optimizer.py; functions: one more that takes the norm, for step() and for clip_grad_norm_()
# two for runs and for optimizers' own steps;
# two for excerpts of the user's files, one for the parts of a model, two for updates that begin early
# four for states that stream, one for what a step makes of a shard
# five for what is kept of whole parameters: one tensor of it, and around it, its place, the rule, and one parameter in the trial of that
# one for rates of a drive
CLASSES = 78  # in zk/offload and zk/parallel
# how docstrings begin that say neither what a thing is nor what it does, and words for which the field has others
PHRASES = {
    r'"""In: ': 0,
    r'"""(What|Whether|Where|Who|When|Something|Somebody) ': 0,
    r"\b[Bb]eside training\b": 0,
    r"\b[Uu]nder way\b": 0,
    r"\bgive_back\b": 0,
    r"\blet_go\b": 0,
    r"\btorn\b": 0,
}


def room_of(path: Path) -> str:
    """The room that a file of the package is in."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if len(parts) > 1 and parts[0] in SIZES:
        return parts[0]
    return "beside the core" if parts[-1] in BESIDE else "core"


def files() -> list[Path]:
    """The modules of the package."""
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """A module as it is parsed."""
    return ast.parse(path.read_text())


def code_tokens(path: Path, source: str) -> int:
    """Number of Python's tokens, without layout, comments and docstrings."""
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None
    }
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}
    return sum(
        token.type not in layout and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )


@functools.cache
def sizes() -> dict[str, tuple[int, int]]:
    """Lines and code tokens of each room."""
    found = dict.fromkeys(SIZES, (0, 0))
    for path in files():
        source, room = path.read_text(), room_of(path)
        found[room] = (found[room][0] + source.count("\n"), found[room][1] + code_tokens(path, source))
    return found


def imports() -> dict[str, set[str]]:
    """The modules of the package that each one names in an import, anywhere in it."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files()}
    graph: dict[str, set[str]] = {}
    for path in files():
        own = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[own] = set()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                graph[own] |= {alias.name for alias in node.names} & names
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & names
                graph[own] |= inner or {node.module} & names
        graph[own].discard(own)
    return graph


def circle(graph: dict[str, set[str]]) -> set[str]:
    """The largest set of modules of which each one reaches every other."""

    def reached(start: str) -> set[str]:
        seen, left = set(), [start]
        while left:
            for following in graph[left.pop()] - seen:
                seen.add(following)
                left.append(following)
        return seen

    reach = {name: reached(name) for name in graph}
    return max(({other for other in reach[name] if name in reach[other]} for name in graph), key=len)


def trained(stage: int, units: int) -> tuple[nn.Module, ZeroOptimizer]:
    """A model of as many blocks, after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(units)))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tiers = {"optimizer_tier": "host", "param_tier": "host" if stage == 3 else "device"}
    optimizer = ZeroOptimizer(model, inner, stage=stage, dtype="bf16", clip_grad_norm=1.0, units=[str(index) for index in range(units)], **tiers)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    """Train one step."""
    model(torch.ones(2, 8)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def entered(stage: int) -> tuple[int, int]:
    """Files and functions of zk that the calling thread enters in one backward and step."""
    model, optimizer = trained(stage, 4)
    functions: set[types.CodeType] = set()

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            functions.add(frame.f_code)

    loss = model(torch.ones(2, 8)).float().square().mean()
    sys.setprofile(note)
    try:
        loss.backward()
        optimizer.step()
    finally:
        sys.setprofile(None)
    optimizer.close()
    named = {code for code in functions if not code.co_name.startswith("<")}
    return len({code.co_filename for code in named}), len(named)


def objects(stage: int) -> tuple[int, int]:
    """Objects of zk's own classes per unit, and their classes: the difference between a model of 7 units and one of 3."""

    def count(units: int) -> collections.Counter[str]:
        gc.freeze()  # what there was before is not looked at
        try:
            model, optimizer = trained(stage, units)
            model(torch.ones(2, 8)).float().square().mean().backward()
            gc.collect()
            found = collections.Counter(type(thing).__qualname__ for thing in gc.get_objects() if str(type(thing).__module__).startswith("zk."))
            optimizer.step()
            optimizer.close()
        finally:
            gc.unfreeze()
        return found

    few, many = count(3), count(7)
    more = {name: many[name] - few[name] for name in many if many[name] - few[name] >= 4}
    return sum(more.values()) // 4, len(more)


def classes() -> int:
    """Classes in the rooms of tiers and ranks."""
    trees = (tree_of(path) for room in ("offload", "parallel") for path in (PACKAGE / room).glob("*.py"))
    return sum(isinstance(node, ast.ClassDef) for tree in trees for node in ast.walk(tree))


@functools.cache
def phrases() -> dict[str, int]:
    """How often each phrase is in the package."""
    sources = [path.read_text() for path in files()]
    return {phrase: sum(len(re.findall(phrase, source)) for source in sources) for phrase in PHRASES}


@pytest.mark.parametrize("room", SIZES)
def test_a_room_grows_no_further(room: str) -> None:
    lines, tokens = sizes()[room]
    assert lines <= SIZES[room][0] and tokens <= SIZES[room][1], (lines, tokens)


def test_lines_are_not_made_few_by_making_them_long() -> None:
    total = [sum(pair) for pair in zip(*sizes().values(), strict=True)]
    assert total[1] / total[0] <= TOKENS_PER_LINE


def test_no_more_files_import_each_other_in_a_circle() -> None:
    found = circle(imports())
    assert len(found) <= CYCLE, sorted(found)


@pytest.mark.parametrize("stage", STEPS)
def test_a_step_enters_no_more_of_zk(stage: int) -> None:
    found = (*entered(stage), *objects(stage))
    assert all(now <= ceiling for now, ceiling in zip(found, STEPS[stage], strict=True)), found


def test_no_more_classes_hold_tiers_and_ranks() -> None:
    assert classes() <= CLASSES


@pytest.mark.parametrize("phrase", PHRASES)
def test_words_that_leave_do_not_come_back(phrase: str) -> None:
    assert phrases()[phrase] <= PHRASES[phrase]


def rows() -> Iterator[tuple[str, Callable[[], object]]]:
    """Names of the counts, and functions that count."""
    yield "lines, code tokens", sizes
    yield "circle", lambda: sorted(circle(imports()))
    for stage in STEPS:
        yield f"stage {stage}: files, functions, objects per unit, classes", lambda stage=stage: (*entered(stage), *objects(stage))
    yield "classes", classes
    yield "phrases", phrases


if __name__ == "__main__":
    for name, count in rows():
        print(f"{name}: {count()}")
