"""A pytest plugin that gives the tests an environment of their own, before Django reads its settings.

Named in `addopts`, because a conftest is loaded only after pytest-django has imported the settings. Without
it a developer's own data directory, database, Redis or token would take part in the tests.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile


def isolate() -> None:
    """Drop every portal variable and point the data directory at a temporary one."""
    for name in list(os.environ):
        if name.startswith(("KVPORTAL_", "ETCD_", "ETCDCTL_")):
            del os.environ[name]
    data_dir = tempfile.mkdtemp(prefix="kvportal-tests-")
    atexit.register(shutil.rmtree, data_dir, ignore_errors=True)
    os.environ["KVPORTAL_DATA_DIR"] = data_dir


isolate()
