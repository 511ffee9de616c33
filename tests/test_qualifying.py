"""What docs/qualifying.md says of somebody else's loader is what the harness does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import msgspec

from fixtures.checkpoints import Tensor, write_checkpoint
from fixtures.legs import run
from fixtures.programs import program_request
from loadproof.measure import protocol
from loadproof.measure.messages import Result
from loadproof.plan.project import FILE_NAME, read_project

DOC = (Path(__file__).parents[1] / "docs" / "qualifying.md").read_text("utf-8")
# Answers with lines of the documentation, in order; only the place of the memory is its own.
PROGRAM = """
import json, os, sys

file = os.memfd_create("x")
os.truncate(file, 4096)
for answer in ANSWERS:
    sys.stdin.readline()
    for memory in answer.get("memory", ()):
        memory["path"] = f"/proc/{os.getpid()}/fd/{file}"
    print(json.dumps(answer), flush=True)
"""


def blocks(language: str) -> list[str]:
    """The page's code blocks in one language."""
    return re.findall(rf"```{language}\n(.*?)```", DOC, re.DOTALL)


def messages(*kinds: str) -> list[dict[str, Any]]:
    """The page's messages of these kinds, in order."""
    found = [json.loads(text) for text in blocks("json")]
    return [each for each in found if each["type"] in kinds]


def test_the_projects_files_are_right(tmp_path: Path) -> None:
    """Both examples are read: one of a function, one of a program."""
    projects = []
    for text in blocks("toml"):
        (tmp_path / FILE_NAME).write_text(text)
        projects.append(read_project(tmp_path))
    assert [each.entry for each in projects] == ["package.module:function", None]
    assert projects[0].options == {"threads": 4}
    assert projects[1].command == ("{site}/bin/loader", "--quiet")


def test_the_messages_are_those_of_the_protocol() -> None:
    """Each is one that the harness says or reads, by the code and by the published schema."""
    done = subprocess.run(
        [sys.executable, "-m", "loadproof", "protocol"], check=True, capture_output=True, text=True
    )
    schema = json.loads(done.stdout)
    said = messages("hello", "load", "release")
    heard = messages("ready", "loaded", "bye", "error")
    assert len(said) + len(heard) == len(blocks("json"))
    for side, found, kind in (
        ("harness", said, protocol.Asked),
        ("loader", heard, protocol.Answer),
    ):
        for each in found:
            jsonschema.validate(each, {**schema[side], "$defs": schema["$defs"]})
            read: Any = msgspec.convert(each, kind)
            if not isinstance(read, protocol.Loaded):
                assert msgspec.json.decode(msgspec.json.encode(read)) == each
            else:
                assert protocol.misplaced(read) is None


def test_every_message_is_on_the_page() -> None:
    """No kind of message is left out."""
    kinds = [*protocol.Asked.__args__, *protocol.Answer.__args__]
    assert {each["type"] for each in messages(*(k.__struct_config__.tag for k in kinds))} == {
        kind.__struct_config__.tag for kind in kinds
    }


def test_every_code_is_on_the_page() -> None:
    """What a leg of a program can end with is explained."""
    source = Path(protocol.__file__).parent
    text = "".join((source / name).read_text("utf-8") for name in ("command.py", "handed_out.py"))
    codes = set(re.findall(r'"((?:protocol|loader)-[a-z]+)"', text))
    assert len(codes) == 7
    assert all(f"| `{code}` |" in DOC for code in codes)


def test_the_conversation_runs_as_it_is_written(tmp_path: Path) -> None:
    """A program that says just the page's lines, in their order, has a result."""
    ready, first, second, bye = messages("ready", "loaded", "bye")
    loaded = next(each for each in (first, second) if each["memory"][0]["kind"] != "cuda-ipc")
    site, checkpoint = tmp_path / "site", tmp_path / "checkpoint"
    site.mkdir()
    write_checkpoint(checkpoint, [[Tensor("a", "BF16", (2, 3))]], seed=1)
    (site / "loader.py").write_text(PROGRAM.replace("ANSWERS", repr([ready, loaded, bye])))
    found = run(program_request(site, checkpoint)).outcome
    assert isinstance(found, Result), found
    assert (found.tensors, found.nbytes) == (1, 12)
    assert found.identity is not None
    assert found.identity.environment == {"cuda": "13.0"}
