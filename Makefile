# make run    set up .venv, fetch the data, check the mechanics, train, evaluate: ends with the results table
# make test   set up .venv with the test tools, check the format, run the tests

PYTHON ?= python3
# 100,000 sentences, the default, take an hour on two laptop cores; this many take minutes
SENTENCES ?= 4000
INTERVAL ?= 10

run: .venv/run
	.venv/bin/python download_data.py
	.venv/bin/python test_model.py
	.venv/bin/python train.py RUN_NAME=first_run OVERWRITE=True MAX_SENTENCES=$(SENTENCES) EVAL_INTERVAL=$(INTERVAL)
	.venv/bin/python evaluate.py

test: .venv/test
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/python -m pytest -n auto

test-all: .venv/test
	.venv/bin/python -m pytest -n auto -m ''

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/run: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install -q -e .
	touch $@

.venv/test: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install -q -e '.[test]'
	touch $@ .venv/run

.PHONY: run test test-all
