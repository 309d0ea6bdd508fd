"""The options of `manage.py serve`: one table for flags, environment variables and `--help`."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvportal.config.faults import Faults, show
from kvportal.config.model import Config
from kvportal.config.site import VARIABLES as SITE_VARIABLES
from kvportal.config.values import Kind, boolean, choice, integer, is_host, names, number, spelled, text_of

PREFIX = "KVPORTAL_"
MAX_MS = 2**31 - 1
"""Longest time in ms: what a 32-bit poll timeout holds, 24 days."""
_NO_VALUE = "\0no value"
_DEFAULTS = {field.name: field.default for field in fields(Config)}
_FIELD_NAMES = {"etcd_addr": "etcd_addrs"}
"""Fields of `Config` that are not named after their option."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `name` is its key in the table, its flag with hyphens, its variable in capitals."""

    name: str
    kind: Kind[Any]
    help: str
    flag: bool = True
    """False: only the environment sets it."""
    switch: bool = False
    """The flag alone, without a value, means true."""

    @property
    def spelling(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def default(self) -> Any:
        """That of `Config`; empty text for the few options that are no field of it."""
        return _DEFAULTS.get(_FIELD_NAMES.get(self.name, self.name), "")

    @property
    def described(self) -> str:
        """What it is, and what holds when nobody sets it."""
        return f"{self.help} (default: {spelled(self.default) or 'none'})"


def _host(text: str) -> str:
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not is_host(host):
        raise ValueError
    return host


def _is_etcd_addr(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host.replace(":", "/")
    return (
        bool(colon)
        and is_host(host)
        and re.fullmatch("[0-9]{1,5}", port) is not None
        and 0 < int(port) < 65536
    )


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError
    return text


SHARE = number(0, 1)
DAYS = number(0, 36_500, above=True)

OPTIONS = (
    Option("server_host", Kind("an IP address or a host name to listen on", _host), "address to listen on"),
    Option("http_server_port", integer(0, 65535), "port to listen on; 0: the system chooses"),
    Option("server", choice("daphne", "uvicorn"), "ASGI server; uvicorn is an optional extra"),
    Option("kv_events_config_file", text_of(), "KV events file (JSON); empty: the index is off"),
    Option("load_balance_policy", choice("RR", "CAR", "SLO_AWARE"), "routing policy: RR, CAR or SLO_AWARE"),
    Option("car_prefill_lambda", SHARE, "CAR: weight of the cache miss against the queue, 0 to 1"),
    Option("car_host_hit_weight", SHARE, "CAR: worth of a Host-only hit against a Device hit, 0 to 1"),
    Option("target_ttft", number(0, above=True), "SLO_AWARE: target time to first token, ms"),
    Option("target_tpot", number(0, above=True), "SLO_AWARE: target time per output token, ms"),
    Option(
        "internal_api_token",
        text_of(secret=True),
        "token that /v1/internal/ asks for; valid beside those of the file; prefer the variable or a file: "
        "command lines can be read",
    ),
    Option(
        "internal_api_token_file",
        text_of(),
        "file with one token a line (# begins a comment line), read at start; each of them is valid, and so "
        "is that of --internal-api-token",
    ),
    Option(
        "allow_anonymous_api",
        boolean(),
        "serve without a token although other machines reach the address",
        switch=True,
    ),
    Option("block_size", text_of(), "accepted and ignored: the KV events file decides"),
    Option("instance_source", choice("embedded", "etcd"), "where instances register: embedded or etcd"),
    Option(
        "etcd_addr",
        names("host:port of each etcd member, separated by commas", _is_etcd_addr),
        "etcd members, host:port, separated by commas",
    ),
    Option("etcd_namespace", Kind("printable text", _printable), "prefix of all keys in etcd"),
    Option("instance_delete_probe_timeout_ms", integer(1, MAX_MS), "time for one /health probe, ms"),
    Option("instance_delete_probe_attempts", integer(1, 100), "/health probes after a deletion"),
    Option(
        "lease_lost_heartbeat_timeout_ms", integer(1, MAX_MS), "LEASE_LOST to SUSPECT without heartbeat, ms"
    ),
    Option("detect_disconnected_instance_interval", number(0, 86_400, above=True), "SUSPECT to removed, s"),
    Option("max_body_bytes", integer(1, 2**40), "largest request body", flag=False),
    Option("max_query_tokens", integer(1, 2**31), "most token IDs in a request", flag=False),
    Option("ready_synchronized_share", SHARE, "share of streams /readyz waits for", flag=False),
    Option("ready_wait_seconds", number(0, 86_400), "longest wait of /readyz for streams", flag=False),
    Option("drain_seconds", number(0, 3600), "time of 503 on /readyz before the port closes", flag=False),
    Option(
        "request_expiry_seconds", number(0, 86_400 * 7, above=True), "life of an open request", flag=False
    ),
    Option("history_retention_days", DAYS, "age limit of state changes", flag=False),
    Option("history_retention_rows", integer(1, 2**40), "most state changes kept", flag=False),
    Option("audit_retention_days", DAYS, "age limit of resync orders", flag=False),
    Option("audit_retention_rows", integer(1, 2**40), "most resync orders kept", flag=False),
    Option(
        "replica_retention_hours", number(0, 24 * 366, above=True), "how long gone replicas show", flag=False
    ),
    Option("decision_retention_days", DAYS, "age limit of decisions", flag=False),
    Option("decision_retention_rows", integer(1, 2**40), "most decisions kept", flag=False),
    Option("decision_explain_share", SHARE, "share of decisions explained in full", flag=False),
    Option("record_prompts", boolean(), "store token IDs for the routing lab", flag=False),
    Option("record_prompts_limit", integer(1, 1_000_000), "most prompts stored", flag=False),
    Option(
        "record_prompts_hours", number(0, 24 * 366, above=True), "age limit of stored prompts", flag=False
    ),
    Option(
        "replica_name",
        Kind("printable text", _printable),
        "name among replicas; none: host and port",
        flag=False,
    ),
    Option("etcd_ca", text_of(), "file of etcd's certificate authority", flag=False),
    Option("etcd_cert", text_of(), "file of our certificate for etcd", flag=False),
    Option("etcd_key", text_of(), "file of our key for etcd", flag=False),
)
FLAGS = tuple(option for option in OPTIONS if option.flag)
BY_NAME = {option.name: option for option in OPTIONS}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declares every flag as plain text, so that faults are found later, all of them at once."""
    for option in FLAGS:
        parser.add_argument(
            option.spelling,
            dest=option.name,
            nargs="?",
            const="true" if option.switch else _NO_VALUE,
            metavar="BOOL" if option.switch else "VALUE",
            help=f"{option.described} [{option.variable}]".replace("%", "%%"),
        )


def variables_help() -> str:
    """The lines of `--help` about what the environment sets."""
    unflagged = [option for option in OPTIONS if not option.flag]
    width = max(len(option.variable) for option in unflagged)
    return "\n".join(
        [
            "Each flag can be given by the variable in brackets instead; a flag beats its variable.",
            "",
            "variables without a flag:",
            *(f"  {option.variable:{width}}  {option.described}" for option in unflagged),
            "",
            "variables for the login at etcd: ETCD_USERNAME and ETCD_PASSWORD (both or neither)",
            "",
            "variables that every command reads:",
            *(
                f"  {name:{width}}  {kind.allowed} (default: {spelled(default) or 'none'})"
                for name, (kind, default) in SITE_VARIABLES.items()
            ),
        ]
    )


def hyphenated(argv: Sequence[str]) -> list[str]:
    """`--kv_events_config_file=x_y` as `--kv-events-config-file=x_y`; other words as they are."""
    words = []
    for word in argv:
        flag, equals, value = word.partition("=")
        words.append(flag.replace("_", "-") + equals + value if word.startswith("--") else word)
    return words


def _refuse(left_over: Sequence[str], faults: Faults) -> None:
    """A word behind an unknown flag is its value: not shown, it may be a secret."""
    spellings = [option.spelling for option in FLAGS]
    behind_flag = False
    for word in left_over:
        flag = word.partition("=")[0]
        close = difflib.get_close_matches(flag, spellings, n=1)
        if flag.startswith("-"):
            hint = f"; did you mean {close[0]}?" if close else " (manage.py serve --help lists them)"
            faults.note(flag, "an unknown flag", f"the flags of serve{hint}")
        elif not behind_flag:
            faults.note("command line", f"the word {show(word)}", "flags and their values only")
        behind_flag = word.startswith("-") and "=" not in word


def flag_texts(parsed: Mapping[str, Any], left_over: Sequence[str], faults: Faults) -> dict[str, str]:
    """The texts that flags gave, by option name; what no flag took becomes a fault."""
    _refuse(left_over, faults)
    texts = {}
    for option in FLAGS:
        text = parsed.get(option.name)
        if text == _NO_VALUE:
            faults.note(option.spelling, "no value", option.kind.allowed)
        elif text is not None:
            texts[option.name] = str(text)
    return texts


def parse_flags(argv: Sequence[str], faults: Faults) -> dict[str, str]:
    """The flags of a command line without Django's own options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    parsed, left_over = parser.parse_known_args(hyphenated(argv))
    return flag_texts(vars(parsed), left_over, faults)
