"""Environment that Django's settings need: data directory, secret key, database, hosts, cookies.

Read once, when the settings are imported. Nothing here has a flag.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import dj_database_url

from kvportal.config.faults import Faults, SettingsError, show
from kvportal.config.values import Kind, boolean, choice, integer, names, text_of

T = TypeVar("T")

CHECKOUT = Path(__file__).resolve().parents[2]
SECRET_KEY_FILE = "secret-key"  # noqa: S105 - a file's name
SHORTEST_SECRET_KEY = 50
"""Characters; below that Django's deployment checks complain."""
SQLITE_BUSY_SECONDS = 20
POSTGRES_CONNECT_SECONDS = 5
REDIS_SOCKET_SECONDS = 20
"""Above the 5 s for which the channel layer has Redis wait for a message. The client's own default is the
same 5 s: an idle worker took Redis for dead, again and again."""
_PRAGMAS = "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA foreign_keys=ON;"
_DATABASE_ALLOWED = "sqlite:////absolute/path or postgres://user:password@host:port/name"
_REDIS_ALLOWED = "redis://host:port/0, rediss://host:port/0 or unix:///path"
_HEADER = re.compile(r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Site:
    """The validated environment of one installation."""

    data_dir: Path
    secret_key: str = field(repr=False)
    database: dict[str, Any] = field(repr=False)
    redis_url: str = field(repr=False)
    allowed_hosts: tuple[str, ...]
    csrf_trusted_origins: tuple[str, ...]
    https: bool
    hsts_seconds: int
    proxy_tls_header: str
    static_root: Path | None
    debug: bool
    log_level: str

    @property
    def channel_layer(self) -> dict[str, Any]:
        """The way between replicas, as Django Channels wants it described."""
        if not self.redis_url:
            return {"BACKEND": "channels.layers.InMemoryChannelLayer"}
        host = {"address": self.redis_url, "socket_timeout": REDIS_SOCKET_SECONDS}
        return {"BACKEND": "channels_redis.core.RedisChannelLayer", "CONFIG": {"hosts": [host]}}


VARIABLES: dict[str, tuple[Kind[Any], Any]] = {
    "KVPORTAL_DATA_DIR": (text_of("a directory"), str(CHECKOUT / "var")),
    "KVPORTAL_SECRET_KEY": (
        text_of("at least 50 characters; none: one is made and kept in the data directory", secret=True),
        "",
    ),
    "KVPORTAL_DATABASE_URL": (
        text_of(f"{_DATABASE_ALLOWED}; none: SQLite in the data directory", secret=True),
        "",
    ),
    "KVPORTAL_REDIS_URL": (
        text_of(f"{_REDIS_ALLOWED}; none: in memory, for one replica", secret=True),
        "",
    ),
    "KVPORTAL_ALLOWED_HOSTS": (
        names(
            "host names separated by commas, without scheme or port", lambda name: not set(name) & set("/ @")
        ),
        ("localhost", "127.0.0.1", "[::1]"),
    ),
    "KVPORTAL_CSRF_TRUSTED_ORIGINS": (
        names(
            "origins separated by commas, each with its scheme (https://portal.example.com)",
            lambda origin: urlsplit(origin).scheme in ("http", "https") and bool(urlsplit(origin).netloc),
        ),
        (),
    ),
    "KVPORTAL_HTTPS": (boolean(), False),
    "KVPORTAL_HSTS_SECONDS": (integer(0, 2**31 - 1), 3600),
    "KVPORTAL_PROXY_TLS_HEADER": (
        Kind(
            "the name of a header, such as X-Forwarded-Proto, that the proxy always sets",
            lambda text: _header(text),
        ),
        "",
    ),
    "KVPORTAL_STATIC_ROOT": (text_of("a directory that collectstatic has filled"), ""),
    "KVPORTAL_DEBUG": (boolean(), False),
    "KVPORTAL_LOG_LEVEL": (choice("DEBUG", "INFO", "WARNING", "ERROR"), "INFO"),
}
"""Each variable with its kind and its default."""


def load_site(environ: Mapping[str, str]) -> Site:
    """Reads the environment, creates the data directory and the secret key where needed.

    Raises SettingsError with every fault.
    """
    faults = Faults()

    def read(name: str) -> Any:
        kind, default = VARIABLES[name]
        text = environ.get(name, "")
        return kind.read(name, text, faults, default) if text.strip() else default

    data_dir = Path(read("KVPORTAL_DATA_DIR")).expanduser().absolute()
    usable = _prepare_data_dir(data_dir, faults)
    static_root = read("KVPORTAL_STATIC_ROOT")
    site = Site(
        data_dir=data_dir,
        secret_key=_secret_key(read("KVPORTAL_SECRET_KEY"), data_dir if usable else None, faults),
        database=_database(read("KVPORTAL_DATABASE_URL"), data_dir, faults),
        redis_url=_redis_url(read("KVPORTAL_REDIS_URL"), faults),
        allowed_hosts=read("KVPORTAL_ALLOWED_HOSTS"),
        csrf_trusted_origins=read("KVPORTAL_CSRF_TRUSTED_ORIGINS"),
        https=read("KVPORTAL_HTTPS"),
        hsts_seconds=read("KVPORTAL_HSTS_SECONDS"),
        proxy_tls_header=read("KVPORTAL_PROXY_TLS_HEADER"),
        static_root=Path(static_root).absolute() if static_root else None,
        debug=read("KVPORTAL_DEBUG"),
        log_level=read("KVPORTAL_LOG_LEVEL"),
    )
    faults.raise_if_any(SettingsError)
    return site


def _header(text: str) -> str:
    if not _HEADER.fullmatch(text):
        raise ValueError
    return text


def _prepare_data_dir(path: Path, faults: Faults) -> bool:
    """Creates the directory for its owner alone; tightens one of ours that is open to others."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        if stat.S_IMODE(found.st_mode) & 0o077 and found.st_uid == os.geteuid():
            path.chmod(0o700)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError("not writable")
    except OSError as error:
        faults.note(
            "KVPORTAL_DATA_DIR", f"{show(str(path))} ({error.strerror or error})", "a writable directory"
        )
        return False
    return True


def _secret_key(given: str, data_dir: Path | None, faults: Faults) -> str:
    """The given key, or the one that is kept in the data directory and made at the first start."""
    if given:
        if len(given) < SHORTEST_SECRET_KEY:
            faults.note(
                "KVPORTAL_SECRET_KEY",
                f"{len(given)} characters",
                f"at least {SHORTEST_SECRET_KEY} characters",
            )
        return given
    if data_dir is None:
        return ""
    path = data_dir / SECRET_KEY_FILE
    try:
        _create_secret(path)
        key = path.read_text(encoding="ascii").strip()
        if len(key) < SHORTEST_SECRET_KEY:
            raise OSError(f"{len(key)} characters")
        return key
    except (OSError, UnicodeDecodeError) as error:
        faults.note(
            str(path),
            f"no usable key ({error})",
            f"a file with at least {SHORTEST_SECRET_KEY} characters, or none",
        )
        return ""


def _create_secret(path: Path) -> None:
    """Makes the key file unless there is one. Several processes may start at once: the complete
    file appears under its name in one step, and the first one wins."""
    if path.exists():
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(64) + "\n")
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()


def _database(url: str, data_dir: Path, faults: Faults) -> dict[str, Any]:
    """Django's description of the database; SQLite in the data directory when no URL is given."""
    scheme = url.partition(":")[0].lower() if url else "sqlite"
    url = url or "sqlite:///" + str(data_dir / "kvportal.sqlite3").replace("%", "%25")
    try:
        database: dict[str, Any] = dict(dj_database_url.parse(url, conn_health_checks=True))
    except (ValueError, KeyError):
        faults.note("KVPORTAL_DATABASE_URL", "a URL that does not parse (not shown)", _DATABASE_ALLOWED)
        return {}
    if scheme == "sqlite":
        path = Path(database["NAME"])
        if not path.is_absolute():
            faults.note("KVPORTAL_DATABASE_URL", f"the path {show(str(path))}", _DATABASE_ALLOWED)
        elif path.parent != data_dir and not path.parent.is_dir():
            found = f"the path {show(str(path))}, whose directory does not exist"
            faults.note("KVPORTAL_DATABASE_URL", found, _DATABASE_ALLOWED)
        options = {"init_command": _PRAGMAS, "transaction_mode": "IMMEDIATE", "timeout": SQLITE_BUSY_SECONDS}
        database["OPTIONS"] = {**options, **database.get("OPTIONS", {})}
        # Background writers use threads of their own: an in-memory test database, shared between
        # them, answers "table is locked" where a file in WAL mode makes the second one wait.
        database["TEST"] = {"NAME": str(data_dir / f"test-{os.getpid()}.sqlite3")}
    elif scheme in ("postgres", "postgresql"):
        database["OPTIONS"] = {"connect_timeout": POSTGRES_CONNECT_SECONDS, **database.get("OPTIONS", {})}
    else:
        faults.note("KVPORTAL_DATABASE_URL", f"the scheme {show(scheme)}", _DATABASE_ALLOWED)
    return database


def _redis_url(url: str, faults: Faults) -> str:
    if not url:
        return url
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        faults.note("KVPORTAL_REDIS_URL", "a URL that does not parse (not shown)", _REDIS_ALLOWED)
        return ""
    if parts.scheme not in ("redis", "rediss", "unix"):
        faults.note("KVPORTAL_REDIS_URL", f"the scheme {show(parts.scheme)}", _REDIS_ALLOWED)
    return url
