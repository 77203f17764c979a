# Each target first makes the environment that it needs: .venv, by Python's own venv and pip, with the versions of
# constraints.txt. Nothing else has to be installed but Python 3.11 or newer and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

NATIVE := src/regard/backends/cpu

# Stamps: what has been done to the environment, and when.
CREATED := $(VENV)/.created
DEMO := $(VENV)/.installed-demo
DEV := $(VENV)/.installed-dev
RELEASE := $(VENV)/.installed-release
# Without byte code, which takes 20 seconds of a core for all packages: what is imported gets it then, in a third of that.
INSTALL := $(BIN)/python -m pip install --no-compile --disable-pip-version-check --progress-bar off \
  --constraint constraints.txt

# Byte code is stored even where the environment forbids it (the empty value is none): else each process compiles all
# modules and rewrites the assertions of all tests anew, ten seconds each.
export PYTHONDONTWRITEBYTECODE :=

# Tests run in so many processes side by side, each on one thread (`make test JOBS=8`). The default suits two cores: some
# tests wait for processes that they start, which leaves time for a third.
JOBS ?= 3
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -rs
# What is shorter is a part of something slow.
EVERYTHING := -m 'not conformance and not cards and not shorter'

# Another variant of the native code than the machine's own, and the instructions of torch that go with it.
VARIANT ?= plain
VARIANT_TESTS := tests/kernels tests/native tests/huggingface tests/test_docs.py tests/test_readme.py
TORCH_plain := ATEN_CPU_CAPABILITY=default
TORCH_avx2 := ATEN_CPU_CAPABILITY=avx2

# Kernels in Triton read CPU tensors where it interprets them; native code would take these first.
TRITON_TESTS := TRITON_INTERPRET=1 REGARD_NATIVE=off $(PYTEST) tests/triton

DATA ?= data

# That of a GPU is for `make gpu`.
BENCHMARKS := $(sort $(filter-out benchmarks/gpu.py,$(wildcard benchmarks/[a-z]*.py)))

# Sections of benchmarks/gpu.py, with commas between them, and where its report is put.
ONLY ?=
REPORT ?= docs/gpu.md

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-all test-triton test-cards test-variant durations conformance aarch64 check format docs bench gpu comparisons figures wheels clean

help:  ## say what can be made
	@sed -n 's/^\([a-z-]*\): .*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

demo: $(DEMO)  ## translate a few sentences, train small translators of dates, and draw what they attend to
	$(BIN)/regard demo

test: $(DEV)  ## run the tests and every example of the documentation: five to ten minutes on two cores
	$(PYTEST)
	$(TRITON_TESTS)

test-all: $(DEV)  ## run the longest tests as well: what has to pass before a change lands
	$(PYTEST) $(EVERYTHING)
	$(TRITON_TESTS)

test-triton: $(DEV)  ## tests of the kernels in Triton, by its interpreter on the CPU: no GPU is needed
	$(TRITON_TESTS)

test-cards: $(DEV)  ## compile the kernels in Triton for each configuration and three kinds of card, and list what spills
	$(PYTEST) tests/triton/test_compiled.py -m cards

test-variant: $(DEV)  ## tests of kernels, pages and transformers with another variant of the native code: VARIANT=plain, avx2, off
	REGARD_NATIVE=$(VARIANT) $(TORCH_$(VARIANT)) $(PYTEST) $(VARIANT_TESTS)

durations: $(DEV)  ## run all tests, and list the files and the tests that take the most time
	$(PYTEST) $(EVERYTHING) --durations 100 --durations-min 0.5

conformance: $(DEV)  ## ten thousand random problems through every kernel: half an hour or more on two cores
	$(PYTEST) tests/test_conformance.py tests/linear/test_random_problems.py -m 'conformance or not conformance' --timeout 0

aarch64: $(DEV)  ## tests of the native code on an emulated aarch64 processor: Debian on x86-64, as root, 2 GB
	tests/aarch64.sh

check: $(DEV)  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(DEV)  ## put the code into its standard form
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(DEV)  ## build the site, in English and Korean: build/site/index.html opens without a server
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: $(DEV)  ## measure: prints tables in Markdown, half an hour or more on two quiet cores
	@for file in $(BENCHMARKS); do printf '\n## %s\n\n' "$$file"; $(BIN)/python "$$file" || exit 1; done

gpu:  ## on a machine with a GPU: check and measure in eight minutes at most (docs/gpu.md); ONLY=card,decode a part; PYTHON has torch
	$(PYTHON) benchmarks/gpu.py $(if $(ONLY),--only $(ONLY)) --out $(REPORT)

