"""How Django writes times (`FORMAT_MODULE_PATH`; a language's formats come before the settings' own)."""

from __future__ import annotations

DATETIME_FORMAT = "Y-m-d H:i:s"  # what happened a second apart is not the same
