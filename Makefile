# rollbus. `make help` lists the targets; every command here also works by hand.
SHELL         := bash
.SHELLFLAGS   := -euo pipefail -c
.DEFAULT_GOAL := help

GO            ?= go
VERSION       ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS       := -s -w -X main.version=$(VERSION)
GOLANGCI_LINT ?= $(GO) run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
SHARED        ?= ../shared
FUZZTIME      ?= 5s
SEED          ?= 0# of the schedule of faults; 0 = a random one
KILLS         ?= 100
ROLLOUTS      ?= 5000
IMAGE         ?= rollbus:$(VERSION)
IMAGE_TOOL    ?= $(shell for t in docker podman buildah; do if $$t info >/dev/null 2>&1; then echo $$t; exit; fi; done)
CERTIFICATES  ?= /etc/ssl/certs/ca-certificates.crt

# Where data races would hurt, and tests are quick enough to look for them.
RACE_PACKAGES := ./kvstate/... ./dispatcher/... ./workeragent/... ./client/... ./bench/checker/... ./bench/recorded/...

.PHONY: help
help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build bin/rollbus, static, with its version
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/rollbus ./cmd/rollbus

.PHONY: image
image: build ## Build the container image IMAGE with docker, podman or buildah
	@test -n '$(IMAGE_TOOL)' || { echo "make image: none of docker, podman and buildah works here: install one, or name it with IMAGE_TOOL=<command>" >&2; exit 1; }
	@test -r '$(CERTIFICATES)' || { echo "make image: no $(CERTIFICATES): install ca-certificates, or name a bundle with CERTIFICATES=<file>" >&2; exit 1; }
	rm -rf dist/image
	install -D -m 0755 bin/rollbus dist/image/rollbus
	install -D -m 0644 '$(CERTIFICATES)' dist/image/etc/ssl/certs/ca-certificates.crt
	install -m 0644 deploy/image/etc/* dist/image/etc/
	$(IMAGE_TOOL) build -f deploy/Dockerfile -t '$(IMAGE)' dist/image

.PHONY: demo
demo: ## Replay a trace through a whole pool in one process (half a minute)
	$(GO) run ./cmd/rollbus demo

.PHONY: test
test: ## Every test that needs nothing but this repository (under 5 minutes)
	$(GO) test -p 1 -timeout 5m ./...

.PHONY: test-shared
test-shared: ## Tests on real traces and captures in SHARED (../shared)
	@test -d '$(SHARED)/data' || { echo "make test-shared: $(SHARED)/data is not there: put the recorded traces and captures there, or name their folder with SHARED=<folder>" >&2; exit 1; }
	@dirs=$$(git ls-files --cached --others --exclude-standard '*_test.go' | xargs grep -l '^//go:build shared' | xargs -r -n1 dirname | sort -u | sed 's|^|./|'); \
	[[ -n $$dirs ]] || { echo "make test-shared: no test with the build tag shared" >&2; exit 1; }; \
	SHARED_DIR='$(abspath $(SHARED))' $(GO) test -tags shared -timeout 10m $$dirs

.PHONY: test-nats-cli
test-nats-cli: ## The commands of docs/submit.md with the real nats tool (builds it)
	$(GO) test -tags natscli -timeout 10m -count 1 -run NatsTool ./cmd/rollbus

.PHONY: test-image
test-image: ## Build the image with buildah and run what is in it (root, no daemon)
	$(GO) test -tags image -timeout 10m -count 1 -run Image ./cmd/rollbus

.PHONY: test-real-engine
test-real-engine: ## The conformance suite against the server at ROLLBUS_REAL_ENGINE=URL
	@if [[ -z "$${ROLLBUS_REAL_ENGINE:-}" ]]; then \
	  echo "real engine: not run (ROLLBUS_REAL_ENGINE is not set)"; \
	else \
	  $(GO) test -tags realengine -timeout 30m -count 1 -v -run RealEngine ./workeragent/engine; \
	fi

.PHONY: test-faults
test-faults: ## Kill real processes for minutes; SEED=n KILLS=n ROLLOUTS=n
	$(GO) run ./bench/faults/cmd --seed $(SEED) --kills $(KILLS) --rollouts $(ROLLOUTS)

.PHONY: test-load
test-load: ## What real processes occupy, against their bounds (5 minutes)
	$(GO) test -tags load -v -count 1 -timeout 15m ./bench/load

.PHONY: corpus
corpus: ## Make the kept journals anew, after a behaviour that you changed on purpose
	UPDATE_CORPUS=1 $(GO) test -count 1 -v -run 'TheKeptCorpus' ./bench/recorded

.PHONY: test-arm64
test-arm64: ## Replay the kept journals as an arm64 program, under qemu-aarch64
	@command -v qemu-aarch64 >/dev/null || { echo "make test-arm64: no qemu-aarch64: install qemu-user" >&2; exit 1; }
	@bin=$$(mktemp); trap 'rm -f "$$bin"' EXIT; \
	GOARCH=arm64 CGO_ENABLED=0 $(GO) test -c -o "$$bin" ./bench/recorded; \
	cd bench/recorded && qemu-aarch64 "$$bin" -test.run 'TheKeptCorpus|FourDispatchers' -test.v | grep -E '^(---|PASS|FAIL|ok)'

.PHONY: race
race: ## The race detector where it pays
	$(GO) test -race -p 1 -timeout 15m $(RACE_PACKAGES)

.PHONY: lint
lint: fmt-check vet ## Formatting, vet and golangci-lint
	$(GOLANGCI_LINT) run --allow-parallel-runners ./...

.PHONY: fmt-check
fmt-check: ## Fail if gofmt would change a file
	@out=$$(gofmt -l $$(git ls-files --cached --others --exclude-standard '*.go')); \
	if [[ -n $$out ]]; then echo "gofmt would change:" >&2; echo "$$out" >&2; exit 1; fi

.PHONY: vet
vet: ## go vet, with every build tag
	$(GO) vet ./...
	$(GO) vet -tags shared,natscli,load,image,realengine ./...

.PHONY: units
units: build ## Check the systemd units with systemd-analyze
	@dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; \
	for unit in deploy/systemd/*.service; do \
	  sed 's|/usr/local/bin/rollbus|$(CURDIR)/bin/rollbus|' "$$unit" > "$$dir/$$(basename "$$unit")"; \
	done; \
	systemd-analyze verify --man=no "$$dir"/*.service && echo "units: ok"

.PHONY: fuzz-short
fuzz-short: ## Each fuzz target for FUZZTIME (5s)
	@found=0; \
	for dir in $$(git ls-files --cached --others --exclude-standard '*_test.go' | xargs grep -l '^func Fuzz' | xargs -n1 dirname | sort -u); do \
	  for target in $$(grep -ho '^func Fuzz[A-Za-z0-9_]*' $$dir/*_test.go | sed 's/^func //' | sort -u); do \
	    found=1; echo "== $$dir $$target"; \
	    $(GO) test -run '^$$' -fuzz "^$$target$$" -fuzztime $(FUZZTIME) "./$$dir"; \
	  done; \
	done; \
	if [[ $$found == 0 ]]; then echo "make fuzz-short: no fuzz target found" >&2; exit 1; fi

.PHONY: ci
ci: ## What continuous integration runs
	.ci/run
