# Two targets for everybody: `make up` and `make test`. `make help` lists the rest.
.PHONY: help up down model simulate chaos claims fuzz mutants conformance explore millions test prepare build fmt lint deny unit quota cgroups kernels guest-tests traces bench bench-memory memory soak storms races clean

CARGO ?= cargo
TOOLS := $(CURDIR)/.tools
export PATH := $(TOOLS)/bin:$(HOME)/.cargo/bin:$(PATH)
COMMIT := $(shell git describe --always --exclude='*' --abbrev=12 --dirty=+ 2>/dev/null)
ifneq ($(COMMIT),)
# What the daemon says it was made of (T8).
export VIV_COMMIT := $(COMMIT)
endif

ifdef CI
# What is built once is not built in parts.
export CARGO_INCREMENTAL := 0
endif

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

up: ## install what is missing, build, start the daemon, run a first sandbox, say what to try next
	@scripts/prepare build
	$(CARGO) build --release --package viv --locked
	@scripts/up target/release/viv

down: ## end the daemon; its sandboxes run on
	@scripts/down

test: ## install what the tests need and run the whole suite
	@scripts/prepare test
	$(MAKE) --no-print-directory lint unit deny

prepare: ## install what building and testing need
	@scripts/prepare test

build: ## build everything
	$(CARGO) build --workspace --all-targets --locked

fmt: ## format
	$(CARGO) fmt --all

lint: ## formatting and clippy, as CI wants them; the feature otlp too; no planted bugs in what ships
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(CARGO) clippy --workspace --features viv/otlp --bin viv --test traces --locked -- -D warnings
	@! $(CARGO) tree --package viv --edges normal,features --invert viv-core --locked | grep 'feature "planted"' \
		|| { echo "what ships must have no bugs to plant"; exit 1; }

# What decides whether a change lands gives the same answer twice: properties are tried with the same cases each time.
# `make explore` tries others. Nor is there a green run that passed over the tests of memory where a CRIU works.
unit: ## all tests
	VIV_REQUIRE_CRIU="$${VIV_REQUIRE_CRIU-$$(scripts/require-criu)}" \
		PROPTEST_RNG_SEED=$${PROPTEST_RNG_SEED:-1} $(CARGO) nextest run --workspace --locked

deny: ## licences, sources and duplicate crates
	$(CARGO) deny --all-features check --hide-inclusion-graph licenses bans sources

quota: ## the tests of project quota, in a guest whose kernel has it (some minutes)
	@scripts/guest-tests quota

cgroups: ## limits on cgroup v2 alone, for root, delegated and by a real systemd; core dumps (in guests, half an hour)
	@scripts/guest-tests cgroups
	@scripts/guest-tests systemd
	@scripts/guest-tests speed

kernels: ## a part of the suite, in guests with kernels that users have (an hour)
	@for suite in bookworm bookworm-backports trixie-backports; do \
	    KERNEL_SUITE=$$suite scripts/guest-tests kernel || exit 1; done

guest-tests: quota cgroups kernels ## all of these

traces: ## spans of a daemon built with the feature otlp, sent to a real collector
	@scripts/prepare traces
	$(CARGO) clippy --package viv --features otlp --all-targets --locked -- -D warnings
	$(CARGO) nextest run --locked --package viv --features otlp --bin viv --test traces -E 'binary(traces) | test(/^serve::traces::/)'

bench: ## memory of an idle sandbox, time of the basic verbs, cost of saving, limits of speed, neighbours of bombs, the store, the daemon, many resumes
	@scripts/prepare test
	$(CARGO) build --release --package viv --locked
	$(CARGO) bench --package viv --bench idle --bench layers --bench speed --bench bombs --bench daemon --bench spares --bench cycles --bench executions --locked
	$(CARGO) bench --package viv-agent --bench confine --locked
	$(CARGO) bench --package viv-store --bench store --locked

bench-memory: ## saving and restoring memory of sandboxes, beside runc
	@scripts/prepare test
	$(CARGO) bench --package viv --bench checkpoint --locked

memory: ## what runs goes on over many hibernations, nothing lost: ROUNDS=50 make memory (twenty minutes)
	@scripts/prepare test
	VIV_REQUIRE_CRIU=1 VIV_MEMORY_ROUNDS=$${ROUNDS:-50} $(CARGO) test --package viv --test daemon_memory --locked -- \
		x5_what_runs_goes_on_with_nothing_lost --nocapture

claims: ## many clients claim spares of a pool that refills, on a real daemon: CLIENTS=50 EACH=10 make claims
	@scripts/prepare test
	VIV_CLAIM_CLIENTS=$${CLIENTS:-50} VIV_CLAIM_EACH=$${EACH:-10} $(CARGO) test --package viv --test daemon_spares --locked -- \
		l19_claims_of_many --nocapture

