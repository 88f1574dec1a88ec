"""The package as it is imported."""

import subprocess
import sys

import truedraw


def test_exported_names_exist_and_are_sorted():
    assert sorted(truedraw.__all__) == truedraw.__all__
    assert all(hasattr(truedraw, name) for name in truedraw.__all__)


def test_importing_truedraw_is_light():
    code = (
        "import sys, truedraw\n"
        "heavy = ('llama_cpp', 'torch', 'numba', 'fastapi', 'jinja2', 'typer', 'rich', 'huggingface_hub', 'scipy')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_importing_truedraw_is_quick():
    """Under 0.3 s, or six times what numpy takes on a slow machine: the best of five, measured inside the process."""

    def seconds(name):
        code = f"import time; t = time.perf_counter(); import {name}; print(time.perf_counter() - t)"
        run = [sys.executable, "-c", code]
        return min(float(subprocess.run(run, capture_output=True, text=True, check=True).stdout) for _ in range(5))

    took = seconds("truedraw")
    assert took < 0.3 or took < 6 * seconds("numpy")


def test_the_layers_import_only_downwards():
    import os
    from pathlib import Path

    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [linter], capture_output=True, text=True, cwd=Path(__file__).parent.parent, env={**os.environ, "COLUMNS": "200"}
    )
    assert result.returncode == 0, result.stdout
