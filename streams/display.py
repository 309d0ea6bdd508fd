"""How streams look in the admin: small pieces of HTML, the same everywhere. Times are wall-clock seconds."""

from __future__ import annotations

from datetime import UTC, datetime

from django.utils.html import format_html
from django.utils.safestring import SafeString

from streams.resync import OutcomeState
from streams.status import StreamState, StreamStatus

EMPTY = "\N{EN DASH}"
BADGE_TONES = {
    StreamState.SYNCHRONIZED: "good",
    StreamState.SYNCING: "busy",
    StreamState.CONNECTING: "busy",
    StreamState.UNSYNCHRONIZED: "bad",
    OutcomeState.DONE: "good",
    OutcomeState.STARTED: "busy",
    OutcomeState.INCOMPLETE: "bad",
    OutcomeState.FAILED: "bad",
    OutcomeState.NO_MATCH: "off",
}
"""A tone is a colour and a mark; the text is always there as well."""
TONES = ("good", "busy", "warn", "bad", "off")

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def badge(value: str, label: str | None = None) -> SafeString:
    """A state (or a tone, with a label) as coloured text with a mark of its own shape."""
    tone = value if value in TONES else BADGE_TONES.get(value, "off")  # type: ignore[call-overload]
    return format_html('<span class="kv-badge kv-badge-{}">{}</span>', tone, label or value)


def duration(seconds: float) -> str:
    """The largest unit that fits, whole: `45 s`, `3 min`, `2 h`, `5 d`."""
    seconds = max(0, int(seconds))
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return "0 s"


def exact(at: datetime) -> str:
    """To the second, in UTC, which the words around it say."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def moment(at: float | None, now: float, suffix: str = " ago") -> SafeString | str:
    """How long ago, with the exact time as tooltip."""
    if at is None:
        return EMPTY
    then = datetime.fromtimestamp(at, UTC)
    return format_html(
        '<time class="kv-time" datetime="{}" title="{} UTC">{}{}</time>',
        then.isoformat(timespec="seconds"),
        exact(then),
        duration(now - at),
        suffix,
    )


def number(value: int | None) -> str:
    return EMPTY if value is None else f"{value:,}"


def reason(status: StreamStatus) -> str:
    """The sentence that tells what is wrong: why it does not serve, or what is wrong although it does."""
    fault = status.error or status.warning
    return EMPTY if fault is None else fault.sentence
