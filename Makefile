# Build, test and show memfold. `make help` lists the targets.

.PHONY: help build portable portable-test dist dist-test recipes wheel install test test-all torture simulate programs bench-quick demo gallery clean setup setup-build

SIZE ?= 1024
PREFIX ?= /usr/local
TARGET := $(or $(CARGO_TARGET_DIR),target)
export PATH := $(PATH):$(HOME)/.cargo/bin

help:
	@echo "make build             build the memfold command, its preload library and the benchmarks in $(TARGET)/release (debug information in *.debug)"
	@echo "make portable          build the command and the library for glibc 2.17 in $(TARGET)/portable/bin, with zig, which it installs there"
	@echo "make portable-test     run the portable build in root directories of Debian RELEASES (bullseye), which it downloads (needs root)"
	@echo "make dist              build the release files in $(TARGET)/dist: tarball, deb, rpm, wheel, bill of materials, SHA256SUMS (KIND=... for some)"
	@echo "make dist-test         install each release file in a fresh Debian without network, and fold a program there (needs root)"
	@echo "make recipes           follow the recipes of docs/places.md with the tarball of make dist: Docker, Podman, kubectl, Slurm, systemd, ... (needs root; RECIPE=... for some)"
	@echo "make wheel             build the Python package with the command as one wheel in $(TARGET)/wheel"
	@echo "make install           install the command, man pages, completions, the C library, its header and memfold.pc to PREFIX=/usr/local (DESTDIR= is supported)"
	@echo "make test              run everything that CI runs (STEP=... for some steps: $$(scripts/check --list | tr '\n' ' '))"
	@echo "make test-all          run that, and variants of tests: other worlds, pagings, programs, kinds and servers"
	@echo "make torture           run tests that take hours or a quiet machine: new random cases (MEMFOLD_SECONDS=600 each), 25 times the runs of each model, bounds on time, all of stress-ng, Debian 11 to sid (needs zig), memfold run on Linux 6.1 in a virtual machine"
	@echo "make simulate          simulate the engine with new seeds for HOURS=1, until one fails, and shrink that"
	@echo "make programs          run generated C programs with and without memfold for MINUTES=30 (SEED=... the first one), until one differs, and shrink that"
	@echo "make bench-quick       run the short form of each benchmark; fails if one stops or finds a wrong byte, but not for a slow figure"
	@echo "make demo              run a 1 GiB SQLite job without memfold and in a quarter of its memory (SIZE=... in MiB, OPTIONS=... for memfold run)"
	@echo "make gallery           draw docs/gallery/memory.svg from two runs of that job: without memfold, and within 45% of its memory"
	@echo "make setup             install missing packages for all of these, and the programs that tests and bench apps run"
	@echo "make clean             remove build output"

setup:
	@scripts/setup programs

setup-build:
	@scripts/setup

build: setup-build
	cargo build --release -p memfold-cli -p memfold-preload
	cargo build --release -p memfold-bench
	@scripts/split-symbols $(TARGET)/release/memfold $(TARGET)/release/libmemfold_preload.so

PORTABLE := $(TARGET)/portable
portable:
	@scripts/dist/portable

dist: setup-build
	@scripts/dist/build $(KIND)

dist-test:
	@scripts/dist/test

recipes:
	@scripts/recipes $(RECIPE)

RELEASES := bullseye
portable-test: portable
	scripts/debian-root $(PORTABLE)/bin $(RELEASES)

wheel: setup-build
	@scripts/wheel

# It builds what is missing, but installs no packages, because packagers run it without a network.
install:
	cargo build --release -p memfold-cli -p memfold-preload
	@scripts/split-symbols $(TARGET)/release/memfold $(TARGET)/release/libmemfold_preload.so
	@scripts/c-library install "$(PREFIX)" "$(DESTDIR)"
	install -d "$(DESTDIR)$(PREFIX)/bin" "$(DESTDIR)$(PREFIX)/lib/memfold"
	install -m 755 $(TARGET)/release/memfold "$(DESTDIR)$(PREFIX)/bin"
	install -m 755 $(TARGET)/release/libmemfold_preload.so "$(DESTDIR)$(PREFIX)/lib/memfold"
	rm -rf $(TARGET)/share && mkdir -p $(TARGET)/share/man
	$(TARGET)/release/memfold man $(TARGET)/share/man
	$(TARGET)/release/memfold completions bash >$(TARGET)/share/bash
	$(TARGET)/release/memfold completions zsh >$(TARGET)/share/zsh
	$(TARGET)/release/memfold completions fish >$(TARGET)/share/fish
	install -D -m 644 -t "$(DESTDIR)$(PREFIX)/share/man/man1" $(TARGET)/share/man/*
	install -D -m 644 $(TARGET)/share/bash "$(DESTDIR)$(PREFIX)/share/bash-completion/completions/memfold"
	install -D -m 644 $(TARGET)/share/zsh "$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_memfold"
	install -D -m 644 $(TARGET)/share/fish "$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/memfold.fish"

test:
	@scripts/check $(STEP)

# Variants too, and then suites without privilege, as the calling user, and without a userfaultfd.
test-all:
	scripts/check $(STEP)
	scripts/check variants
	MEMFOLD_TEST_WORLD=unprivileged FILTER='binary(e2e) & test(/::(programs|fork)::/)' scripts/check test
	MEMFOLD_TEST_WORLD=own FILTER='binary(e2e) & test(/::(real|servers)::/)' scripts/check test variants
	MEMFOLD_TEST_PAGING=protection FILTER='binary(e2e) & test(/::(real|servers|status)::/)' scripts/check test variants

torture: build
	scripts/guest-run
	$(MAKE) portable-test RELEASES="bullseye bookworm trixie sid"
	MEMFOLD_MODEL_RUNS=25 scripts/check models
	MEMFOLD_BIN_DIR=$(abspath $(TARGET))/release cargo test -p memfold-engine -p memfold-gate -p memfold-block -p memfold-cli --no-fail-fast --tests -- --ignored --nocapture

HOURS ?= 1
simulate: setup-build
	@cargo run -q --profile simulate -p memfold-simulate --features memfold-simulate/shuttle -- hunt --hours $(HOURS)

MINUTES ?= 30
programs: build
	@cargo run -q -p memfold-programs -- hunt --minutes $(MINUTES) --load 4 --bin $(TARGET)/release --out $(TARGET)/programs $(if $(SEED),--from $(SEED))

bench-quick: build
	@scripts/bench-quick $(TARGET)/release/memfold-bench $(BENCH)

demo: setup-build
	@cargo build -q --release -p memfold-cli -p memfold-preload
	@python3 -B demo/demo.py --size $(SIZE) --memfold $(TARGET)/release/memfold -- $(OPTIONS)

gallery: setup-build
	@cargo build -q --release -p memfold-cli -p memfold-preload
	@python3 -B docs/gallery/memory.py --size $(SIZE) --memfold $(TARGET)/release/memfold

clean:
	cargo clean
