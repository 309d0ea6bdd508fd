"""`serve --check`: a line for everything that the portal needs, tried once."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from streams.simulator import Publisher
from tests.instances.support import closed_port
from tests.serve.portal import CHECKOUT, environment


def check(data_dir: Path, *flags: str, **variables: str) -> tuple[int, list[str]]:
    """Exit status and lines."""
    done = subprocess.run(
        [sys.executable, "manage.py", "serve", "--check", "--http-server-port=0", *flags],
        cwd=CHECKOUT,
        env=environment(data_dir, **variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def test_all_is_well_and_what_an_operator_should_know_is_noted(data_dir):
    status, lines = check(data_dir, "--block-size=64", KVPORTAL_INTERNAL_API_TOKEN="t")
    assert status == 0
    assert lines[0] == "note  --block-size is ignored: the KV events file decides the block size."
    assert [line.split(":")[0] for line in lines[1:]] == ["ok    process", "ok    server", "ok    database"]


def test_an_unmigrated_database_fails(tmp_path):
    status, lines = check(tmp_path / "var")
    assert status == 1
    assert any(line.startswith("FAIL  database: ") and "migrate --noinput" in line for line in lines)
    assert not (tmp_path / "var" / "kvportal.sqlite3").exists()


def test_a_busy_port_fails(data_dir):
    with socket.create_server(("127.0.0.1", 0)) as other:
        status, lines = check(data_dir, f"--http-server-port={other.getsockname()[1]}")
    assert status == 1
    assert any(line.startswith("FAIL  server: cannot listen on ") for line in lines)


def test_each_endpoint_of_static_streams_is_tried(data_dir, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as engine, closed_port() as closed:
        opened = engine.getsockname()[1]
        stream = {
            "instance_name": "a",
            "endpoint": f"tcp://127.0.0.1:{opened}",
            "replay_endpoint": f"tcp://localhost:{closed}",
        }
        path = tmp_path / "kv.json"
        path.write_text(json.dumps({"streams": [stream]}))
        status, lines = check(data_dir, f"--kv-events-config-file={path}")
    assert status == 1
    assert f"ok    stream a/dp0 events tcp://127.0.0.1:{opened}: accepts connections" in lines
    assert f"FAIL  stream a/dp0 replay tcp://localhost:{closed}: no connection: Connection refused" in lines


def test_a_replay_endpoint_is_asked_for_a_snapshot(data_dir, tmp_path):
    with Publisher(topic="kv") as engine, socket.create_server(("127.0.0.1", 0)) as silent:
        mute = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        streams = [
            {"instance_name": "a", "endpoint": engine.endpoint, "replay_endpoint": engine.replay_endpoint},
            {
                "instance_name": "b",
                "endpoint": mute.replace("127.0.0.1", "localhost"),
                "replay_endpoint": mute,
            },
        ]
        path = tmp_path / "kv.json"
        # The engine answers within milliseconds; the other one is waited for.
        path.write_text(json.dumps({"streams": streams, "replay_timeout_ms": 3000}))
        status, lines = check(data_dir, f"--kv-events-config-file={path}")
        assert engine.replay_requests == 1
    assert status == 0
    assert f"ok    stream a/dp0 replay {engine.replay_endpoint}: answers a snapshot request" in lines
    sentence = "accepts TCP but does not answer a snapshot request"
    assert f"warn  stream b/dp0 replay {mute}: {sentence}" in lines


def test_a_file_that_is_no_database_fails(data_dir):
    (data_dir / "kvportal.sqlite3").write_bytes(b"x" * 5000)
    status, lines = check(data_dir)
    assert status == 1
    assert any(
        line.startswith("FAIL  database: the database ") and "cannot be used" in line for line in lines
    )


def test_what_is_away_fails_without_showing_passwords(data_dir):
    with closed_port() as redis, closed_port() as etcd, closed_port() as postgres:
        status, lines = check(
            data_dir,
            "--instance-source=etcd",
            f"--etcd-addr=127.0.0.1:{etcd}",
            KVPORTAL_REDIS_URL=f"redis://:s3cret@127.0.0.1:{redis}/0",
            KVPORTAL_DATABASE_URL=f"postgres://portal:s3cret@127.0.0.1:{postgres}/portal",
            ETCD_USERNAME="portal",
            ETCD_PASSWORD="s3cret",
        )
    assert status == 1
    failed = [line for line in lines if line.startswith("FAIL")]
    assert [line.split(":")[0] for line in failed] == [
        "FAIL  database",
        "FAIL  redis 127.0.0.1",
        "FAIL  etcd 127.0.0.1",
    ]
    assert "s3cret" not in "".join(lines)


def test_what_is_there_is_in_order(data_dir, etcd_server, redis_server):
    status, lines = check(
        data_dir,
        "--instance-source=etcd",
        f"--etcd-addr={etcd_server.endpoint}",
        KVPORTAL_REDIS_URL=redis_server.url,
    )
    assert status == 0
    assert f"ok    etcd {etcd_server.endpoint}: answers" in lines
    assert any(line.startswith("ok    redis ") for line in lines)
