.DEFAULT_GOAL := help
.PHONY: help quickstart test check install clean

help:
	@echo "make quickstart   train a small mixture of experts on Shakespeare and let it write (about two minutes on two cores)"
	@echo "make test         run the default tests (under eight minutes on two cores)"
	@echo "make check        format check, lint, types, layers, then the default tests"
	@echo "make install      make .venv with moejax and its tools; the other targets do it by themselves"
	@echo "make clean        remove caches and build products; runs/ and .venv stay"

install:
	@tools/install.sh

quickstart: install
	@tools/quickstart.sh

test: install
	@.venv/bin/python -m pytest -q -n 2

check: install
	@tools/check.sh

clean:
	@rm -rf build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	@find moejax kernels configs tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
