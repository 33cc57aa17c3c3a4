# make lab    the course in JupyterLab        make lab PORT=9999 for another port
# make test   tests and all notebooks, some minutes; make test-all what is slow as well, and make lint the style
# make cards, make cheatsheet, make slides (make slides DROP=07): printed things and decks, into build/
# make colab REPO=owner/name   where the course lives, written into every notebook
# All first make a virtual environment in .venv, once.

PYTHON ?= python3
PORT ?= 8888
DROP ?=
REPO ?=
VENV ?= .venv
READY := $(VENV)/.ready
BIN := $(VENV)/bin
PEERS ?= .venv-peers
SETTINGS := $(VENV)/share/jupyter/lab/settings

.PHONY: lab test test-all lint refresh bench cards cheatsheet slides colab clean

lab: $(READY)
	$(BIN)/jupyter lab --port=$(PORT) $(if $(filter 0,$(shell id -u)),--allow-root) \
	  --LabApp.default_url=/lab/tree/notebooks/01_three_things_called_parallel.ipynb

test: $(READY)
	$(BIN)/python tests/run_all.py

test-all: $(READY)
	$(BIN)/python tests/run_all.py --all

lint: $(READY)
	$(BIN)/ruff check helpers tests bench
	$(BIN)/ruff format --check --quiet helpers tests bench || { echo "make these as ruff format would"; exit 1; }

# Run the notebooks anew and store their outputs: after a change to them or to helpers.
refresh: $(READY)
	$(BIN)/python tests/refresh.py

# Half an hour: tables and a figure in build/bench. What people would use instead goes into an environment of its own.
bench: $(READY) $(PEERS)/.ready
	$(PEERS)/bin/python bench/peers.py
	$(PEERS)/bin/python bench/cost_peers.py
	for table in ranks counting cost_of_counting explain fabric schedules cost_model training course; do $(BIN)/python bench/$$table.py || exit 1; done

cards cheatsheet: $(READY)
	$(BIN)/python -m helpers.lesson.make $@

slides: $(READY)
	$(BIN)/python -m helpers.lesson.make slides $(DROP)

colab: $(READY)
	$(BIN)/python -m helpers.lesson.make colab $(REPO)

clean:
	rm -rf $(VENV) $(PEERS) build

$(READY): pyproject.toml constraints.txt data/jupyterlab.json
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Three Axes needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing into $(VENV), once. This can take some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@mkdir -p $(SETTINGS) && cp data/jupyterlab.json $(SETTINGS)/overrides.json
	@touch $@

# A peer that cannot be had on this system is left out of the table.
$(PEERS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	for peer in ipyparallel torchmonarch llm-analysis HolisticTraceAnalysis; do $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $$peer || true; done
	@touch $@
