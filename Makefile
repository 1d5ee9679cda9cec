# The book's commands. `make` alone explains them.
# On Windows it runs in the shell that comes with Git.
ifeq ($(OS),Windows_NT)
SHELL := bash.exe
PYTHON ?= python
BIN := .venv/Scripts
EXE := .exe
else
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
endif
PORT ?= 8000
SERVE ?= 1
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
OURS := constraints.txt settings.ini setup.py pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help book site slides epub pdf test check sync chapters solutions lab-run claims bench measures jupyter gpu card new-chapter hooks export clean

help:  ## explain the targets
	@echo "The Annotated NLP: a book whose chapters run, and the package that falls out of it."
	@echo
	@$(PYTHON) tools/targets.py

# Reading needs nbdev, smalldocs and Pillow; everything else needs PyTorch too. Each is set up once, and again when its pins change.
$(BIN)/python$(EXE):
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name another with make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	@echo "Making .venv ..."
	@$(PYTHON) -m venv .venv || { echo "No venv module: on Debian, apt-get install python3-venv"; exit 1; }

.venv/.site: $(BIN)/python$(EXE) $(OURS)
	@echo "Installing what the site needs ..."
	@set -e; $(PIP) $$($(BIN)/python tools/needs.py site)
	@touch $@

.venv/.dev: $(BIN)/python$(EXE) $(OURS)
	@echo "Installing the package and what the chapters and tests need (PyTorch among it) ..."
	@$(PIP) -e '.[dev]'
	@touch .venv/.site $@

book: site  ## read the book: build the site from stored outputs and serve it (SERVE=0 only builds, PORT=8000)
ifeq ($(SERVE),1)
	@$(BIN)/python -m tools.site serve --port $(PORT)
endif

site: .venv/.site  ## build the site and no more
	@$(BIN)/python -m tools.site build

slides: .venv/.site  ## a deck of slides for each chapter, for lecturers, in _slides/ (NAMES="05_attention"; needs Quarto)
	@$(BIN)/python -m tools.slides $(NAMES)

epub: .venv/.dev  ## one EPUB of all chapters with their stored outputs, in _printed/ (needs Pandoc, or Quarto, which has it)
	@$(BIN)/python -m tools.printed epub

pdf: .venv/.dev  ## a PDF of each chapter with its stored outputs, in _printed/ (NAMES="05_attention"; needs Pandoc and Typst, or Quarto, which has both)
	@$(BIN)/python -m tools.printed pdf $(NAMES)

test: .venv/.dev  ## check everything, as continuous integration does
	@$(BIN)/python -m tools.check test

check: .venv/.dev sync  ## while working, in two to three minutes: sync, ruff, parity, the wheel and one chapter (NAMES=04_decoding)
	@$(BIN)/python -m tools.check quick $(NAMES)

sync: .venv/.dev  ## say which notebooks are not clean, and what is out of step with them
	@$(BIN)/python -m tools.check sync

chapters: .venv/.dev  ## run chapters and store what they print (NAMES="03_seq2seq 04_decoding"; all when none is named)
	@$(BIN)/python -m tools.chapters $(NAMES)

solutions: .venv/.dev  ## run chapters with their exercises' solutions, and time these (NAMES=05_attention; ARGS=--quick in small)
	@$(BIN)/python -m tools.solutions $(ARGS) $(NAMES)

lab-run: .venv/.dev  ## run one laboratory notebook in full (NAME=basic_english) and store its outputs and results
	@$(BIN)/python -m tools.chapters --lab "$(NAME)"

claims: .venv/.dev  ## print what the stored results say of each claim, one JSON object a line
	@$(BIN)/python -m tools.claims

bench: .venv/.dev  ## time every model beside its peer, and its cost as the work grows (ARGS="--quick" only tries it out, "--fast" swaps our products)
	@$(BIN)/python -m benchmarks peers $(ARGS)
	@$(BIN)/python -m benchmarks growth $(ARGS)
	@$(BIN)/python -m benchmarks switches $(ARGS)

measures: .venv/.dev site  ## store what each page of the site weighs, and what axe finds on it
	@$(BIN)/python -m tools.measures

jupyter: .venv/.dev  ## open JupyterLab on the notebooks
	@$(BIN)/jupyter lab nbs

gpu: .venv/.dev  ## on a CUDA device: the tests marked gpu, then chapters and laboratory, stored results skipped
	@$(BIN)/python -m tools.gpu

card: .venv/.dev  ## where no GPU is: name the cells of pages that mix devices (NAMES="09_contextual lab/heads")
	@$(BIN)/python -m tools.card $(NAMES)

new-chapter: .venv/.dev  ## lay out a new chapter that runs and passes the tests of form (NAME=25_something)
	@$(BIN)/python -m tools.new_chapter $(NAME)

hooks: .venv/.dev  ## check at each commit that notebooks are clean, the package in sync and ruff content
	@$(BIN)/pre-commit install

export: .venv/.dev  ## write the package, the README and the API page from the notebooks, and clean the notebooks
	@$(BIN)/python -m tools.check mend

clean:  ## remove the built site and caches (not .venv)
	@rm -rf _site _proc _slides dist build .pytest_cache .hypothesis .ruff_cache *.egg-info
