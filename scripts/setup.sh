#!/bin/sh
# Create .venv with the locked dependencies. Uses $PYTHON, or the first Python >= 3.11 on PATH.
set -eu
cd "$(dirname "$0")/.."

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if command -v "$candidate" >/dev/null && new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    echo "setup: no Python >= 3.11 found; install one, or name it: make setup PYTHON=/path/to/python3" >&2
    exit 1
}

create_venv() {
    python=$(find_python)
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        # Debian ships venv apart from Python.
        sh scripts/install_packages.sh "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    fi
    "$python" -m venv --clear .venv
}

new_enough .venv/bin/python || create_venv
.venv/bin/python -m pip install --disable-pip-version-check -qq --require-hashes -r requirements-dev.txt
# The Makefile compares this file's age with the lock's.
touch .venv/.locked
echo "setup: .venv holds the locked dependencies ($(.venv/bin/python --version))"
