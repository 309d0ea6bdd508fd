"""Flags, environment and the KV events file, turned into frozen, validated objects.

`load_config` is the way in; `ConfigError` holds every fault, one line each.
"""

from kvportal.config.faults import ConfigError
from kvportal.config.load import load_config
from kvportal.config.model import Config, KvEventsConfig

__all__ = ["Config", "ConfigError", "KvEventsConfig", "load_config"]
