# The one entry point for developers and CI. Everything happens in .venv and build/ here and in
# ${XDG_CACHE_HOME:-~/.cache}/frameshard; nothing reads standard input; a second run takes seconds.
#
# GPUs are chosen once, by llama-cpp-python's own variable, and remembered in .venv:
#   make build CMAKE_ARGS="-DGGML_CUDA=on -DGGML_VULKAN=on"     (one or both; CMAKE_ARGS= goes back to the CPU)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# The tools in .venv (cmake, ninja) are used even where the system has none.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHONUNBUFFERED := 1

SOURCES := $(shell find sdk native -type f -not -path '*/__pycache__/*' -not -path '*/.*') pyproject.toml README.md
PYTHON_CODE := sdk tests samples native profiles bindings .assets
C_CODE = $(shell find native bindings/c bindings/godot tests -name '*.h' -o -name '*.cpp' -o -name '*.c')
NATIVE_BUILD = cmake -S native -G Ninja "-DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python" -DFRAMESHARD_TESTS=ON \
  "-DFRAMESHARD_GPU_MODULES=$$(cat $(VENV)/gpu_modules)"

.PHONY: help build demo test lint generate bindings packages windows vulkan vulkan-tests architectures fuzz hostile sanitize soak vision clean
.DELETE_ON_ERROR:

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

build: $(VENV)/installed ## install frameshard and all it needs into .venv

demo: $(VENV)/installed ## play samples/npc_dialogue unattended
	$(BIN)/python samples/npc_dialogue/main.py --unattended

# Four tests at a time: they wait for engines that compute with one thread, for disks and for deadlines.
test: lint ## lint, native tests, Python tests
	@mkdir -p build
	$(NATIVE_BUILD) -B build/native-tests > build/native-tests.log || { cat build/native-tests.log; exit 1; }
	cmake --build build/native-tests
	ctest --test-dir build/native-tests --output-on-failure
	$(BIN)/python -m pytest -n 4 --dist worksteal --durations=30

lint: $(VENV)/installed ## ruff, mypy and clang-format, changing nothing
	ruff check $(PYTHON_CODE)
	ruff format --check $(PYTHON_CODE)
	mypy --strict sdk
	mypy --strict --platform win32 --cache-dir .mypy_cache/win32 sdk
	clang-format --dry-run -Werror $(C_CODE)

generate: $(VENV)/installed ## rewrite what mirrors sdk/frameshard/wire: PROTOCOL.md's tables, vectors, parts of the bindings
	PYTHONPATH=sdk $(BIN)/python bindings/generate
	PYTHONPATH=sdk $(BIN)/python tests/conformance/make_vectors.py
	PYTHONPATH=sdk $(BIN)/python tests/conformance/make_arbiter.py

# FRAMESHARD_BINDINGS tells the tests where the C library is; with it none of them is skipped.
bindings: $(VENV)/installed ## the C, C++, C#, Godot and Lua clients: built, tested, C and C++ also under ASan with UBSan
	@$(BIN)/python bindings/missing.py
	bindings/godot/engine.sh build/godot
	cmake -S bindings/c -B build/bindings -G Ninja -DFRAMESHARD_TESTS=ON -DFRAMESHARD_EXAMPLES=ON -DFRAMESHARD_GODOT=$(CURDIR)/build/godot
	cmake --build build/bindings
	FRAMESHARD_BINDINGS=$(CURDIR)/build/bindings $(BIN)/python -m pytest tests/conformance tests/bindings \
	  tests/test_wheel.py tests/test_bundle.py
	cmake -S bindings/c -B build/bindings-asan -G Ninja -DFRAMESHARD_TESTS=ON -DFRAMESHARD_SANITIZE=ON
	cmake --build build/bindings-asan
	FRAMESHARD_BINDINGS=$(CURDIR)/build/bindings-asan $(BIN)/python -m pytest -k "c- or cpp- or test_program" \
	  tests/conformance/test_scenarios.py tests/bindings/test_native.py

packages: $(VENV)/python ## packages for Unity, Unreal, Godot and LÖVE, in build/packages
	$(BIN)/python bindings/packages

windows: $(VENV)/installed ## all but the GPU for Windows: cross-compiled by MinGW-w64, tested under Wine
	bindings/c/windows/build.sh build/windows
	native/windows/build.sh build/windows
	tests/windows/test.sh build/windows
	FRAMESHARD_WINDOWS=$(CURDIR)/build/windows $(BIN)/python -m pytest tests/windows/test_windows_bundle.py

# In an environment of its own, so that .venv keeps the GPU that was chosen for it.
vulkan: ## native tests and verify on Mesa's software Vulkan, with a build for Vulkan in build/vulkan
	@$(PYTHON) native/tools/vulkan.py
	$(MAKE) VENV=build/vulkan CMAKE_ARGS=-DGGML_VULKAN=on vulkan-tests

# The loader offers only Mesa's software Vulkan, and ggml, which passes over such devices, is told to take it.
vulkan-tests: export VK_LOADER_DRIVERS_SELECT := *lvp*
vulkan-tests: export GGML_VK_VISIBLE_DEVICES := 0
vulkan-tests: $(VENV)/installed
	$(NATIVE_BUILD) -B build/native-vulkan
	cmake --build build/native-vulkan
	ctest --test-dir build/native-vulkan --output-on-failure
	FRAMESHARD_VULKAN=Vulkan0 $(BIN)/python -m pytest tests/test_vulkan.py

