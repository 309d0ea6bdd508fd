"""How tests start Chromium: headless, without any traffic of its own."""

from __future__ import annotations

import os

CHROMIUM_ARGS: tuple[str, ...] = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    *(("--no-sandbox",) if os.geteuid() == 0 else ()),
)
"""For `playwright.chromium.launch(executable_path=<the chromium fixture>, args=[*CHROMIUM_ARGS])`."""
