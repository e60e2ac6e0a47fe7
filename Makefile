# Two targets for everybody: `make up` and `make test`. `make help` lists the rest.
.PHONY: help up test prepare build fmt lint deny unit bench soak clean

CARGO ?= cargo
TOOLS := $(CURDIR)/.tools
export PATH := $(TOOLS)/bin:$(HOME)/.cargo/bin:$(PATH)

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

up: ## install what is missing, build, run a first sandbox, say what to try next
	@scripts/prepare build
	$(CARGO) build --release --package viv --locked
	@scripts/first-sandbox target/release/viv

test: ## install what the tests need and run the whole suite
	@scripts/prepare test
	$(MAKE) --no-print-directory lint unit deny

prepare: ## install what building and testing need
	@scripts/prepare test

build: ## build everything
	$(CARGO) build --workspace --all-targets --locked

fmt: ## format
	$(CARGO) fmt --all

lint: ## formatting and clippy, as CI wants them
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings

unit: ## all tests
	$(CARGO) nextest run --workspace --locked

deny: ## licences, sources and duplicate crates
	$(CARGO) deny --all-features check --hide-inclusion-graph licenses bans sources

bench: ## memory of an idle sandbox, time of the basic verbs, cost of saving
	@scripts/prepare test
	$(CARGO) build --release --package viv --locked
	$(CARGO) bench --package viv --bench idle --bench layers --locked

soak: ## the leak and crash tests, longer: CYCLES=5000 make soak
	VIV_LEAK_CYCLES=$${CYCLES:-3000} VIV_CRASHES=$${CYCLES:-3000} \
		$(CARGO) nextest run --release --package viv --test leaks --test crashes --locked

clean: ## remove what was built
	$(CARGO) clean