# llama.cpp's own test of architectures, built from the pinned source, saves the models.
ARCHITECTURES = build/architectures
architectures: $(VENV)/installed ## every architecture that llama.cpp can save a model of, against llama.cpp
	[ -d $(ARCHITECTURES)/source ] || $(BIN)/python native/tools/headers.py --source $(ARCHITECTURES)/source
	cmake -S $(ARCHITECTURES)/source/vendor/llama.cpp -B $(ARCHITECTURES)/build -G Ninja -DCMAKE_BUILD_TYPE=Release \
	  -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=ON -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF \
	  -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_MTMD=OFF -DLLAMA_OPENSSL=OFF
	ninja -C $(ARCHITECTURES)/build test-llama-archs
	mkdir -p $(ARCHITECTURES)/models
	$(ARCHITECTURES)/build/bin/test-llama-archs --seed 1 --out $(ARCHITECTURES)/models
	FRAMESHARD_ARCHITECTURES=$(CURDIR)/$(ARCHITECTURES)/models $(BIN)/python -m pytest -n 2 tests/test_every_architecture.py

FUZZ_S ?= 600
fuzz: $(VENV)/installed ## libFuzzer on what the C client reads, FUZZ_S seconds (600); needs clang
	cmake -S bindings/c -B build/fuzz -G Ninja -DFRAMESHARD_FUZZ=ON -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_C_COMPILER=clang
	cmake --build build/fuzz --target fuzz_codec
	mkdir -p build/fuzz/corpus
	cd build/fuzz && ./fuzz_codec -max_total_time=$(FUZZ_S) -max_len=65536 -print_final_stats=1 corpus $(CURDIR)/bindings/vectors

sanitize: $(VENV)/installed ## native tests under ASan with UBSan, then under TSan
	for kind in address thread; do \
	  $(NATIVE_BUILD) -B build/native-$$kind -DFRAMESHARD_SANITIZE=$$kind && cmake --build build/native-$$kind && \
	  ctest --test-dir build/native-$$kind --output-on-failure || exit 1; done

HOSTILE_S ?= 600
hostile: $(VENV)/installed ## faults, wrong requests and changes of the budget at random, twice HOSTILE_S seconds (600)
	FRAMESHARD_HOSTILE_S=$(HOSTILE_S) $(BIN)/python -m pytest -s tests/hostile

soak: $(VENV)/installed ## an hour of simulated play; fails when memory, files or VRAM grow or a job is lost
	$(BIN)/python profiles/tools/soak.py smollm2-135m

vision: $(VENV)/installed ## the small vision tower: build it once, name 72 images at four budgets, play samples/scene_reasoning
	$(PIP) install 'pygame-ce>=2.5' 'pillow>=10.3'
	$(BIN)/python samples/scene_reasoning/sprites.py
	$(BIN)/python profiles/tools/sprite_renders.py
	$(BIN)/python -m pytest tests/test_sprites.py

clean: ## remove .venv and build/ (the cache of wheels and models stays)
	rm -rf $(VENV) build

$(VENV)/python:
	@missing=; \
	command -v g++ >/dev/null || command -v c++ >/dev/null || missing="$$missing g++"; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3-venv"; \
	if [ -n "$$missing" ]; then \
	  echo "Missing on this system:$$missing. On Debian or Ubuntu: apt-get install g++ make python3 python3-venv"; exit 1; fi; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "frameshard needs Python 3.10 or newer")'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install 'scikit-build-core>=0.11' 'cmake>=3.24' ninja
	@touch $@

# Rewritten only when CMAKE_ARGS is given and differs, so that other runs keep the build that was chosen.
$(VENV)/cmake_args: $(VENV)/python FORCE
	@touch -a $@
ifneq ($(origin CMAKE_ARGS),undefined)
	@[ "$$(cat $@)" = "$$CMAKE_ARGS" ] || printf '%s\n' "$$CMAKE_ARGS" > $@
endif
FORCE:

$(VENV)/llama: $(VENV)/cmake_args native/tools/llama_wheel.py native/tools/gpu_modules.py native/tools/headers.py
	@wheel=$$(CMAKE_ARGS="$$(cat $<)" $(BIN)/python native/tools/llama_wheel.py) && \
	$(PIP) install --force-reinstall --no-deps "$$wheel"
	@touch $@

$(VENV)/gpu_modules: $(VENV)/cmake_args native/tools/gpu_modules.py native/tools/headers.py $(wildcard native/modules/*)
	@CMAKE_ARGS="$$(cat $<)" $(BIN)/python native/tools/gpu_modules.py > $@

$(VENV)/installed: $(VENV)/llama $(VENV)/gpu_modules $(SOURCES)
	@CMAKE_ARGS= $(BIN)/python native/tools/progress.py "building frameshard" build/install.log \
	  $(BIN)/python -m pip install --verbose --no-build-isolation '.[dev]' \
	  --config-settings "cmake.define.FRAMESHARD_GPU_MODULES=$$(cat $(VENV)/gpu_modules)"
	@touch $@
