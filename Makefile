# make lab    the course in JupyterLab        make lab PORT=9999 for another port
# make test   all tests and all notebooks
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

.PHONY: lab test refresh bench cards cheatsheet slides colab clean

lab: $(READY)
	$(BIN)/jupyter lab --port=$(PORT) $(if $(filter 0,$(shell id -u)),--allow-root) \
	  --LabApp.default_url=/lab/tree/notebooks/01_three_things_called_parallel.ipynb

test: $(READY)
	$(BIN)/python tests/run_all.py

# Run the notebooks anew and store their outputs: after a change to them or to helpers.
refresh: $(READY)
	$(BIN)/python tests/refresh.py

bench: $(READY)
	$(BIN)/python bench/ranks.py
	$(BIN)/python bench/schedules.py
	$(BIN)/python bench/fabric.py
	$(BIN)/python bench/cost_model.py
	$(BIN)/python bench/training.py
	$(BIN)/python bench/course.py

cards cheatsheet: $(READY)
	$(BIN)/python -m helpers.lesson.make $@

slides: $(READY)
	$(BIN)/python -m helpers.lesson.make slides $(DROP)

colab: $(READY)
	$(BIN)/python -m helpers.lesson.make colab $(REPO)

clean:
	rm -rf $(VENV) build

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Three Axes needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $@
