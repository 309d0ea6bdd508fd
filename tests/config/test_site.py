"""The environment behind Django's settings: data directory, secret key, database, cookies."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from kvportal.config import load_config
from kvportal.config.faults import ConfigError
from kvportal.config.site import CHECKOUT, load_site
from tests.support.processes import ManagedProcess
from tests.support.waiting import wait_until

LONG_KEY = "k" * 32 + "0123456789abcdefghijklmnopqrstuvwxyz"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def environment(tmp_path: Path, **changes: str) -> dict[str, str]:
    return {"KVPORTAL_DATA_DIR": str(tmp_path / "var"), **changes}


def faults_of(environ: dict[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_site(environ)
    return str(caught.value).splitlines()


def test_data_directory_and_secret_key_are_made_for_their_owner_alone(tmp_path):
    site = load_site(environment(tmp_path))
    assert mode(site.data_dir) == 0o700
    assert mode(site.data_dir / "secret-key") == 0o600
    assert len(site.secret_key) >= 64
    assert list(site.data_dir.iterdir()) == [site.data_dir / "secret-key"]


def test_the_generated_key_is_kept(tmp_path):
    environ = environment(tmp_path)
    assert load_site(environ).secret_key == load_site(environ).secret_key
    assert load_site(environment(tmp_path / "other")).secret_key != load_site(environ).secret_key


def test_processes_that_start_at_once_agree_on_one_key(tmp_path):
    environ = environment(tmp_path)
    with ThreadPoolExecutor(16) as pool:
        keys = set(pool.map(lambda _: load_site(environ).secret_key, range(64)))
    assert len(keys) == 1
    assert [path.name for path in (tmp_path / "var").iterdir()] == ["secret-key"]


def test_a_directory_that_is_open_to_others_is_closed(tmp_path):
    (tmp_path / "var").mkdir(mode=0o755)
    (tmp_path / "var").chmod(0o755)
    assert mode(load_site(environment(tmp_path)).data_dir) == 0o700


def test_a_given_key_is_used_and_none_is_written(tmp_path):
    site = load_site(environment(tmp_path, KVPORTAL_SECRET_KEY=LONG_KEY))
    assert site.secret_key == LONG_KEY
    assert list(site.data_dir.iterdir()) == []


def test_the_database_defaults_to_sqlite_in_wal_mode_in_the_data_directory(tmp_path):
    site = load_site(environment(tmp_path / "50% off"))
    assert site.database["ENGINE"] == "django.db.backends.sqlite3"
    assert site.database["NAME"] == str(site.data_dir / "kvportal.sqlite3")
    assert "journal_mode=WAL" in site.database["OPTIONS"]["init_command"]
    assert site.database["OPTIONS"]["transaction_mode"] == "IMMEDIATE"
    assert site.database["OPTIONS"]["timeout"] == 20


def test_postgresql_is_taken_from_its_url(tmp_path):
    url = "postgres://portal:s3cret@db.example:5433/kv?sslmode=require"
    database = load_site(environment(tmp_path, KVPORTAL_DATABASE_URL=url)).database
    assert database["ENGINE"] == "django.db.backends.postgresql"
    found = {key: database[key] for key in ("NAME", "USER", "PASSWORD", "HOST", "PORT", "OPTIONS")}
    assert found == {
        "NAME": "kv",
        "USER": "portal",
        "PASSWORD": "s3cret",
        "HOST": "db.example",
        "PORT": 5433,
        "OPTIONS": {"connect_timeout": 5, "sslmode": "require"},
    }


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("KVPORTAL_DATABASE_URL", "mysql://u:s3cret@h/db"),
        ("KVPORTAL_DATABASE_URL", "nonsense"),
        ("KVPORTAL_DATABASE_URL", "postgres://u:s3cret@h:port/db"),
        ("KVPORTAL_DATABASE_URL", "postgres://u:s3cret@[h/db"),
        ("KVPORTAL_DATABASE_URL", "sqlite:///relative/path"),
        ("KVPORTAL_DATABASE_URL", "sqlite:////nowhere/at/all.sqlite3"),
        ("KVPORTAL_DATABASE_URL", "sqlite://:memory:"),
        ("KVPORTAL_DATABASE_URL", "sqlite://"),
        ("KVPORTAL_REDIS_URL", "http://:s3cret@h"),
        ("KVPORTAL_REDIS_URL", "redis://:s3cret@h:port/0"),
        ("KVPORTAL_REDIS_URL", "redis://:s3cret@[h/0"),
        ("KVPORTAL_SECRET_KEY", "s3cret"),
        ("KVPORTAL_ALLOWED_HOSTS", "https://portal.example"),
        ("KVPORTAL_ALLOWED_HOSTS", "a.example,,b.example"),
        ("KVPORTAL_ALLOWED_HOSTS", ","),
        ("KVPORTAL_CSRF_TRUSTED_ORIGINS", "portal.example"),
        ("KVPORTAL_HTTPS", "maybe"),
        ("KVPORTAL_HSTS_SECONDS", "-1"),
        ("KVPORTAL_PROXY_TLS_HEADER", "X-Forwarded-Proto: https"),
        ("KVPORTAL_LOG_LEVEL", "LOUD"),
    ],
)
def test_a_wrong_variable_is_named_and_no_secret_is_shown(tmp_path, variable, text):
    [fault] = faults_of(environment(tmp_path, **{variable: text}))
    assert fault.startswith(f"{variable}: found ")
    assert "; allowed: " in fault
    assert "s3cret" not in fault


def test_a_data_directory_that_cannot_be_one_is_a_fault(tmp_path):
    (tmp_path / "var").write_text("a file")
    [fault] = faults_of(environment(tmp_path))
    assert fault.startswith("KVPORTAL_DATA_DIR: found ")
    assert fault.endswith("a writable directory")


def test_an_unreadable_secret_key_file_is_a_fault(tmp_path):
    (tmp_path / "var" / "secret-key").mkdir(parents=True)
    [fault] = faults_of(environment(tmp_path))
    assert "secret-key: found no usable key" in fault


def test_an_emptied_secret_key_file_is_a_fault(tmp_path):
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "secret-key").write_text("")
    [fault] = faults_of(environment(tmp_path))
    assert "secret-key" in fault


def test_representation_shows_no_secret(tmp_path):
    changes = {
        "KVPORTAL_SECRET_KEY": LONG_KEY,
        "KVPORTAL_DATABASE_URL": "postgres://u:s3cret@h/db",
        "KVPORTAL_REDIS_URL": "redis://:s3cret@h",
    }
    text = repr(load_site(environment(tmp_path, **changes)))
    assert "s3cret" not in text
    assert LONG_KEY not in text


def manage(tmp_path: Path, *argv: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """A command in an environment with no other KVPORTAL_ variable."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVPORTAL_")}
    return subprocess.run(
        [sys.executable, str(CHECKOUT / "manage.py"), *argv],
        env={**inherited, **environment(tmp_path, **changes)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_any_command_with_wrong_variables_ends_with_status_2_and_a_line_for_each(tmp_path):
    done = manage(tmp_path, "check", KVPORTAL_DEBUG="x", KVPORTAL_DATABASE_URL="mysql://h/db")
    assert done.returncode == 2
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [
        "KVPORTAL_DATABASE_URL",
        "KVPORTAL_DEBUG",
    ]
    assert done.stdout == ""


def test_serve_reports_faults_of_settings_and_of_flags_together(tmp_path):
    done = manage(tmp_path, "serve", "--server=x", KVPORTAL_DEBUG="x", KVPORTAL_TARGET_TTFT="-1")
    assert done.returncode == 2
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [
        "KVPORTAL_DEBUG",
        "--server",
        "KVPORTAL_TARGET_TTFT",
    ]


@pytest.mark.parametrize("settings", [{}, {"KVPORTAL_DEBUG": "x"}])
def test_a_fault_of_an_option_that_every_command_has_is_a_line_too(tmp_path, settings):
    done = manage(tmp_path, "serve", "--verbosity=9", **settings)
    assert done.returncode == 2
    *others, line = done.stderr.splitlines()
    assert [other.split(":")[0] for other in others] == list(settings)
    assert line.startswith("command line: found argument -v/--verbosity: invalid choice: 9")


def test_ctrl_c_while_the_configuration_is_read_ends_it_without_a_traceback(tmp_path):
    """The file is a pipe into which nobody writes."""
    pipe = tmp_path / "kv.json"
    os.mkfifo(pipe)
    command = [sys.executable, str(CHECKOUT / "manage.py"), "serve", f"--kv-events-config-file={pipe}"]
    # Whoever runs the tests in the background may have them ignore Ctrl-C, and children inherit that.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = ManagedProcess(command, tmp_path / "log", env={**os.environ, **environment(tmp_path)})
    finally:
        signal.signal(signal.SIGINT, inherited)

    def opened() -> int | None:
        assert process.running, process.output()
        with suppress(OSError):  # until it is opened for reading
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        return None

    try:
        with os.fdopen(wait_until(opened, 30), "wb"):
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
    finally:
        process.stop()
    assert process.output() == ""


def example_variables(*, commented: bool = False) -> dict[str, str]:
    """The variables of the example for production; `commented`: also those that are commented out."""
    variables = {}
    for line in (CHECKOUT / "deploy/examples/kvportal.env").read_text().splitlines():
        key, equals, value = line.removeprefix("#" if commented else "").partition("=")
        if equals and key.startswith("KVPORTAL_"):
            variables[key] = value
    return variables


def test_every_variable_of_the_example_is_known_and_valid(tmp_path):
    variables = example_variables(commented=True)
    tokens, events = tmp_path / "tokens", tmp_path / "kv.json"
    tokens.write_text("token\n")
    tokens.chmod(0o600)
    events.write_text('{"discovery": {"enabled": true}}')
    variables |= {
        "KVPORTAL_DATA_DIR": str(tmp_path / "var"),
        "KVPORTAL_INTERNAL_API_TOKEN_FILE": str(tokens),
        "KVPORTAL_KV_EVENTS_CONFIG_FILE": str(events),
    }
    assert load_site(variables).https
    config = load_config([], variables)
    assert config.notices == ()
    assert config.etcd_addrs == ("etcd-1.example.com:2379", "etcd-2.example.com:2379")


def test_deployment_checks_are_clean_with_production_settings(tmp_path):
    production = example_variables()
    del production["KVPORTAL_DATA_DIR"]
    done = manage(tmp_path, "check", "--deploy", "--fail-level=DEBUG", **production)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no issues" in done.stdout
