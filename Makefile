# Everything a person types. See CONTRIBUTING.md for what each is for.
PY := .venv/bin/python
PORT ?= 8888
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup packages demo screenshots test test-kv lint fmt bench lock

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: .venv/.locked ## create .venv with the locked dependencies (PYTHON=... names the interpreter)

.venv/.locked: requirements-dev.txt
	@sh scripts/setup.sh

packages: setup
	@sh scripts/install_packages.sh $$($(PY) -m tests.support.programs)

demo: setup ## the portal with three simulated engines on 127.0.0.1 (PORT=8888); Ctrl-C ends it
	$(eval FAULT := $(shell $(PY) -m scripts.demo --check --port '$(PORT)'))$(if $(FAULT),$(error $(FAULT)))
	@exec $(PY) -m scripts.demo --port '$(PORT)'

screenshots: setup packages ## take the pictures in docs/screenshots: the demo, seen through Chromium
	$(PY) -m scripts.screenshots $(ARGS)

test: setup packages ## every test (ARGS=... goes to pytest)
	$(PY) -m pytest -n 2 --dist loadfile $(ARGS)

test-kv: setup ## index, decoder, directory, query and CAR alone: no etcd, Redis or browser
	$(PY) -m pytest -n 2 --dist loadfile -m "not needs" tests/core tests/streams tests/routing $(ARGS)

lint: setup ## style, types, the rules between modules, migrations, Django's checks
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	KVPORTAL_DATA_DIR=$(CURDIR)/var/lint $(PY) manage.py makemigrations --check --dry-run
	KVPORTAL_DATA_DIR=$(CURDIR)/var/lint $(PY) manage.py check --fail-level WARNING

fmt: setup ## rewrite the code in the project's style
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: setup ## the measurements that the design rests on, with the real code
	$(PY) -m benchmarks $(ARGS)

COMPILE = .venv/bin/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-emit-options \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host $(ARGS)

lock: export CUSTOM_COMPILE_COMMAND = make lock
lock: setup ## write the lock files anew from pyproject.toml (ARGS=--upgrade takes newer versions)
	$(COMPILE) -o requirements.txt pyproject.toml
	$(COMPILE) --extra uvicorn -c requirements.txt -o requirements-uvicorn.txt pyproject.toml
	$(COMPILE) --extra uvicorn --extra dev -c requirements-uvicorn.txt -o requirements-dev.txt pyproject.toml
