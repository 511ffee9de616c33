"""Every command and example of README works as it stands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import LlamaConfig, LlamaForCausalLM

import fakecuda
import weightload
from fixtures.checkpoints import decoder, write_checkpoint

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """README's code blocks in one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def console(program: str) -> list[list[str]]:
    """README's command lines that start with a program, split into words."""
    lines = "\n".join(blocks("console")).splitlines()
    commands = [part for line in lines for part in line.split(" && ")]
    return [shlex.split(command) for command in commands if command.startswith(program)]


def test_the_example_of_a_load_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first example loads a checkpoint; only the device is the fake one."""
    write_checkpoint(tmp_path / "path/to/checkpoint", [decoder(1, 64, 128, 100)], seed=1)
    monkeypatch.chdir(tmp_path)
    (example,) = [text for text in blocks("python") if "weightload.load(" in text]
    fake = fakecuda.FakeCuda()
    real = weightload.load
    monkeypatch.setattr(weightload, "load", lambda *a, **k: real(*a, driver=fake, **k))
    exec(example, {})  # noqa: S102 - README is ours
    fake.close()
    assert "stream" in capsys.readouterr().out


def test_the_example_of_a_model_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first example of all loads a model; only the device is the fake one."""
    (example,) = [text for text in blocks("python") if "load_model(" in text]
    assert README.index(example) == min(README.index(text) for text in blocks("python"))
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "path/to/model")
    monkeypatch.chdir(tmp_path)
    fake = fakecuda.FakeCuda()
    real = weightload.load_model
    monkeypatch.setattr(weightload, "load_model", lambda *a, **k: real(*a, driver=fake, **k))
    exec(example, {})  # noqa: S102 - README is ours
    fake.close()
    assert capsys.readouterr().out.strip()


def test_the_example_of_the_fake_catches_its_bug(tmp_path: Path) -> None:
    """The test in README fails, and the hazard it names is the reason."""
    (example,) = [text for text in blocks("python") if "fake_cuda" in text]
    (tmp_path / "test_example.py").write_text(example)
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 1
    assert "PIN-REUSE-BEFORE-COPY" in finished.stdout


def test_the_sessions_exist() -> None:
    """Every session that README names is one of the noxfile's."""
    named = set(re.findall(r"nox -s ([\w-]+)", README))
    listed = subprocess.run(
        [sys.executable, "-m", "nox", "--list", "--noxfile", str(ROOT / "noxfile.py")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert named == {"rehearse", "host", "gb10-qualify", "cuda-rehearse"}
    assert all(re.search(rf"[*-] {name} ", listed) for name in named)


def test_the_command_line_is_understood() -> None:
    """Every option of README's command exists; with placeholders it ends in a sentence."""
    (command,) = console("loadproof")
    finished = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 2
    assert finished.stderr.startswith("loadproof: ")
    assert "DIR" in finished.stderr


def test_the_files_that_readme_names_exist() -> None:
    """No link of README is dead."""
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert all((ROOT / link).exists() for link in links)
