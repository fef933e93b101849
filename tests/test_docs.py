"""What README and the documentation say is so: snippets run, commands and options are there, and so are paths, links and messages."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from tests.programs import run
from zk.tools.cli import Commands, app

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = [README, ROOT / "docs" / "index.md", *GUIDES]
ALL = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^([ ]*)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: \S.*-->\n\Z")
COMMAND = re.compile(r"(?:\w+=\S+ )*(?:[\w./]*(?:python3?|torchrun)\b.* -m zk|zk)(?: +(.*))?")
PATH = r"((?:zk|docs|examples|benchmarks|tests)/[\w./-]*)"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str) -> Iterator[tuple[str, str, int]]:
    """Language, content and number of the first line of each fenced block, but for those that a comment before them excepts."""
    for found in BLOCK.finditer(text):
        if not NOT_RUN.search(text[: found.start()]):
            yield found[2], found[3], text[: found.start(3)].count("\n") + 1


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))


def command_lines(text: str) -> Iterator[str]:
    """What the page tells to type: lines of blocks that are no program, output or diff, and code in a sentence."""
    for language, content, _ in blocks(text):
        if language in ("", "sh", "bash"):
            yield from content.replace("\\\n", " ").splitlines()
    yield from code_spans(text)


RUNNER = """
import json, os, sys, tempfile, traceback, torch
torch.set_num_threads(1)
pages, failures = json.load(open(sys.argv[1])), {}
for page, programs in pages.items():
    names = {"__name__": "__main__"}
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for program, line in programs:
                exec(compile("\\n" * (line - 1) + program, page, "exec"), names)
        except BaseException:
            failures[page] = traceback.format_exc()
        os.chdir("/")
with open(sys.argv[2], "w") as file:
    json.dump(failures, file)
"""


def test_the_programs_of_each_page_run_one_after_the_other(tmp_path: Path) -> None:
    programs = {name_of(page): [(content, line) for language, content, line in blocks(page.read_text()) if language == "python"] for page in PAGES}
    programs["README.md"].insert(1, ("assert optimizer.metrics()['steps'] == 3 and optimizer.config.stage == 3", 1))
    # as if other ranks had the other cores: on a busy machine several threads wait for each other longer than these models compute
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "LOCAL_WORLD_SIZE": str(os.cpu_count())}
    pages, found = tmp_path / "pages.json", tmp_path / "failures.json"
    pages.write_text(json.dumps(programs))
    run("-c", RUNNER, str(pages), str(found), env=environment, check=True)
    failures: dict[str, str] = json.loads(found.read_text())
    assert not failures, "\n".join(failures.values())


def check_zk(arguments: str) -> None:
    """Parse what comes after `zk`, without running it. Files need not be there, and a sentence may leave arguments out."""
    words = shlex.split(arguments, comments=True)
    if not words or words[0] in ("--help", "--version"):
        return
    group = typer.main.get_command(app)
    assert isinstance(group, Commands)
    try:
        name, command, rest = group.resolve_command(group.context_class(group), words)
        if rest and rest[-1] != "--help":  # else a command that is spoken of
            command.make_context(name, rest)
    except Exception as error:
        may_be = ("does not exist", "Missing parameter")
        assert any(reason in str(error) for reason in may_be), f"zk {arguments}: {error}"


def test_commands_and_their_options_exist() -> None:
    for page in ALL:
        for line in command_lines(page.read_text()) if page.name != "what_left.md" else ():
            if found := COMMAND.fullmatch(line.strip()):
                check_zk(found[1] or "")
    for wrong in ("traim", "train --stepps 3", "train --steps many", "plan gpt:1b extra", "plan gpt:1b --tokens 0"):
        with pytest.raises(AssertionError):
            check_zk(wrong)


def test_the_slurm_script_starts_what_exists(tmp_path: Path) -> None:
    for name, does in {"scontrol": "echo node-a; echo node-b", "srun": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "7"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    commands = (["bash", str(ROOT / "examples" / "slurm.sbatch"), *of_user] for of_user in ([], ["mine.py", "--two words", "x"]))
    words, own = (subprocess.check_output(command, text=True, env=environment).splitlines() for command in commands)
    assert words[:5] == ["torchrun", "--nnodes", "2", "--nproc_per_node", "4"] and words[words.index("--rdzv-endpoint") + 1] == "node-a:29500"
    check_zk(shlex.join(words[words.index("zk") + 1 :]))
    assert own[-3:] == ["mine.py", "--two words", "x"]


def test_paths_and_links_exist() -> None:
    for page in ALL:
        text = page.read_text()
        for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text)):
            if not re.match(r"[a-z]+://|#", target):
                assert (page.parent / target.partition("#")[0]).exists(), f"{name_of(page)} links to {target}"
        named = [path for span in code_spans(text) for path in re.findall(rf"(?:^|\s){PATH}", span)]
        for path in named:
            assert (ROOT / path).exists(), f"{name_of(page)} names {path}"


def test_messages_that_are_explained_are_those_of_the_code() -> None:
    """With … for what is put into one; a message may be in several pieces."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "zk").rglob("*.py")))
    text = re.sub(r"['\"]\s+f?['\"]|\{[^{}\n]*\}", lambda found: "…" * (found[0][0] == "{"), text)
    quoted = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "guides" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(quoted) > 40 and len(set(quoted)) == len(quoted)
    for heading in quoted:
        parts = [part.strip() for part in heading.split("…")]
        missing = [part for part in parts if part not in text]
        assert not missing and max(map(len, parts)) >= 9, f"no message of zk says: {heading} ({missing})"


def test_every_command_is_on_the_page_of_commands_and_targets_of_make_exist() -> None:
    text = (ROOT / "docs" / "reference" / "command_line.md").read_text()
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f"`zk {name}" in text, f"{name} is not on the page"
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    typed = [(name_of(page), line) for page in ALL for line in command_lines(page.read_text())]
    named = {(page, target) for page, line in typed for target in re.findall(r"^(?:\w+=\S+ )*make ([a-z][a-z-]*)", line)}
    assert {("README.md", "train"), ("README.md", "test")} <= named
    assert {target for _, target in named} <= targets, sorted(named)


def test_the_site_shows_every_page_and_all_of_a_line_of_code() -> None:
    """Its column has 84 characters."""
    lines = [(page, language, line) for page in ALL for language, content, _ in blocks(page.read_text()) for line in content.splitlines()]
    wide = [f"{name_of(page)}: {line}" for page, language, line in lines if language in ("python", "diff", "sh", "json") and len(line) > 84]
    assert not wide, "\n".join(wide)
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
