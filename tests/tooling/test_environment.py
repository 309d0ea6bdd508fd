"""The tests must not see, or touch, what a developer has configured on the same machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from django.conf import settings

ROOT = Path(__file__).parents[2]


def test_the_tests_have_a_data_directory_of_their_own() -> None:
    data_dir = Path(os.environ["KVPORTAL_DATA_DIR"])
    assert ROOT not in data_dir.parents
    assert Path(settings.DATABASES["default"]["NAME"]).is_relative_to(data_dir)


def test_a_developers_variables_take_no_part(tmp_path: Path) -> None:
    """A pytest of its own, because the settings are read once: with these values it would not even start."""
    (tmp_path / "test_example.py").write_text(
        "from django.conf import settings\n"
        "def test_example():\n"
        "    assert 'Redis' not in settings.CHANNEL_LAYERS['default']['BACKEND']\n"
    )
    env = {
        **os.environ,
        "KVPORTAL_REDIS_URL": "redis://127.0.0.1:1/0",
        "KVPORTAL_DATABASE_URL": "mysql://nowhere",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-c",
        ROOT / "pyproject.toml",
        tmp_path,
    ]
    result = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout
