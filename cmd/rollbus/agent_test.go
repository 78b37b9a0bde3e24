package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rollbus/rollbus/bench/engine/fakes"
	"github.com/rollbus/rollbus/bench/engine/fakes/faketest"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/engine"
)

// rollbus runs a command to its end.
func rollbus(ctx context.Context, environ []string, args ...string) (code int, out, said string) {
	var o, e bytes.Buffer
	code = run(ctx, args, environ, strings.NewReader(""), &o, &e)
	return code, o.String(), e.String()
}

func TestConformanceExitsByWhatItFound(t *testing.T) {
	sound := faketest.VLLM(t)
	uncached := faketest.VLLM(t, func(c *fakes.VLLMConfig) { c.Engine.Engine.NoCache = true })
	for name, c := range map[string]struct {
		url    string
		code   int
		passed bool
	}{
		"an engine that conforms":       {sound.URL(), exitOK, true},
		"an engine that caches nothing": {uncached.URL(), exitNo, false},
		"nobody":                        {"http://127.0.0.1:1", exitUnavailable, false},
		"no address":                    {"nowhere", exitUsage, false},
	} {
		t.Run(name, func(t *testing.T) {
			code, out, said := rollbus(t.Context(), nil, "agent", "conformance", c.url, "--check-timeout", "3s", "-o", "json")
			if code != c.code {
				t.Fatalf("exit %d, want %d\n%s%s", code, c.code, out, said)
			}
			if code > exitNo {
				return
			}
			var r conformanceReport
			if err := json.Unmarshal([]byte(out), &r); err != nil {
				t.Fatal(err)
			}
			failed := 0
			for _, k := range r.Checks {
				if k.Verdict == engine.Broken {
					failed++
				}
			}
			if r.Passed != c.passed || (failed == 0) != c.passed || len(r.Checks) < 10 {
				t.Errorf("passed %v with %d of %d checks failed", r.Passed, failed, len(r.Checks))
			}
		})
	}
}

func TestEndpointsOfCacheEventsGoToTheEngineTheyName(t *testing.T) {
	two := []engineSpec{{name: "a", kind: "vllm"}, {name: "b", kind: "sglang"}}
	f := eventFlags{KVEvents: []string{"a=tcp://*:5557"}, KVReplay: []string{"b=tcp://10.0.0.1:5657", "a=tcp://*:5600"}}
	got, err := f.of(two)
	if err != nil || got["a"] != (engine.EventsConfig{Endpoint: "tcp://*:5557", Replay: "tcp://*:5600"}) || got["b"] != (engine.EventsConfig{Replay: "tcp://10.0.0.1:5657"}) {
		t.Errorf("%+v %v", got, err)
	}
	f = eventFlags{KVEvents: []string{"tcp://*:5557"}}
	if got, err := f.of(two[:1]); err != nil || got["a"].Endpoint != "tcp://*:5557" {
		t.Errorf("the only engine needs no name: %+v %v", got, err)
	}
	for why, c := range map[string]struct {
		f     eventFlags
		specs []engineSpec
	}{
		"of which of two":      {f, two},
		"there is none":        {eventFlags{KVEvents: []string{"c=tcp://*:5557"}}, two},
		"given twice":          {eventFlags{KVReplay: []string{"a=tcp://*:1", "a=tcp://*:2"}}, two},
		"no endpoint":          {eventFlags{KVEvents: []string{"a=5557"}}, two},
		"a kind without them":  {eventFlags{KVEvents: []string{"tcp://*:5557"}}, []engineSpec{{name: "a", kind: "openai"}}},
		"simulated by rollbus": {eventFlags{KVEvents: []string{"tcp://*:5557"}}, []engineSpec{{name: "a", kind: simKind}}},
	} {
		if got, err := c.f.of(c.specs); err == nil || exitCode(err) != exitUsage {
			t.Errorf("%s: %+v %v", why, got, err)
		}
	}
}

// An agent as it is started beside a server that does not tell where its events
// are; what it found is what get and probe print.
func TestAnAgentIsToldWhereTheEventsAre(t *testing.T) {
	node := natstest.Server(t)
	f := faketest.VLLM(t, func(c *fakes.VLLMConfig) { c.Sources = false })
	state := filepath.Join(t.TempDir(), "state")
	environ := []string{"ROLLBUS_SERVER=" + node.URL(), "ROLLBUS_STATE_DIR=" + state}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan string, 1)
	go func() {
		code, _, said := rollbus(ctx, environ, "agent", "--engine", "e1=vllm="+f.URL(), "--kv-events", f.Endpoint(0), "--kv-replay", f.Replay(0), "--init", "--capacity-tokens", "7")
		if code != exitOK && ctx.Err() == nil {
			done <- said
		}
		close(done)
	}()
	defer func() {
		stop()
		if said := receive(t, done, "end of the agent"); said != "" {
			t.Errorf("the agent ended: %s", said)
		}
	}()
	var e subjects.Engine
	natstest.Eventually(t, 20*time.Second, "the engine is registered with its events", func() bool {
		code, out, _ := rollbus(ctx, environ, "get", "engines", "-o", "jsonl")
		return code == exitOK && json.Unmarshal([]byte(out), &e) == nil && e.Events == "exact" && e.State == subjects.EngineReady
	})
	if e.CapacityTokens == nil || *e.CapacityTokens != 1<<15 || e.CapacitySource != "reported" {
		t.Errorf("%+v", e)
	}
	if _, out, said := rollbus(ctx, environ, "get", "engines", "-o", "wide"); !strings.Contains(out, "CAPACITY FROM") || !strings.Contains(out, "reported") {
		t.Errorf("get engines -o wide does not say where the capacity is from: %s%s", out, said)
	}
	natstest.Eventually(t, 20*time.Second, "what it reported is kept", func() bool {
		_, err := os.Stat(filepath.Join(state, "default.e1.json"))
		return err == nil
	})
	code, out, said := rollbus(ctx, environ, "agent", "probe", f.URL(), "--kv-events", f.Endpoint(0), "--kv-replay", f.Replay(0))
	if code != exitOK || !strings.Contains(out, "(reported)") || !strings.Contains(out, "events   rank 0 at "+f.Endpoint(0)+", replay at "+f.Replay(0)) {
		t.Errorf("exit %d\n%s%s", code, out, said)
	}
}
