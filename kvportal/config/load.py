"""From a command line and an environment to one `Config`, or to every fault at once."""

from __future__ import annotations

import os
import re
import ssl
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvportal.config.events_file import read_events_file
from kvportal.config.faults import Faults, show
from kvportal.config.flags import BY_NAME, OPTIONS, PREFIX, Option, parse_flags
from kvportal.config.model import Config
from kvportal.config.site import VARIABLES as SITE_VARIABLES
from kvportal.config.values import is_loopback

_TOKEN = re.compile(r"[\x21-\x7e]+")
_HEADER_SAFE = "visible ASCII characters without spaces (it travels in a header)"
_ORCHESTRATED = re.compile(rf"{PREFIX}(SERVICE_|PORT(_|$)|.*_(SERVICE_HOST|SERVICE_PORT.*|PORT(_[0-9].*)?)$)")
"""Variables that Kubernetes sets in every container for a Service named kvportal or kvportal-…"""
_MAX_TOKEN_FILE_BYTES = 64 * 1024


def load_config(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """The configuration that flags and variables give; a flag beats its variable.

    Raises ConfigError with every fault, never at the first.
    """
    faults = Faults()
    return build_config(parse_flags(argv, faults), environ, faults)


def build_config(flag_texts: Mapping[str, str], environ: Mapping[str, str], faults: Faults) -> Config:
    """As `load_config`, from flags that were parsed already; `faults` may hold some."""
    source = _Source(flag_texts, environ, faults)
    values = {option.name: source.read(option) for option in OPTIONS}
    notices: list[str] = _unknown_variables(environ)

    if source.where("block_size") is not None:
        notices.append(f"{source.where('block_size')} is ignored: the KV events file decides the block size.")
    del values["block_size"]
    path = values.pop("kv_events_config_file")
    events = read_events_file(path, source.named("kv_events_config_file"), faults) if path else None
    values["kv_events"] = events
    if events is not None and events.follows_nothing:
        notices.append(
            f"NOTHING IS FOLLOWED: the KV events file {path} neither enables discovery nor names streams."
        )
    values["etcd_addrs"] = values.pop("etcd_addr")
    values["etcd_namespace"] = values["etcd_namespace"].strip("/")
    before = len(faults)
    values["internal_api_tokens"] = _tokens(values, source, notices)
    if not values["internal_api_tokens"] and len(faults) == before:
        _check_exposure(values, source, notices)
    if not is_loopback(values["server_host"]) and not environ.get("KVPORTAL_ALLOWED_HOSTS", "").strip():
        notices.append(
            "KVPORTAL_ALLOWED_HOSTS is not set: browsers on other machines get 400 until it names this host."
        )
    _read_etcd_secrets(values, source)
    faults.raise_if_any()
    return Config(**values, notices=tuple(notices))


@dataclass(frozen=True, slots=True)
class _Source:
    """Where values come from, and where their faults go."""

    flag_texts: Mapping[str, str]
    environ: Mapping[str, str]
    faults: Faults

    def where(self, name: str) -> str | None:
        """The flag or variable that gives `name`; None when neither does. An empty variable is unset."""
        option = BY_NAME[name]
        if name in self.flag_texts:
            return option.spelling
        return option.variable if self.environ.get(option.variable, "").strip() else None

    def named(self, name: str) -> str:
        """As `where`, or the flag (the variable, where there is no flag) that would set it."""
        option = BY_NAME[name]
        return self.where(name) or (option.spelling if option.flag else option.variable)

    def read(self, option: Option) -> Any:
        where = self.where(option.name)
        if where is None:
            return option.default
        text = self.flag_texts.get(option.name)
        return option.kind.read(
            where, self.environ[option.variable] if text is None else text, self.faults, option.default
        )


def _tokens(values: dict[str, Any], source: _Source, notices: list[str]) -> tuple[str, ...]:
    """The token and those in the file, each once, in order."""
    token, path = values.pop("internal_api_token"), values.pop("internal_api_token_file")
    tokens = [token] if token else []
    if token and not _TOKEN.fullmatch(token):
        source.faults.note(source.named("internal_api_token"), "other characters (not shown)", _HEADER_SAFE)
    if "internal_api_token" in source.flag_texts and token:
        notices.append(
            "--internal-api-token shows the token in the process list: "
            "prefer KVPORTAL_INTERNAL_API_TOKEN or --internal-api-token-file."
        )
    if path:
        tokens += _token_file(path, source.named("internal_api_token_file"), source.faults, notices)
    return tuple(dict.fromkeys(tokens))


def _token_file(path: str, where: str, faults: Faults, notices: list[str]) -> list[str]:
    """The tokens of a file (see `token_lines`), all of which must be fit for a header."""
    allowed = "a readable file with one token a line"
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_TOKEN_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        faults.note(where, f"{show(path)} ({reason})", allowed)
        return []
    if stat.S_IMODE(mode) & 0o007:
        notices.append(f"Every user of this machine can open the token file {path}.")
    if len(data) > _MAX_TOKEN_FILE_BYTES:
        faults.note(where, f"{show(path)}, a file over {_MAX_TOKEN_FILE_BYTES:,} bytes", allowed)
        return []
    given = token_lines(data.decode("ascii", "replace"))
    for number, token in given:
        if not _TOKEN.fullmatch(token):
            faults.note(f"{path}: line {number}", "other characters (not shown)", _HEADER_SAFE)
    if not given:
        faults.note(where, f"{show(path)} without a token", allowed)
    return [token for _, token in given]


def token_lines(text: str) -> list[tuple[int, str]]:
    """Each token in the text of a token file, with the number of its line. Empty lines and lines that begin
    with `#` do not count."""
    lines = (line.strip() for line in text.splitlines())
    return [(number, line) for number, line in enumerate(lines, start=1) if line and line[0] != "#"]


def _check_exposure(values: Mapping[str, Any], source: _Source, notices: list[str]) -> None:
    """Without a token, only this machine may reach the API, unless that was asked for."""
    host = values["server_host"]
    if not is_loopback(host) and not values["allow_anonymous_api"]:
        source.faults.note(
            source.named("internal_api_token"),
            f"no token, while other machines reach the host {show(host)}",
            "a token, a loopback host, or --allow-anonymous-api",
        )
    notices.append(
        "NO INTERNAL API TOKEN is set: whoever reaches the port can query, route and change instances. "
        "Set KVPORTAL_INTERNAL_API_TOKEN or --internal-api-token-file."
    )


def _read_etcd_secrets(values: dict[str, Any], source: _Source) -> None:
    """Password and certificates: both halves of a pair or neither, and every file there."""
    user, password = source.environ.get("ETCD_USERNAME", ""), source.environ.get("ETCD_PASSWORD", "")
    values["etcd_username"], values["etcd_password"] = user, password
    if bool(user) != bool(password):
        missing, other = ("ETCD_PASSWORD", "ETCD_USERNAME") if user else ("ETCD_USERNAME", "ETCD_PASSWORD")
        source.faults.note(missing, f"nothing, while {other} is set", "both of them or neither")
    if bool(values["etcd_cert"]) != bool(values["etcd_key"]):
        missing, other = ("etcd_key", "etcd_cert") if values["etcd_cert"] else ("etcd_cert", "etcd_key")
        found = f"nothing, while {source.named(other)} is set"
        source.faults.note(source.named(missing), found, "both of them or neither")
    usable = True
    for name in ("etcd_ca", "etcd_cert", "etcd_key"):
        path = values[name]
        if path and not (Path(path).is_file() and os.access(path, os.R_OK)):
            source.faults.note(source.named(name), show(path), "a readable file")
            usable = False
    if usable:
        _load_certificates(values, source)


def _load_certificates(values: Mapping[str, Any], source: _Source) -> None:
    """Certificates that TLS cannot use are found now, not at the first connection."""
    name = "etcd_ca"
    try:
        context = ssl.create_default_context(cafile=values["etcd_ca"] or None)
        name = "etcd_cert"
        if values["etcd_cert"] and values["etcd_key"]:
            context.load_cert_chain(values["etcd_cert"], values["etcd_key"], password="")
    except (ssl.SSLError, OSError) as error:
        found = f"{show(values[name])} ({error.strerror or error})"
        allowed = (
            "a PEM file" if name == "etcd_ca" else f"a PEM file that fits the key {show(values['etcd_key'])}"
        )
        source.faults.note(source.named(name), found, allowed)


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables that look like ours and are not: most likely a typing error, but not a fault, since
    orchestrators set variables of their own for a service of our name."""
    known = {option.variable for option in OPTIONS} | set(SITE_VARIABLES)
    return [
        f"The variable {name} is not known and has no effect."
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in known and not _ORCHESTRATED.match(name)
    ]