comparisons: $(DEV)  ## run the comparisons of docs/comparisons.md on the text in DATA=DIR (data), 40 minutes of a core; what is done stays
	$(BIN)/regard compare dates --vary score
	@for recipe in recipes/comparisons/*.yaml; do \
	  $(BIN)/regard compare $$recipe --set data.folder=$(DATA)/$$(sed -n 's|^  folder: data/||p' $$recipe) || exit 1; \
	done

# In the order of their length. What recipes measured of models and comparisons trained is kept in runs/ and comparisons/,
# and is not done again. Not here, as they train for many hours: the models that ship, and that of docs/long-context.md.
# $(call printed,FILE,COMMAND): what the command prints is in FILE when it has ended well, and not before.
FIGURES := build/figures
PICTURES := $(FIGURES)/docs/pictures
printed = @echo $(1); ($(2)) > $(FIGURES)/$(1).part && mv $(FIGURES)/$(1).part $(FIGURES)/$(1)

figures: $(DEV)  ## print every figure of docs/ again and compare, from the text in DATA=DIR: many hours (docs/figures.md)
	mkdir -p $(PICTURES)
	cp docs/what-heads-learn*.md $(FIGURES)/docs
	$(BIN)/python recipes/mechanism_figures.py --folder $(PICTURES)/mechanisms
	$(BIN)/python recipes/findings_pages.py --folder build/pages --pictures $(PICTURES)
	$(call printed,animal.txt,$(BIN)/python recipes/example_figures.py animal $(PICTURES)/animal-every-head.png)
	$(call printed,length_extrapolation.txt,$(BIN)/python examples/length_extrapolation.py --seeds 3 \
	  --picture $(PICTURES)/example-lengths.svg)
	$(call printed,time_series.txt,$(BIN)/python recipes/example_figures.py time_series $(PICTURES)/example-season.png)
	$(call printed,vision_transformer.txt,$(BIN)/python recipes/example_figures.py vision_transformer \
	  $(PICTURES)/example-vision.png)
	$(call printed,speech_alignment.txt,$(BIN)/python recipes/example_figures.py speech_alignment \
	  $(PICTURES)/example-speech.png)
	$(call printed,translation_alignment.txt,$(BIN)/python examples/translation_alignment.py)
	$(call printed,movies.txt,$(BIN)/python examples/movies.py)
	$(call printed,pointer_network.txt,$(BIN)/python examples/pointer_network.py)
	$(call printed,memorizing_transformer.txt,$(BIN)/python examples/memorizing_transformer.py)
	$(call printed,infini_attention.txt,$(BIN)/python examples/infini_attention.py)
	$(call printed,document_classification.txt,$(BIN)/python examples/document_classification.py)
	$(call printed,hierarchical_attention.txt,$(BIN)/python examples/hierarchical_attention.py)
	$(call printed,memory_network.txt,$(BIN)/python examples/memory_network.py)
	$(call printed,sets.txt,$(BIN)/python examples/sets.py)
	$(call printed,alignment_of_heads.txt,$(BIN)/python recipes/alignment_of_heads.py --data $(DATA)/align-en-fr)
	$(call printed,word_alignment.txt,$(BIN)/python recipes/word_alignment.py --data $(DATA))
	$(call printed,trust.txt,$(BIN)/python recipes/trust.py --data $(DATA))
	$(call printed,heads_and_positions.txt,$(BIN)/python recipes/heads_and_positions.py --data $(DATA))
	$(call printed,approximations_of_models.txt,$(BIN)/python recipes/approximations_of_models.py --data $(DATA) \
	  --pictures $(PICTURES))
	$(call printed,dependencies.txt,$(BIN)/python recipes/roles_of_heads.py --data $(DATA) --dependencies \
	  --pictures $(PICTURES))
	$(BIN)/python recipes/transformer_drawing.py $(PICTURES)/transformer.svg
	$(call printed,additive_against_dot.txt,$(BIN)/python recipes/additive_against_dot.py)
	$(BIN)/python benchmarks/textbook_claims.py --figure $(PICTURES)/score-variance.svg
	$(call printed,parts_of_a_transformer.txt,$(BIN)/python recipes/parts_of_a_transformer.py --data $(DATA)/tatoeba-eng-fra)
	$(call printed,demo.txt,$(BIN)/regard demo --folder build/demo)
	$(call printed,zoo.txt,$(BIN)/regard examine --zoo --results build/zoo --table $(FIGURES)/zoo.md)
	$(call printed,effects_of_heads.txt,$(BIN)/python recipes/effects_of_heads.py --data $(DATA) --docs $(FIGURES)/docs)
	$(call printed,roles_of_heads.txt,$(BIN)/python recipes/roles_of_heads.py --data $(DATA) --docs $(FIGURES)/docs)
	$(MAKE) comparisons
	@for table in comparisons/*/table.md; do \
	  cp $$table $(FIGURES)/compare-$$(basename $$(dirname $$table)).md || exit 1; \
	done
	$(BIN)/python recipes/bottleneck_figure.py comparisons/bottleneck/results.json $(PICTURES)/bottleneck.svg
	@for file in $(BENCHMARKS); do \
	  $(BIN)/python $$file > $(FIGURES)/bench-$$(basename $$file .py).txt || exit 1; \
	done
	$(BIN)/python recipes/check_figures.py

wheels: $(RELEASE)  ## make the source distribution and the wheels of seven platforms in dist/, and check each: 15 minutes of a core
	$(BIN)/python wheels/make_wheels.py

clean:  ## remove the environment and all that was built
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .benchmarks
	rm -f $(NATIVE)/libregard.so* $(NATIVE)/not_built.txt
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(CREATED):
	@command -v $(PYTHON) >/dev/null || { \
	  echo "regard needs Python 3.11 or newer, and '$(PYTHON)' is not there; name another: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "regard needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	       "Name another: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# Native code is compiled first, where one can see it: what pip does as it installs is hidden, and finds it compiled.
COMPILED := hatch_build.py $(NATIVE)/build.py $(wildcard $(NATIVE)/*.[ch])
compile = $(BIN)/python $(NATIVE)/build.py || true

$(DEMO): $(CREATED) pyproject.toml constraints.txt $(COMPILED)
	@$(compile)
	$(INSTALL) --editable '.[demo]'
	@touch $@

# What development needs holds all that the demo needs.
$(DEV): $(CREATED) pyproject.toml constraints.txt $(COMPILED)
	@$(compile)
	$(INSTALL) --editable '.[dev]'
	@touch $(DEMO) $@

# What compiles for other systems, and checks distributions.
$(RELEASE): $(CREATED) pyproject.toml constraints.txt $(COMPILED)
	@$(compile)
	$(INSTALL) --editable '.[release]'
	@touch $@
