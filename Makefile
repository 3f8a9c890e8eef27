# Two commands: `make run` reproduces the study's report and measures the layer on this machine,
# `make test` checks the code.
VENV := .venv
PY := $(VENV)/bin/python
PINS := pyproject.toml constraints-cpu.txt constraints-cuda.txt tools/install

.PHONY: help run test lab clean

help:
	@echo "make run    install what is missing, write the report, measure, print the path of its page"
	@echo "make test   lint, type check and tests in the same environment"
	@echo "make lab    open JupyterLab on the index of the notebooks"
	@echo "make clean  remove .venv and caches; outputs/ stays"
	@echo "PYTHON=python3.12 make run picks the Python that .venv is made with"

run: $(VENV)/.run $(VENV)/.browser
	$(VENV)/bin/workbench report --sweep

test: $(VENV)/.test $(VENV)/.browser
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -q --durations=10 --numprocesses 2 --dist loadfile --no-loadscope-reorder

lab: $(VENV)/.run
	$(VENV)/bin/jupyter lab notebooks/00_index.ipynb \
		--ContentsManager.pre_save_hook=workbench.lab.keep_without_outputs \
		$(if $(filter 0,$(shell id -u)),--allow-root)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.run: $(PINS)
	tools/install
	@touch $@

$(VENV)/.test: $(PINS)
	tools/install test
	@touch $(VENV)/.run $@

$(VENV)/.browser: tools/browser | $(VENV)/.run
	tools/browser
	@touch $@
