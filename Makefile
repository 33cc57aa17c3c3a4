# make lab    the course in JupyterLab, on your own copy in my/; FRESH=07 copies drop 07 again, PORT=9999 is another port
# make test   tests and the fourteen notebooks' cores, some minutes; make test-all also runs the slow ones
# make test-gpu   on a machine with a GPU, five minutes: tests of GPUs, on ranks that share it
# make lint   the style
# make attempts   every stored wrong attempt at an exercise, and the answer to it
# make cards, cheatsheet, worksheets, slides (make slides DROP=07): pages to print and to project, in build/
# make site   the course as pages, build/site/index.html; installs no torch
# make colab  each notebook with the whole course in it, into build/colab: upload one to Colab or Kaggle.
#             It takes a second, and installs nothing
# make colab REPO=owner/name   once the course is published: links that open it in Colab
# All but make colab first make a virtual environment in .venv, once. PYTHON=python3.12 is another Python.
# On Linux without an NVIDIA GPU torch is installed from PyTorch's index of CPU builds, if that answers.
# BIN=FOLDER/bin has the packages already: nothing is installed.
# TORCH=default is pip's usual index; TORCH=URL, or file:///FOLDER, another one.

PYTHON ?= python3
PORT ?= 8888
DROP ?=
REPO ?=
PUBLISHED ?=
FRESH ?=
TORCH ?= auto
VENV ?= .venv
READY := $(VENV)/.ready
COURSE := $(VENV)/.course
PAGES := $(VENV)/.pages
BIN := $(VENV)/bin
CPU_BUILDS := https://download.pytorch.org/whl/cpu
PIP := -m pip --disable-pip-version-check install --constraint constraints.txt
NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "Three Axes needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
TORCH_FROM = $(BIN)/python $(PIP) --no-deps torch --index-url

.PHONY: lab test test-all test-gpu attempts lint refresh planner-tables cards cheatsheet worksheets site slides colab clean

lab: $(COURSE)
	$(BIN)/python -m three_axes lab my --port=$(PORT) $(addprefix --fresh=,$(FRESH))

test: $(READY)
	$(BIN)/python tests/run_all.py

test-all: $(READY)
	$(BIN)/python tests/run_all.py --all

test-gpu: $(READY)
	$(BIN)/python tests/run_all.py --gpu

# After a change to an exercise: the stored wrong attempts, and the time that an attempt may take.
attempts: $(READY)
	$(BIN)/python -m pytest -q -rP -n 2 -o faulthandler_timeout=1800 tests/practice/test_attempts.py tests/practice/test_limits.py tests/practice/test_own_lines.py

lint: $(READY)
	$(BIN)/ruff check helpers three_axes tools notebooks/drops tests
	$(BIN)/ruff format --check --quiet helpers three_axes tools notebooks/drops tests || { echo "make these as ruff format would"; exit 1; }
	$(BIN)/mypy --no-error-summary

# Run the notebooks anew and store their outputs: after a change to them or to helpers.
refresh: $(READY)
	$(BIN)/python -m tools.refresh

# The planner's errors on published runs that you collected in a folder: the tables of docs/accuracy.md, and data/.
planner-tables: $(READY)
	$(BIN)/python tests/plan/published.py --published $(PUBLISHED)

cards cheatsheet worksheets: $(PAGES)
	$(BIN)/python -m tools.printables $@

site: $(PAGES)
	@echo "Making the course's pages in build/site: one to three minutes."
	$(BIN)/python -m tools.site

slides: $(PAGES)
	$(BIN)/python -m tools.slides $(DROP)

colab:
	@$(NEW_ENOUGH)
	$(PYTHON) -m tools.colab $(REPO)

clean:
	rm -rf $(VENV) build

# With BIN=FOLDER/bin on the command line nothing is installed.
ifneq ($(origin BIN),command line)
$(COURSE): $(VENV)/.torch pyproject.toml constraints.txt
	$(BIN)/python $(PIP) --editable '.[course]'
	@touch $@

# The packages of tests and style.
$(READY): $(COURSE)
	$(BIN)/python $(PIP) --quiet --editable '.[test]'
	@touch $@

# The packages of pages, slides and printed things, without torch.
$(PAGES): pyproject.toml constraints.txt | $(VENV)/.made
	@echo "Installing nbconvert, Matplotlib and what they need into $(VENV), once: 230 MB on disk, a minute or two. No torch."
	$(BIN)/python $(PIP) --quiet --editable '.[pages]'
	@touch $@

else
.PHONY: $(COURSE) $(READY) $(PAGES)
endif

$(VENV)/.made:
	@$(NEW_ENOUGH)
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch is installed first, without its dependencies; those are installed with the course, from the usual index.
$(VENV)/.torch: | $(VENV)/.made
	@echo "Installing into $(VENV), once, with what pip says. It takes 1.6 GB on disk; with CUDA's libraries 5 to 7."
	@if [ "$(TORCH)" = default ]; then :; \
	elif [ "$(TORCH)" != auto ]; then $(TORCH_FROM) "$(TORCH)"; \
	elif [ "$$(uname -s)" != Linux ] || [ -e /dev/nvidiactl ] || [ -e /usr/lib/wsl/lib/libcuda.so.1 ]; then :; \
	elif $(PYTHON) -c 'from urllib.request import urlopen; urlopen("$(CPU_BUILDS)/torch/", timeout=5)' 2> /dev/null \
	  && $(TORCH_FROM) $(CPU_BUILDS); then echo "No NVIDIA GPU is here: took the CPU build of torch. (make TORCH=default takes the other.)"; \
	else echo "No NVIDIA GPU is here, but PyTorch's index of CPU builds does not answer: torch from the usual index, with CUDA of some GB."; fi
	@touch $@