chaos: ## agent loops on daemons that break, one fault in each, and a table of what came of it: SESSIONS=200 make chaos
	$(CARGO) build --package viv --locked
	target/debug/viv chaos --sessions $${SESSIONS:-200} --seed $${SEED:-0} --at-once $${AT_ONCE:-3}

# What is fuzzed is safe code, which needs no sanitizer, and its dependencies have the versions that ship.
fuzz: ## each parser with what libFuzzer makes up, for so long: SECONDS=60 make fuzz
	@scripts/prepare fuzz
	@cd fuzz && { [ -e Cargo.lock ] || cp ../Cargo.lock .; } && cargo fuzz build --fuzz-dir . --sanitizer none
	@cd fuzz && broken= && for target in fuzz_targets/*.rs; do name=$$(basename $$target .rs); mkdir -p corpus-found/$$name; \
	    echo "== $$name"; cargo fuzz run --fuzz-dir . --sanitizer none $$name corpus-found/$$name corpus/$$name -- \
	    -max_total_time=$(or $(SECONDS),60) -max_len=65536 -print_final_stats=1 || broken="$$broken $$name"; done; \
	    [ -z "$$broken" ] || { echo "broken:$$broken; what broke it is in fuzz/artifacts"; exit 1; }

# A property that fails is not made smaller: that it does is all that is asked.
mutants: ## does any test of viv-core notice: FILES='crates/viv-core/src/fence.rs' make mutants (a day for all)
	@scripts/prepare mutants
	PROPTEST_RNG_SEED=1 PROPTEST_CASES=64 PROPTEST_MAX_SHRINK_ITERS=0 $(CARGO) mutants --package viv-core \
		--test-package viv-core --test-tool nextest --jobs 1 --timeout 300 --output target/mutants \
		$(foreach file,$(FILES),--file '$(file)')

# The tests are built before the time begins.
soak: ## chaos and churn for MINUTES=30 in all, and what is left on the machine at the end
	$(CARGO) build --package viv --locked
	$(CARGO) test --package viv --test leaks --locked --no-run
	CARGO="$(CARGO)" scripts/soak $${MINUTES:-30} $${SEED:-0}

storms: ## the leak and crash tests, longer: CYCLES=5000 make storms (hours)
	VIV_LEAK_CYCLES=$${CYCLES:-3000} VIV_CRASHES=$${CYCLES:-3000} \
		$(CARGO) nextest run --release --package viv --test leaks --test crashes --locked
	VIV_RESUME_CYCLES=100 VIV_SELFTEST_ROUNDS=50 VIV_SELFTEST_ROUNDS_KILLED=50 \
		$(CARGO) nextest run --package viv --test daemon_steady --test selftest --locked
	VIV_STORE_CRASHES=$${CYCLES:-3000} $(CARGO) nextest run --release --package viv-store --test crash --locked

conformance: ## all cases of the conformance suite with every runtime and driver (ten minutes)
	@scripts/prepare test
	$(CARGO) nextest run --locked --ignore-default-filter --package viv --test conformance

millions: ## an archive of two million files that are really made, on both drivers (minutes)
	$(CARGO) nextest run --locked --package viv --test damage --run-ignored only -E 'test(millions_of_files)' --no-capture

explore: ## properties with many other cases: CASES=20000 make explore
	PROPTEST_CASES=$${CASES:-3000} $(CARGO) nextest run --locked --package viv-core --package viv-cron \
		--package viv-layer --package viv-image --package viv-api

simulate: ## simulated worlds by their seeds, and one line at the end: SEEDS=0..5000 STORE=sqlite OFF=gate make simulate
	VIV_SIM_STORE=$$STORE VIV_SIM_OFF=$$OFF VIV_SIM_STEPS=$$STEPS VIV_SIM_FAULTS=$$FAULTS \
		VIV_SIM_WITHOUT="$$WITHOUT" VIV_SIM_REACHED=$$REACHED $(CARGO) run --release --package viv-chaos --example simulate --locked -- $${SEEDS:-0..5000}

model: ## every order in which two and three replicas can act, further than `make test` goes (a minute)
	VIV_MODEL_WIDE=1 $(CARGO) nextest run --locked --package viv-chaos --test replicas --no-capture

races: ## stop against effect on the real daemon, with and without a crash in between: RACES=2000 make races
	VIV_TASK_RACES=$${RACES:-2000} $(CARGO) test --package viv --test daemon_tasks --locked -- k5_stop_against_effect --nocapture

clean: ## remove what was built
	$(CARGO) clean
