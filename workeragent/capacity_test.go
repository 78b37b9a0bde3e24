package workeragent

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/rollbus/rollbus/subjects"
)

// from waits for a capacity and where it is from.
func (r *rig) from(what string, tokens int64, source string) {
	r.t.Helper()
	r.registered(what, func(e subjects.Engine) bool {
		return e.CapacityTokens != nil && *e.CapacityTokens == tokens && e.CapacitySource == source
	})
}

func TestACapacityIsReportedElseOnceReportedElseConfigured(t *testing.T) {
	r := newRig(t)
	dir := filepath.Join(t.TempDir(), "state")
	kept := func(c *Config) { c.StateDir, c.Engines[0].CapacityTokens = dir, 1000 }
	p := newPuppet(t)
	a := r.agent(p.url, kept)
	r.from("it is the configured one", 1000, "configured")
	p.setMetrics("vllm:cache_config_info{engine=\"0\",kv_cache_size_tokens=\"5000\"} 1\nvllm:num_requests_running{engine=\"0\"} 0\nvllm:num_requests_waiting{engine=\"0\"} 0\n")
	r.from("it is the reported one", 5000, "reported")
	p.setMetrics("") // a release that tells it no more
	if err := a.Stop(r.ctx()); err != nil {
		t.Fatal(err)
	}
	a = r.agent(p.url, kept)
	r.from("another life of the agent knows it", 5000, "profiled")
	if err := a.Stop(r.ctx()); err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	p.model = `{"id":"another"}`
	p.mu.Unlock()
	a = r.agent(p.url, kept)
	r.from("another model's is not its own", 1000, "configured")
	if err := a.Stop(r.ctx()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "p.e1.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.agent(p.url, kept)
	r.from("a broken file stops nobody", 1000, "configured")
}

// A server that tells its size with its load alone.
func TestWhatServerInfoDoesNotTellTheLoadDoes(t *testing.T) {
	r := newRig(t)
	url := sglangStub(t, "", rankLoad(0, 1)+","+rankLoad(1, 2))
	r.agent(url, sglang(t, url))
	r.from("its capacity is known", 10_000, "reported")
	if e, _ := r.engine("e1"); e.Slots != 8 {
		t.Errorf("%d slots, want those of both ranks", e.Slots)
	}
}
