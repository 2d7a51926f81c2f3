# Two commands do everything on a machine with only Python:
#   make demo   sets up and prunes the embedded model by every method
#   make test   sets up and runs formatting, lint, types and all tests
# and for those who change something, make results writes the documentation's tables from the records, make reference
# its reference pages from the program, and make dist builds the sdist and the wheel.
.POSIX:
PYTHON = python3
PYTHON_LOWEST = python3.11
VENV = .venv
BIN = $(VENV)/bin
# A process for each core, with one thread each; who has nothing left to do takes over from others. Bytecode is kept,
# whatever the environment says: tests start the command many times.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n auto --dist worksteal

# pip, not uv: see constraints.txt.
$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip==25.3
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[datasets,report,tasks]' --group dev --group docs
	touch $@

setup: $(VENV)/.done

# What a user installs, unless all is there: half of the gigabytes.
$(VENV)/.small: pyproject.toml constraints.txt
	test -e $(VENV)/.done || { $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet -c constraints.txt -e .; }
	touch $@

demo: $(VENV)/.small
	$(BIN)/niwaki demo

# The tables of the documentation and README's picture, from the records in benchmarks/results.
results: setup
	$(BIN)/python benchmarks/results.py

# The reference of commands and of Python, from the program; and the picture of the concepts.
reference: setup
	$(BIN)/python scripts/reference.py
	$(BIN)/python scripts/concepts_picture.py

# The documentation as a site, in site/index.html.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: setup
	BIN=$(BIN) scripts/check

# What takes a moment comes first; types, imports and links are checked beside the tests, which leave a core idle at times,
# and what is wrong with them is said when it is found.
test: setup
	BIN=$(BIN) scripts/check quick
	BIN=$(BIN) scripts/check slow & checks=$$!; tests=0; $(PYTEST) || tests=$$?; wait $$checks || exit 1; exit $$tests

# llama.cpp as npm has it, for the tests of files that it reads: NIWAKI_LLAMA_CPP=$PWD/.llama-cpp make test
LLAMA_CPP = node-llama-cpp@3.22.1
llama-cpp: .llama-cpp/.done
.llama-cpp/.done:
	mkdir -p .llama-cpp
	npm install --prefix .llama-cpp --ignore-scripts --omit=optional --no-audit --no-fund --silent $(LLAMA_CPP) @node-llama-cpp/linux-x64@3.22.1
	touch $@

# llama.cpp's own tools: a test has llama-quantize read an importance matrix, the others are to compare figures with.
# Built from the sources in a package, which takes some 15 minutes on two cores. Compilers that know AMX may need
# -DGGML_NATIVE=OFF on a virtual machine that does not have it: make llama-cpp-tools LLAMA_CPP_FLAGS='-DGGML_NATIVE=OFF -DGGML_AVX512=ON'
LLAMA_CPP_TOOLS = llama-quantize llama-imatrix llama-perplexity llama-bench
LLAMA_CPP_FLAGS =
llama-cpp-tools: .llama-cpp/tools/.done
.llama-cpp/tools/.done: setup
	mkdir -p .llama-cpp/tools
	$(BIN)/python -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest .llama-cpp/tools llama-cpp-python==0.3.36
	tar xzf .llama-cpp/tools/llama_cpp_python-*.tar.gz -C .llama-cpp/tools --strip-components 1
	cmake -S .llama-cpp/tools/vendor/llama.cpp -B .llama-cpp/tools/build -G Ninja -DCMAKE_BUILD_TYPE=Release \
	    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
	    $(LLAMA_CPP_FLAGS)
	cmake --build .llama-cpp/tools/build --target $(LLAMA_CPP_TOOLS)
	touch $@

# A few minutes of what tests/campaign does for as long as one likes: docs/large-models.md.
campaign: setup
	$(BIN)/python tests/campaign --cases 4
	NIWAKI_FULL_TESTS=1 $(PYTEST) tests/packed/test_sanitizers.py

quick: setup
	$(PYTEST) -m 'not slow'

# With transformers' newest release in place of the pinned one, which is what pip brings who pins nothing: that packed
# models decode natively, that models are walked, that they heal, and GGUF files.
NEWEST = .newest
NEWEST_TESTS = tests/packed/test_native_families.py tests/packed/test_decoding.py tests/models/test_hidden_states.py \
    tests/exports/test_gguf.py tests/healing/test_healing.py::test_a_rate_that_is_too_high
newest: setup
	rm -rf $(NEWEST)
	$(BIN)/python -m pip install --quiet --no-deps --target $(NEWEST) 'transformers<6'
	PYTHONPATH=$$PWD/$(NEWEST) $(PYTEST) $(NEWEST_TESTS)

# With the oldest Python and libraries that pyproject.toml allows. torch is a build for GPUs there, gigabytes of it.
LOWEST = .lowest
lowest:
	$(PYTHON_LOWEST) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet torch==2.9.* transformers==5.22.* datasets pytest pytest-timeout pytest-xdist hypothesis -e .
	$(LOWEST)/bin/pytest -n auto -m 'not slow' -W 'ignore:Conversion of an array:DeprecationWarning' --ignore tests/evaluation/test_tasks.py

# In dist/, checked and tried. For Linux with a C++ compiler.
dist:
	PYTHON=$(PYTHON) scripts/dist

clean:
	rm -rf $(VENV) $(LOWEST) $(NEWEST) .llama-cpp .mypy_cache .ruff_cache build dist site src/niwaki/_kernels.*

.PHONY: setup demo results reference docs check test llama-cpp llama-cpp-tools campaign quick lowest newest dist clean
