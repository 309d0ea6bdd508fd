"""Flags and environment: spelling, precedence, kinds, ranges, and faults one line each."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from kvportal.config import Config, ConfigError, KvEventsConfig, load_config
from kvportal.config.flags import FLAGS, OPTIONS
from kvportal.config.site import VARIABLES as SITE_VARIABLES
from kvportal.config.values import spelled
from kvportal.management.commands.serve import Command


def faults_of(argv=(), environ=None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(list(argv), environ or {})
    assert str(caught.value).splitlines() == [str(fault) for fault in caught.value.faults]
    return str(caught.value).splitlines()


def test_nothing_given_means_the_documented_defaults():
    config = load_config([], {})
    assert (config.server_host, config.http_server_port, config.server) == ("127.0.0.1", 8888, "daphne")
    assert config.kv_events is None
    assert (config.load_balance_policy, config.car_prefill_lambda, config.car_host_hit_weight) == (
        "RR",
        0.5,
        0.5,
    )
    assert (config.target_ttft, config.target_tpot) == (1000, 50)
    assert (config.internal_api_tokens, config.allow_anonymous_api) == ((), False)
    assert (config.instance_source, config.etcd_addrs, config.etcd_namespace) == (
        "embedded",
        ("127.0.0.1:2379",),
        "",
    )
    assert (config.instance_delete_probe_timeout_ms, config.instance_delete_probe_attempts) == (1000, 2)
    assert (config.lease_lost_heartbeat_timeout_ms, config.detect_disconnected_instance_interval) == (
        3000,
        15,
    )
    assert (config.max_body_bytes, config.max_query_tokens) == (16 * 1024 * 1024, 262_144)
    assert (config.ready_synchronized_share, config.ready_wait_seconds, config.drain_seconds) == (0.8, 20, 0)


VALUES = {
    "server_host": ("[::1]", "::1"),
    "http_server_port": ("0", 0),
    "server": ("uvicorn", "uvicorn"),
    "load_balance_policy": ("SLO_AWARE", "SLO_AWARE"),
    "car_prefill_lambda": ("0", 0.0),
    "car_host_hit_weight": ("1", 1.0),
    "target_ttft": ("250.5", 250.5),
    "target_tpot": ("20", 20.0),
    "allow_anonymous_api": ("yes", True),
    "instance_source": ("etcd", "etcd"),
    "etcd_namespace": ("//prod-a/", "prod-a"),
    "instance_delete_probe_timeout_ms": ("5", 5),
    "instance_delete_probe_attempts": ("1", 1),
    "lease_lost_heartbeat_timeout_ms": ("7", 7),
    "detect_disconnected_instance_interval": ("0.5", 0.5),
}


@pytest.mark.parametrize(("name", "text", "value"), [(name, *pair) for name, pair in VALUES.items()])
def test_flag_in_both_spellings_and_variable_give_the_same(name, text, value):
    hyphens = "--" + name.replace("_", "-")
    variable = {f"KVPORTAL_{name.upper()}": text}
    for argv in ([hyphens, text], [f"{hyphens}={text}"], [f"--{name}", text], [f"--{name}={text}"]):
        assert getattr(load_config(argv, {}), name) == value
    assert getattr(load_config([], variable), name) == value


def test_every_flag_of_the_interface_exists():
    documented = """
        server-host http-server-port server kv-events-config-file load-balance-policy car-prefill-lambda
        car-host-hit-weight target-ttft target-tpot internal-api-token internal-api-token-file
        allow-anonymous-api block-size instance-source etcd-addr etcd-namespace
        instance-delete-probe-timeout-ms instance-delete-probe-attempts lease-lost-heartbeat-timeout-ms
        detect-disconnected-instance-interval
        """
    assert {option.spelling for option in FLAGS} == {f"--{name}" for name in documented.split()}


def test_a_flag_beats_its_variable_even_when_it_is_empty(tmp_path):
    path = tmp_path / "kv.json"
    path.write_text("{}")
    environ = {"KVPORTAL_HTTP_SERVER_PORT": "1", "KVPORTAL_KV_EVENTS_CONFIG_FILE": str(path)}
    assert load_config([], environ).kv_events == KvEventsConfig()
    config = load_config(["--http-server-port=2", "--kv-events-config-file="], environ)
    assert (config.http_server_port, config.kv_events) == (2, None)


def test_an_empty_variable_is_one_that_is_not_set():
    assert load_config([], {"KVPORTAL_HTTP_SERVER_PORT": " ", "KVPORTAL_ETCD_ADDR": ""}) == Config()


def test_underscores_in_a_value_stay(tmp_path):
    path = tmp_path / "a_b.json"
    path.write_text('{"max_streams": 7}')
    assert load_config([f"--kv_events_config_file={path}"], {}).kv_events.limits.max_streams == 7


WRONG = [
    ("http_server_port", "65536", "an integer from 0 to 65535"),
    ("http_server_port", "-1", "an integer from 0 to 65535"),
    ("http_server_port", "80.0", "an integer from 0 to 65535"),
    ("http_server_port", "8_0", "an integer from 0 to 65535"),
    ("http_server_port", "٨٠", "an integer from 0 to 65535"),
    ("http_server_port", "true", "an integer from 0 to 65535"),
    ("server_host", "a b", "an IP address or a host name"),
    ("server_host", "127.0.0.256", "an IP address or a host name"),
    ("server", "gunicorn", "daphne or uvicorn"),
    ("load_balance_policy", "rr", "RR, CAR or SLO_AWARE"),
    ("car_prefill_lambda", "nan", "a number from 0 to 1"),
    ("car_prefill_lambda", "inf", "a number from 0 to 1"),
    ("car_prefill_lambda", "1.0001", "a number from 0 to 1"),
    ("car_prefill_lambda", "-0.1", "a number from 0 to 1"),
    ("car_host_hit_weight", "half", "a number from 0 to 1"),
    ("target_ttft", "0", "a finite number above 0"),
    ("target_tpot", "inf", "a finite number above 0"),
    ("target_tpot", "nan", "a finite number above 0"),
    ("target_tpot", "٨٠", "a finite number above 0"),
    ("allow_anonymous_api", "maybe", "true or false"),
    ("instance_source", "zookeeper", "embedded or etcd"),
    ("etcd_addr", "localhost", "host:port of each etcd member"),
    ("etcd_addr", ",", "host:port of each etcd member"),
    ("etcd_addr", "a:1,,b:2", "host:port of each etcd member"),
    ("etcd_addr", "a:1,", "host:port of each etcd member"),
    ("etcd_addr", " ,a:1", "host:port of each etcd member"),
    ("etcd_addr", "a:2379,b", "host:port of each etcd member"),
    ("etcd_addr", "a:0", "host:port of each etcd member"),
    ("etcd_addr", "::1:2379", "host:port of each etcd member"),
    ("etcd_namespace", "a\tb", "printable text"),
    ("instance_delete_probe_timeout_ms", "0", "an integer from 1 to"),
    ("instance_delete_probe_attempts", "0", "an integer from 1 to"),
    ("lease_lost_heartbeat_timeout_ms", "99999999999999999999999", "an integer from 1 to"),
    ("detect_disconnected_instance_interval", "0", "a number"),
]


@pytest.mark.parametrize(("name", "text", "allowed"), WRONG)
def test_a_wrong_value_is_named_by_flag_or_variable(name, text, allowed):
    flag, variable = "--" + name.replace("_", "-"), f"KVPORTAL_{name.upper()}"
    for where, given in ((flag, ([f"--{name}={text}"], {})), (variable, ([], {variable: text}))):
        [fault] = faults_of(*given)
        assert fault.startswith(f"{where}: found {text!r}; allowed: ")
        assert allowed in fault


@pytest.mark.parametrize("text", ["", " "])
@pytest.mark.parametrize("source", ["embedded", "etcd"])
def test_a_flag_cannot_take_all_etcd_members_away(source, text):
    [fault] = faults_of([f"--instance-source={source}", "--etcd-addr", text])
    assert fault.startswith(f"--etcd-addr: found {text!r}; allowed: host:port of each etcd member")


# An empty flag says "none" where there is such a thing.
MAY_BE_EMPTY = {
    "kv_events_config_file", "internal_api_token", "internal_api_token_file", "block_size", "etcd_namespace",
}  # fmt: skip


@pytest.mark.parametrize("option", FLAGS, ids=lambda option: option.name)
def test_an_empty_flag_is_a_fault_unless_it_means_none(option):
    if option.name in MAY_BE_EMPTY:
        load_config([option.spelling, ""], {})
    else:
        [fault] = faults_of([option.spelling, ""])
        assert fault == f"{option.spelling}: found ''; allowed: {option.kind.allowed}"


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("KVPORTAL_MAX_BODY_BYTES", "0"),
        ("KVPORTAL_MAX_QUERY_TOKENS", "many"),
        ("KVPORTAL_READY_SYNCHRONIZED_SHARE", "80"),
        ("KVPORTAL_READY_WAIT_SECONDS", "-1"),
        ("KVPORTAL_DRAIN_SECONDS", "nan"),
        ("KVPORTAL_DECISION_RETENTION_ROWS", "0"),
        ("KVPORTAL_HISTORY_RETENTION_DAYS", "0"),
        ("KVPORTAL_DECISION_EXPLAIN_SHARE", "2"),
        ("KVPORTAL_RECORD_PROMPTS", "perhaps"),
        ("KVPORTAL_ETCD_CA", "/nowhere/ca.pem"),
    ],
)
def test_variables_without_a_flag_are_checked_too(variable, text):
    [fault] = faults_of((), {variable: text})
    assert fault.startswith(f"{variable}: found '{text}'")
    name = variable.removeprefix("KVPORTAL_").lower()
    assert faults_of([f"--{name}", text])[0].startswith(f"--{name.replace('_', '-')}: found an unknown flag")


def test_every_fault_of_flags_variables_and_file_is_reported_at_once(tmp_path):
    path = tmp_path / "kv.json"
    path.write_text('{"max_streams": 0, "other": 1}')
    faults = faults_of(
        ["word", "--kv-events-config-file", str(path), "--server", "x", "--server-hots=::", "--target-ttft"],
        {"KVPORTAL_CAR_PREFILL_LAMBDA": "2", "ETCD_USERNAME": "portal"},
    )
    assert {fault.split(": found")[0] for fault in faults} == {
        "--server-hots",
        "--target-ttft",
        "command line",
        "--server",
        "KVPORTAL_CAR_PREFILL_LAMBDA",
        str(path),
        f"{path}: max_streams",
        "ETCD_PASSWORD",
    }
    assert len(faults) == 8


def test_an_unknown_flag_is_answered_with_the_nearest_one():
    [fault] = faults_of(["--http-sever-port=80"])
    assert fault.startswith("--http-sever-port: found an unknown flag")
    assert "did you mean --http-server-port?" in fault


def test_the_value_of_a_mistyped_flag_is_not_shown():
    for argv in (["--internal-api-tokn", "s3cret"], ["--internal-api-tokn=s3cret"]):
        [fault] = faults_of(argv)
        assert "did you mean --internal-api-token?" in fault
        assert "s3cret" not in fault


def test_flags_are_not_abbreviated():
    [fault] = faults_of(["--car-prefill", "0.5"])
    assert fault.startswith("--car-prefill: found an unknown flag")


@pytest.mark.parametrize(
    "option", [option for option in FLAGS if not option.switch], ids=lambda option: option.name
)
def test_a_flag_without_its_value_is_a_fault(option):
    [fault] = faults_of([option.spelling])
    assert fault == f"{option.spelling}: found no value; allowed: {option.kind.allowed}"


def test_faults_stay_on_their_lines_whatever_they_quote():
    assert len(faults_of(["--server-host=a\nb", "--etcd-namespace=a\r\nb\u2028c"])) == 2


class TestTokens:
    def test_variable_and_flag_give_one_token(self):
        assert load_config([], {"KVPORTAL_INTERNAL_API_TOKEN": "abc"}).internal_api_tokens == ("abc",)
        assert load_config(["--internal-api-token=abc"], {}).internal_api_tokens == ("abc",)

    def test_a_file_gives_several_one_a_line(self, tmp_path):
        path = tmp_path / "tokens"
        path.write_text("new\n\n  old  \r\nnew\n")
        path.chmod(0o600)
        config = load_config([f"--internal-api-token-file={path}"], {})
        assert config.internal_api_tokens == ("new", "old")
        assert config.notices == ()

    def test_token_and_file_together_are_all_valid(self, tmp_path):
        path = tmp_path / "tokens"
        path.write_text("b\n")
        environ = {"KVPORTAL_INTERNAL_API_TOKEN_FILE": str(path), "KVPORTAL_INTERNAL_API_TOKEN": "a"}
        assert load_config([], environ).internal_api_tokens == ("a", "b")

    def test_lines_of_a_file_that_begin_with_a_hash_are_comments(self, tmp_path):
        path = tmp_path / "tokens"
        path.write_text("# since May: two words, umlaut \u00e4\nnew\n  #old\nwith#hash\n")
        assert load_config([f"--internal-api-token-file={path}"], {}).internal_api_tokens == (
            "new",
            "with#hash",
        )

    def test_the_help_tells_how_tokens_are_read_and_which_are_valid(self):
        told = {option.name: option.help for option in OPTIONS}
        assert "read at start" in told["internal_api_token_file"]
        assert "--internal-api-token" in told["internal_api_token_file"]
        assert "# begins a comment line" in told["internal_api_token_file"]
        assert "valid beside those of the file" in told["internal_api_token"]

    @pytest.mark.parametrize("content", ["", "\n \n", "# none yet\n#\n"])
    def test_a_file_without_a_token_does_not_open_the_api(self, tmp_path, content):
        path = tmp_path / "tokens"
        path.write_text(content)
        [fault] = faults_of([f"--internal-api-token-file={path}"])
        assert fault.endswith("without a token; allowed: a readable file with one token a line")

    def test_a_file_that_is_too_long_is_refused_whole(self, tmp_path):
        path = tmp_path / "tokens"
        path.write_text("token\n" * 20_000)
        [fault] = faults_of([f"--internal-api-token-file={path}"])
        assert "a file over 65,536 bytes" in fault

    def test_a_missing_file_does_not_open_the_api(self, tmp_path):
        [fault] = faults_of([f"--internal-api-token-file={tmp_path}/none", "--server-host=0.0.0.0"])
        assert fault.startswith("--internal-api-token-file: found")

    @pytest.mark.parametrize("token", ["two words", "snowman☃", "tab\tbed"])
    def test_a_token_that_fits_no_header_is_refused_without_being_shown(self, tmp_path, token):
        path = tmp_path / "tokens"
        path.write_text(f"fine\n{token}\n")
        for fault in faults_of([f"--internal-api-token={token}"]) + faults_of(
            [f"--internal-api-token-file={path}"]
        ):
            assert token not in fault
            assert "visible ASCII" in fault

    def test_no_token_appears_in_the_representation_or_the_notices(self, tmp_path):
        path = tmp_path / "tokens"
        path.write_text("s3cret-b\n")
        argv = ["--internal-api-token=s3cret-a", f"--internal-api-token-file={path}"]
        environ = {"ETCD_USERNAME": "u", "ETCD_PASSWORD": "s3cret-c"}
        config = load_config(argv, environ)
        assert "s3cret" not in repr(config)
        assert "s3cret" not in "".join(config.notices)
        assert any("process list" in notice for notice in config.notices)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_no_token_on_loopback_is_allowed_and_said(host):
    config = load_config(["--server-host", host], {})
    assert any("NO INTERNAL API TOKEN" in notice for notice in config.notices)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "portal.example"])
def test_no_token_beyond_loopback_is_refused_unless_asked_for(host):
    [fault] = faults_of(["--server-host", host])
    assert fault.startswith("--internal-api-token: found no token")
    assert "--allow-anonymous-api" in fault
    for argv in (["--allow-anonymous-api"], ["--allow_anonymous_api=true"]):
        config = load_config(["--server-host", host, *argv], {})
        assert any("NO INTERNAL API TOKEN" in notice for notice in config.notices)
    assert load_config(["--server-host", host], {"KVPORTAL_INTERNAL_API_TOKEN": "t"}).internal_api_tokens == (
        "t",
    )
    assert faults_of(["--server-host", host, "--allow-anonymous-api=no"])
    assert faults_of(["--server-host", host, "--internal-api-token-file=", "--internal-api-token="])


def test_the_exposure_is_reported_beside_other_faults():
    faults = faults_of(["--server-host=0.0.0.0", "--target-ttft=x"])
    assert len(faults) == 2


def test_block_size_is_accepted_ignored_and_said():
    config = load_config(["--block-size", "64"], {})
    assert any("--block-size is ignored" in notice for notice in config.notices)
    assert any("KVPORTAL_BLOCK_SIZE" in n for n in load_config([], {"KVPORTAL_BLOCK_SIZE": "x"}).notices)
    assert not any("BLOCK" in notice.upper() for notice in load_config([], {}).notices)


def test_several_etcd_members_are_taken_in_order():
    config = load_config(["--etcd-addr", "10.0.0.1:2379, etcd-b:2379,[::1]:2379"], {})
    assert config.etcd_addrs == ("10.0.0.1:2379", "etcd-b:2379", "[::1]:2379")


@pytest.mark.parametrize("namespace", ["/", "///", ""])
def test_a_namespace_of_slashes_only_is_none(namespace):
    assert load_config([f"--etcd-namespace={namespace}"], {}).etcd_namespace == ""


@pytest.mark.parametrize("half", ["ETCD_USERNAME", "ETCD_PASSWORD"])
def test_half_of_the_etcd_login_is_refused_without_showing_it(half):
    [fault] = faults_of((), {half: "s3cret"})
    assert "both of them or neither" in fault
    assert half in fault
    assert "s3cret" not in fault


def test_both_halves_of_the_etcd_login_are_taken():
    config = load_config([], {"ETCD_USERNAME": "u", "ETCD_PASSWORD": "p"})
    assert (config.etcd_username, config.etcd_password) == ("u", "p")


def pem_files(directory: Path, name: str) -> tuple[str, str]:
    """A self-signed certificate and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    paths = directory / f"{name}.pem", directory / f"{name}.key"
    paths[0].write_bytes(certificate.public_bytes(Encoding.PEM))
    paths[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return str(paths[0]), str(paths[1])


def test_certificates_that_tls_cannot_use_are_faults(tmp_path):
    certificate, key = pem_files(tmp_path, "a")
    _, foreign_key = pem_files(tmp_path, "b")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("x")
    [fault] = faults_of((), {"KVPORTAL_ETCD_CA": str(nonsense)})
    assert fault.startswith(f"KVPORTAL_ETCD_CA: found '{nonsense}' (")
    [fault] = faults_of((), {"KVPORTAL_ETCD_CERT": certificate, "KVPORTAL_ETCD_KEY": foreign_key})
    assert fault.startswith(f"KVPORTAL_ETCD_CERT: found '{certificate}' (")
    assert (
        load_config([], {"KVPORTAL_ETCD_CERT": certificate, "KVPORTAL_ETCD_KEY": key}).etcd_cert
        == certificate
    )


def test_every_file_for_etcd_that_cannot_be_read_is_a_fault_of_its_own(tmp_path):
    environ = {
        "KVPORTAL_ETCD_CA": str(tmp_path),
        "KVPORTAL_ETCD_CERT": str(tmp_path / "none.pem"),
        "KVPORTAL_ETCD_KEY": str(tmp_path / "none.key"),
    }
    faults = faults_of(["--instance-source=etcd"], environ)
    assert faults == [f"{name}: found {path!r}; allowed: a readable file" for name, path in environ.items()]


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END"])
@pytest.mark.parametrize("damaged", ["etcd_ca", "etcd_cert", "etcd_key"])
def test_a_file_for_etcd_that_is_no_pem_file_is_a_fault(tmp_path, damaged, content):
    certificate, key = pem_files(tmp_path, "a")
    paths = {"etcd_ca": certificate, "etcd_cert": certificate, "etcd_key": key}
    bad = tmp_path / "bad.pem"
    bad.write_bytes(content)
    environ = {f"KVPORTAL_{name.upper()}": path for name, path in (paths | {damaged: str(bad)}).items()}
    [fault] = faults_of(["--instance-source=etcd"], environ)
    named = "KVPORTAL_ETCD_CA" if damaged == "etcd_ca" else "KVPORTAL_ETCD_CERT"
    assert fault.startswith(f"{named}: found ")
    assert str(bad) in fault


def test_certificate_and_key_belong_together(tmp_path):
    path, key = pem_files(tmp_path, "a")
    [fault] = faults_of((), {"KVPORTAL_ETCD_CERT": str(path)})
    assert fault.startswith("KVPORTAL_ETCD_KEY: found nothing, while KVPORTAL_ETCD_CERT is set")
    both = {"KVPORTAL_ETCD_CERT": str(path), "KVPORTAL_ETCD_KEY": key, "KVPORTAL_ETCD_CA": str(path)}
    assert load_config([], both).etcd_key == key


def test_a_mistyped_variable_is_said_but_those_of_an_orchestrator_are_not():
    environ = {
        "KVPORTAL_INTERNAL_API_TOKN": "s3cret",
        "KVPORTAL_SERVICE_HOST": "10.0.0.1",
        "KVPORTAL_SERVICE_PORT_HTTP": "8888",
        "KVPORTAL_PORT": "tcp://10.0.0.1:8888",
        "KVPORTAL_PORT_8888_TCP_ADDR": "10.0.0.1",
        "KVPORTAL_REDIS_SERVICE_HOST": "10.0.0.2",
        "KVPORTAL_REDIS_PORT_6379_TCP": "tcp://10.0.0.2:6379",
        "KVPORTAL_ALLOWED_HOSTS": "portal",
    }
    unknown = [notice for notice in load_config([], environ).notices if "not known" in notice]
    assert len(unknown) == 1
    assert "KVPORTAL_INTERNAL_API_TOKN" in unknown[0]
    assert "s3cret" not in unknown[0]


def test_the_events_file_becomes_part_of_the_configuration(tmp_path):
    path = tmp_path / "kv.json"
    path.write_text(json.dumps({"discovery": {"enabled": True}, "max_streams": 3}))
    config = load_config([], {"KVPORTAL_KV_EVENTS_CONFIG_FILE": str(path)})
    assert config.kv_events is not None
    assert config.kv_events.discovery is not None
    assert config.kv_events.discovery.enabled
    assert config.kv_events.limits.max_streams == 3


@pytest.mark.parametrize(
    "document", [{}, {"streams": []}, {"discovery": {}}, {"discovery": {"enabled": False}}]
)
def test_an_events_file_that_follows_nothing_is_said(tmp_path, document):
    path = tmp_path / "kv.json"
    path.write_text(json.dumps(document))
    config = load_config([f"--kv-events-config-file={path}"], {"KVPORTAL_INTERNAL_API_TOKEN": "t"})
    assert config.notices == (
        f"NOTHING IS FOLLOWED: the KV events file {path} neither enables discovery nor names streams.",
    )


def test_a_configuration_cannot_be_changed():
    config = load_config([], {})
    with pytest.raises(AttributeError):
        config.server_host = "x"  # type: ignore[misc]


def test_option_names_are_unique():
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)


def test_the_help_tells_every_default_and_variable():
    text = " ".join(Command().create_parser("manage.py", "serve").format_help().split())
    for option in OPTIONS:
        assert option.variable in text
        assert option.described in text
    assert "port to listen on; 0: the system chooses (default: 8888) [KVPORTAL_HTTP_SERVER_PORT]" in text
    assert (
        "etcd members, host:port, separated by commas (default: 127.0.0.1:2379) [KVPORTAL_ETCD_ADDR]" in text
    )
    assert "(default: false) [KVPORTAL_ALLOW_ANONYMOUS_API]" in text
    assert "KVPORTAL_DRAIN_SECONDS time of 503 on /readyz before the port closes (default: 0)" in text
    assert all(name in text for name in SITE_VARIABLES)


@pytest.mark.parametrize(
    "option", [option for option in OPTIONS if spelled(option.default)], ids=lambda option: option.name
)
def test_a_default_that_is_shown_is_the_one_that_is_in_force(option):
    given = {option.variable: spelled(option.default)}
    changed = dataclasses.replace(load_config([], given), notices=())
    assert changed == dataclasses.replace(load_config([], {}), notices=())
