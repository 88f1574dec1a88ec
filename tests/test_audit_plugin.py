"""The pytest plug-in, in runs of pytest of their own."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "200"}


def pytest_run(tmp_path, *words):
    command = [sys.executable, "-m", "pytest", "-p", "truedraw.audit.pytest_plugin", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT, timeout=100)
    return done.returncode, done.stdout + done.stderr


def test_without_its_option_the_plugin_adds_nothing(tmp_path):
    (tmp_path / "test_mine.py").write_text(
        "import sys\ndef test_mine():\n    assert not [name for name in sys.modules if name.startswith('truedraw.prove')]\n"
    )
    status, out = pytest_run(tmp_path)
    assert status == 0 and "1 passed" in out


def test_a_right_verifier_passes_item_by_item(tmp_path):
    status, out = pytest_run(tmp_path, "-q", "-rA", "--truedraw-verify", "truedraw.audit.own:token", "-k", "R1 or edge")
    assert status == 0, out
    assert "PASSED truedraw::law[R1, drafts 2 then 2]" in out and "PASSED truedraw::edge[p is NaN at the draft]" in out
    assert "failed" not in out


def test_a_wrong_one_fails_where_it_is_wrong_and_says_why(tmp_path):
    (tmp_path / "engine.py").write_text(
        "from truedraw.audit import own\n"
        "def verify(p, q, drafts, uniforms):\n"
        "    return own.token(p, q, drafts, [0.0] * len(drafts) + list(uniforms[-1:]))\n"
    )
    (tmp_path / "test_mine.py").write_text("def test_mine():\n    pass\n")
    status, out = pytest_run(tmp_path, "-q", "--truedraw-verify", "engine:verify", "-k", "R1 and not 2 or mine")
    assert status == 1 and "FAILED truedraw::law[R1, drafts 1 then 1]" in out
    assert "everything accepted: usually the acceptance uniform is constant 0" in out and "Traceback" not in out


def test_single_items_are_chosen_as_usual(tmp_path):
    status, out = pytest_run(tmp_path, "-q", "--truedraw-verify", "truedraw.audit.own:block", "-k", "law and R1 and not 2")
    assert status == 0 and "1 passed" in out and "deselected" in out


def test_a_verifier_with_its_own_uniforms_is_sampled(tmp_path):
    (tmp_path / "engine.py").write_text(
        "import random\nfrom truedraw.audit import own\n"
        "def verify(p, q, drafts):\n"
        "    return own.token(p, q, drafts, [random.random() for _ in range(len(drafts) + 1)])\n"
    )
    status, out = pytest_run(tmp_path, "-q", "-rA", "--truedraw-verify", "engine:verify", "-k", "law or placeholder or NaN")
    assert status == 0 and "PASSED truedraw::law[by samples]" in out


def test_a_program_is_audited_too(tmp_path):
    program = f"{sys.executable} {ROOT / 'examples' / 'verifier.py'}"
    status, out = pytest_run(tmp_path, "-q", "--truedraw-process", program, "-k", "edge or ties")
    assert status == 0, out


def test_what_cannot_be_audited_is_usage(tmp_path):
    status, out = pytest_run(tmp_path, "--truedraw-verify", "no.such.module:f")
    assert status == 4 and "no.such.module cannot be imported" in out and "Traceback" not in out


def test_the_plugin_is_registered():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert points == {"truedraw": "truedraw.audit.pytest_plugin"}
