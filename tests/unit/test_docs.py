"""The documents describe what exists: their code runs, and every name in them can be found."""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "infinite_sampling"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

COMMANDS = ("train", "rollout", "memory")
"""A flag that a document names without its command belongs to one of these."""

FOREIGN = {"GRPOTrainer", "GRPOConfig", "AttentionInterface", "AutoModelForCausalLM", "LoRA"}
"""Names of other libraries that the documents mention."""

CAMEL_CASE = re.compile(r"[A-Z][a-z0-9]*[a-z][A-Za-z0-9]*[A-Z]\w*")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
COMMAND_LINE = re.compile(r"\binfinite-sampling\s+([a-z]+)\b(.*)")


class Block(NamedTuple):
    """A fenced block of a document."""

    document: str
    line: int
    language: str
    text: str


def blocks_of(text: str, document: str = "") -> Iterator[Block]:
    """Every fenced block, with the number of its first line."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(document, text.count("\n", 0, match.start()) + 2, match[1], match[2])


def spans_of(text: str) -> list[str]:
    """Every inline code span outside fenced blocks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


def shell_lines_of(text: str) -> Iterator[str]:
    """Command lines of shell blocks, continuation lines joined, and inline code spans."""
    for block in blocks_of(text):
        if block.language in ("bash", "sh", "console", ""):
            joined = block.text.replace("\\\n", " ")
            yield from re.sub(r"(^|\s)#.*", "", joined, flags=re.MULTILINE).splitlines()
    yield from spans_of(text)


@cache
def defined_names() -> dict[str, set[str]]:
    """Of each module of the package: everything it defines, at any depth, and what it imports."""
    names: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found = names.setdefault(module, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.alias):
                found.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return names


def all_names() -> set[str]:
    """Every name that the package defines, and its modules'."""
    modules = {part for module in defined_names() for part in module.split(".")}
    return modules.union(*defined_names().values())


def is_there(dotted: str) -> bool:
    """Whether `infinite_sampling.a.B.c` names a module, or something that a module defines."""
    names = defined_names()
    parts = dotted.split(".")
    depth = max((n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in names), default=0)
    return depth > 0 and all(part in names[".".join(parts[:depth])] for part in parts[depth:])


def unknown_symbols(text: str) -> list[str]:
    """What a document names of the package and the package lacks."""
    missing = []
    for dotted in re.findall(r"\binfinite_sampling(?:\.[A-Za-z_]\w*)+", text):
        if not dotted.endswith(".py") and not is_there(dotted):
            missing.append(dotted)
    for span in spans_of(text):
        called = re.fullmatch(r"((?:\w+\.)*\w+)\(.*\)", span)
        dotted = called[1] if called else span
        if dotted.startswith("infinite_sampling") or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", dotted):
            continue
        head, *rest = dotted.split(".")
        wanted = [head, *rest] if called or CAMEL_CASE.fullmatch(head) else []
        known = all_names() | FOREIGN | set(dir(builtins))
        missing += [span for name in wanted if head not in FOREIGN and name not in known]
    for block in blocks_of(text):
        if block.language == "python":
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("infinite_sampling"):
                    dotted_names = [f"{node.module}.{alias.name}" for alias in node.names]
                    missing += [dotted for dotted in dotted_names if not is_there(dotted)]
    return missing


def unknown_files(text: str) -> list[str]:
    """Source files and folders named in inline code that are not in the checkout."""
    spans = [s for s in spans_of(text) if re.fullmatch(r"[\w./-]+\.(py|md|yaml|toml|txt)|[\w.-]+(/[\w.-]+)*/", s)]
    return [s for s in spans if not (ROOT / s).exists() and not (SOURCE / s).exists()]


@cache
def help_of(command: str) -> str:
    """What `infinite-sampling COMMAND --help` prints; fails where there is no such command."""
    code = "from infinite_sampling.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, command, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"infinite-sampling {command} --help failed: {done.stderr}"
    return done.stdout


@cache
def flags_of(command: str) -> frozenset[str]:
    """The flags that `infinite-sampling COMMAND --help` documents."""
    return frozenset(FLAG.findall(help_of(command)))


def unknown_flags(text: str) -> list[str]:
    """Flags of our command line that a document names and no `--help` documents."""
    missing = []
    for line in shell_lines_of(text):
        if command := COMMAND_LINE.search(line):
            missing += [f"{command[1]} {flag}" for flag in FLAG.findall(command[2]) if flag not in flags_of(command[1])]
        elif line.startswith("--"):
            everywhere = frozenset().union(*map(flags_of, COMMANDS))
            missing += [flag for flag in FLAG.findall(line) if flag not in everywhere]
    return missing


def unknown_targets(text: str) -> list[str]:
    """`make` targets named in a document that the Makefile lacks."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = (line for line in shell_lines_of(text) if line.startswith("make "))
    return [word for line in lines for word in line.split()[1:] if "=" not in word and word not in targets]


README_PYTHON = [b for b in blocks_of((ROOT / "README.md").read_text(), "README.md") if b.language == "python"]


def test_the_readme_has_code_to_run():
    assert README_PYTHON


@pytest.mark.slow
@pytest.mark.parametrize("block", README_PYTHON, ids=lambda block: f"line {block.line}")
def test_the_readmes_code_runs(block, tmp_path):
    script = tmp_path / "readme.py"
    script.write_text(block.text)
    # One thread: on a loaded machine, two wait for each other at every kernel's end.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"README.md line {block.line}:\n{done.stderr}"
    assert done.stdout.strip(), "an example shows what it did"


@pytest.mark.parametrize("check", [unknown_symbols, unknown_files, unknown_flags, unknown_targets])
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_exists(document, check):
    assert check(document.read_text()) == []


def test_links_between_documents_lead_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (unknown_symbols, "see `RolloutMachine`"),
        (unknown_symbols, "see `RolloutEngine.roll_out()`"),
        (unknown_symbols, "see `infinite_sampling.engine.Motor`"),
        (unknown_symbols, "```python\nfrom infinite_sampling import Motor\n```"),
        (unknown_files, "see `engines.py`"),
        (unknown_flags, "```bash\ninfinite-sampling memory --groupsize 4\n```"),
        (unknown_flags, "use `--no-such-flag`"),
        (unknown_targets, "```bash\nmake tests\n```"),
    ],
)
def test_a_name_that_does_not_exist_is_found(check, text):
    assert check(text)


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (unknown_symbols, "see `RolloutEngine.rollout(prompt_ids)`, `RolloutConfig`, `num_slots` and `GRPOTrainer`"),
        (unknown_files, "see `engine.py` and `src/infinite_sampling/types.py`"),
        (unknown_targets, "run `make test` or `make PYTHON=python3.12 test`"),
    ],
)
def test_a_name_that_exists_passes(check, text):
    assert check(text) == []


def test_the_readmes_number_is_the_measured_one():
    rows = json.loads((ROOT / "benchmarks" / "results" / "decode.json").read_text())["rows"]
    ratios = {row["peer"]: row["ours_over_this"] for row in rows if (row["slots"], row["dtype"]) == (32, "bfloat16")}
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"decodes {ratios['hf']:.1f} times as fast as with `generate`" in text
    assert f"{ratios['vllm']:.1f} times as fast as with vLLM" in text
