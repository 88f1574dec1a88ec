"""What the documents say is run: every snippet of the README, every option in docs/cli.md, the examples."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100", "TERM": "dumb"}


def snippets(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def run(command, **options):
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT, timeout=300, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def shell_lines():
    return [line for block in snippets("sh") for line in block.splitlines() if line.strip()]


@pytest.mark.model
@pytest.mark.parametrize("line", [line for line in shell_lines() if not line.startswith("make")])
def test_readme_commands_run(line):
    assert run(line, shell=True).strip()


@pytest.mark.model
@pytest.mark.parametrize("snippet", snippets("python"), ids=["generate"])
def test_readme_python_runs_as_pasted(snippet):
    assert run([sys.executable, "-c", snippet]).strip()
    assert len(snippet.splitlines()) <= 15


def test_the_first_command_of_the_readme_audits_a_server(tmp_path):
    """Against a local server without fault, and with fewer tokens."""
    from truedraw.audit.planted import PlantedServer

    (line,) = [line for block in snippets("bash") for line in block.splitlines() if line.startswith("truedraw audit endpoint")]
    with PlantedServer(seed=1) as server:
        page = tmp_path / "report.html"
        told = run(line.replace("http://localhost:8000", server.url).replace("report.html", f"{page} --detect 0.4"), shell=True)
    assert "No evidence of a fault" in told and page.exists()


@pytest.mark.model
def test_make_demo_shows_what_it_says():
    """With the environment that runs these tests in the place of .venv."""
    demo = run(["make", "--no-print-directory", "-o", ".venv/demo", "demo", f"BIN={Path(sys.executable).parent}"])
    assert "Thames" in demo


def test_make_targets_of_the_readme_exist():
    for line in shell_lines():
        if line.startswith("make"):
            target = line.split()[1]
            assert run(["make", "-n", target])


def test_a_missing_compiler_is_named(tmp_path):
    for tool in ("make", "sh"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    command = [str(tmp_path / "make"), "system", f"PYTHON={sys.executable}"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PATH": str(tmp_path)})
    assert result.returncode != 0 and "missing: a C++ compiler (Debian: g++)" in result.stderr


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(example):
    assert run([sys.executable, str(example)]).strip()


def test_the_option_list_is_current():
    page = (ROOT / "docs" / "cli.md").read_text()
    commands = ("generate", "chat", "serve", "prove", "explain", "plan", "profile", "bench", "load")
    for command in (*commands, "audit endpoint", "audit function", "audit process", "audit model", "train mtp"):
        shown = run([sys.executable, "-m", "truedraw", *command.split(), "--help"])
        options = set(re.findall(r"--[a-z][a-z-]+", shown))
        section = page.partition(f"## truedraw {command}")[2].partition("\n## ")[0]
        assert set(re.findall(r"--[a-z][a-z-]+", section)) >= options - {"--help"}, command


def test_documents_are_short_and_speak_of_no_machine():
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text()
        assert len(text.splitlines()) <= 130 and not re.search(r"(^|[^A-Za-z0-9_.])/(work|root|tmp|home)/", text)


def test_links_lead_somewhere():
    for page in [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")] + list(
        (ROOT / "docs").glob("*.md")
    ):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_number_of_planted_faults_is_right():
    from truedraw.prove.mutants import mutants
    from truedraw.prove.planted_tensors import TENSORS

    assert f"plants {len([mutant for mutant in mutants() if mutant not in TENSORS])} faults" in README
    assert f"with {len(TENSORS)} faults of its own" in (ROOT / "docs" / "algorithm.md").read_text()
