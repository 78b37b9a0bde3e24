package telemetry_test

import (
	"encoding/hex"
	"encoding/json"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rollbus/rollbus/workeragent/telemetry"
)

type expectedRank struct {
	Running    *int     `json:"running"`
	Waiting    *int     `json:"waiting"`
	KVUsage    *float64 `json:"kv_usage"`
	Used       *int64   `json:"used_tokens"`
	Capacity   *int64   `json:"capacity_tokens"`
	MaxRunning *int     `json:"max_running"`
}

// expected is one entry of expected.json, whatever the file's kind.
type expected struct {
	Ranks     map[int]expectedRank     `json:"ranks"`
	Counters  map[int]map[string]int64 `json:"counters"`
	Complete  *bool                    `json:"complete"`
	Awake     *bool                    `json:"awake"`
	BlockSize *int                     `json:"block_size"`
	Total     *int                     `json:"total_running"`
	After     string                   `json:"after"`
	Delta     *struct {
		Restarted   bool  `json:"restarted"`
		Preemptions int64 `json:"preemptions_increment"`
	} `json:"delta"`

	DPRanks        *int            `json:"dp_ranks"`
	CapacityTokens *int64          `json:"capacity_tokens"`
	MaxRunning     *int            `json:"max_running"`
	WeightVersion  string          `json:"weight_version"`
	KVEvents       json.RawMessage `json:"kv_events"`

	Busy, Slots    int
	ContextPerSlot int    `json:"context_per_slot"`
	Decoded        []int  `json:"decoded_so_far"`
	Sleeping       *bool  `json:"sleeping"`
	Model          string `json:"model"`
	Context        *int   `json:"context"`
	Models         []string
	MaxModelLen    *int `json:"max_model_len"`
}

func TestEveryFixtureReadsAsExpected(t *testing.T) { checkDir(t, "testdata") }

// checkDir reads every file that dir/expected.json names.
func checkDir(t *testing.T, dir string) {
	t.Helper()
	var all map[string]json.RawMessage
	if err := json.Unmarshal(read(t, filepath.Join(dir, "expected.json")), &all); err != nil {
		t.Fatal(err)
	}
	if len(all) == 0 {
		t.Fatal("expected.json names no file")
	}
	for name, raw := range all {
		t.Run(name, func(t *testing.T) { checkFile(t, dir, name, raw) })
	}
}

func read(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func checkFile(t *testing.T, dir, name string, raw json.RawMessage) {
	b := read(t, filepath.Join(dir, name))
	if strings.HasPrefix(name, "kv_event_sources") {
		checkSources(t, b, raw)
		return
	}
	var want expected
	if err := json.Unmarshal(raw, &want); err != nil {
		t.Fatal(err)
	}
	switch {
	case strings.HasSuffix(name, ".prom"):
		s, _, err := telemetry.ParseMetrics(b)
		if err != nil {
			t.Fatal(err)
		}
		checkSample(t, s, want)
		if want.Delta != nil {
			checkDelta(t, read(t, filepath.Join(dir, want.After)), s, want)
		}
	case strings.HasPrefix(name, "loads-"):
		s, err := telemetry.ParseLoads(b)
		if err != nil {
			t.Fatal(err)
		}
		checkSample(t, s, want)
	case strings.HasPrefix(name, "get_load-"):
		s, err := telemetry.ParseGetLoad(b)
		if err != nil {
			t.Fatal(err)
		}
		checkSample(t, s, want)
	case strings.HasPrefix(name, "server_info-"):
		checkServerInfo(t, b, want)
	case strings.HasSuffix(name, "-slots-loaded.json"):
		s, err := telemetry.ParseSlots(b)
		if err != nil {
			t.Fatal(err)
		}
		if s.Busy != want.Busy || s.Total != want.Slots || s.ContextPerSlot != want.ContextPerSlot {
			t.Errorf("got %+v, want %+v", s, want)
		}
		diff(t, "decoded", want.Decoded, s.Decoded)
	case strings.HasSuffix(name, "-props.json"):
		p, err := telemetry.ParseProps(b)
		if err != nil {
			t.Fatal(err)
		}
		diff(t, "slots", want.MaxRunning, p.Slots)
		diff(t, "context", &want.ContextPerSlot, p.ContextPerSlot)
		diff(t, "sleeping", want.Sleeping, p.Sleeping)
	case strings.HasSuffix(name, "-models.json"):
		m, err := telemetry.ParseModels(b)
		if err != nil {
			t.Fatal(err)
		}
		if want.Model != "" {
			want.Models, want.MaxModelLen = []string{want.Model}, want.Context
		}
		diff(t, "models", want.Models, m.IDs)
		diff(t, "length", want.MaxModelLen, m.MaxModelLen)
	default:
		t.Fatalf("no parser is known for %s: add it here", name)
	}
}

func diff(t *testing.T, what string, want, got any) {
	t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

func checkSample(t *testing.T, s telemetry.Sample, want expected) {
	t.Helper()
	got := map[int]expectedRank{}
	sum := 0
	for _, r := range s.Ranks {
		got[r.Rank] = expectedRank{r.Running, r.Waiting, r.KVUsage, r.KVUsedTokens, r.KVCapacityTokens, r.MaxRunning}
		if r.Running != nil {
			sum += *r.Running
		}
	}
	diff(t, "ranks", want.Ranks, got)
	for rank, counters := range want.Counters {
		var c telemetry.Counters
		for _, r := range s.Ranks {
			if r.Rank == rank {
				c = r.Counters
			}
		}
		for name, v := range counters {
			p, ok := map[string]*int64{"preemptions": c.Preemptions, "generation_tokens": c.GenerationTokens, "prompt_tokens": c.PromptTokens,
				"prefix_query_tokens": c.PrefixQueryTokens, "prefix_hit_tokens": c.PrefixHitTokens, "steps": c.Steps}[name]
			if !ok || p == nil || *p != v {
				t.Errorf("rank %d %s: got %v, want %d", rank, name, p, v)
			}
		}
	}
	if want.Complete != nil && s.Complete() != *want.Complete {
		t.Errorf("complete %v, want %v (%v)", s.Complete(), *want.Complete, s.Problems)
	}
	if want.Awake != nil {
		diff(t, "awake", want.Awake, s.Awake)
	}
	if want.BlockSize != nil {
		diff(t, "block size", want.BlockSize, s.BlockSize)
	}
	if want.Total != nil && sum != *want.Total {
		t.Errorf("running over all ranks is %d, want %d", sum, *want.Total)
	}
	if len(s.Problems) > 0 {
		t.Errorf("problems: %v", s.Problems)
	}
}

func checkDelta(t *testing.T, before []byte, after telemetry.Sample, want expected) {
	t.Helper()
	first, _, err := telemetry.ParseMetrics(before)
	if err != nil {
		t.Fatal(err)
	}
	tr := telemetry.NewTracker(telemetry.TrackerConfig{})
	tr.Observe(first, 0, 0)
	r := tr.Observe(after, time.Second, 0)
	if r.Restarted != want.Delta.Restarted || r.Preempted != want.Delta.Preemptions {
		t.Errorf("restarted %v, preemptions +%d; want %+v", r.Restarted, r.Preempted, *want.Delta)
	}
}

func checkServerInfo(t *testing.T, b []byte, want expected) {
	t.Helper()
	i, err := telemetry.ParseServerInfo(b)
	if err != nil {
		t.Fatal(err)
	}
	diff(t, "ranks", want.DPRanks, &i.Ranks)
	diff(t, "capacity", want.CapacityTokens, i.CapacityTokens)
	diff(t, "slots", want.MaxRunning, i.MaxRunning)
	diff(t, "block size", want.BlockSize, i.BlockSize)
	if want.WeightVersion != "" {
		diff(t, "weights", want.WeightVersion, i.WeightVersion)
	}
	var ev *struct {
		Ports     []int
		LoadPorts []int `json:"load_ports"`
	}
	if err := json.Unmarshal(want.KVEvents, &ev); err != nil {
		t.Fatal(err)
	}
	if (ev == nil) != (i.KVEvents == nil) {
		t.Fatalf("kv events %+v, want %s", i.KVEvents, want.KVEvents)
	}
	if ev == nil {
		return
	}
	base, _ := url.Parse("http://engine-7:30000")
	for r, port := range ev.Ports {
		diff(t, "endpoint", "tcp://engine-7:"+itoa(port), i.KVEvents.Endpoint(base, r))
	}
	for r, port := range ev.LoadPorts {
		diff(t, "load endpoint", "tcp://engine-7:"+itoa(port), i.KVEvents.LoadEndpoint(base, r))
	}
}

func itoa(n int) string { b, _ := json.Marshal(n); return string(b) }

func checkSources(t *testing.T, b []byte, raw json.RawMessage) {
	t.Helper()
	var want map[int]struct {
		Endpoint string
		Replay   bool
	}
	if err := json.Unmarshal(raw, &want); err != nil {
		t.Fatal(err)
	}
	got, err := telemetry.ParseEventSources(b)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(want) {
		t.Errorf("got %v, want %v", got, want)
	}
	for rank, w := range want {
		if g := got[rank]; g.Endpoint != w.Endpoint || (g.Replay != "") != w.Replay {
			t.Errorf("rank %d: got %+v, want %+v", rank, g, w)
		}
	}
}

func TestEveryLoadMessageReadsAsExpected(t *testing.T) {
	checkLoadMessages(t, filepath.Join("testdata", "sglang_load.json"))
}

func checkLoadMessages(t *testing.T, path string) {
	t.Helper()
	var cases []struct {
		Name   string
		Frames []string `json:"frames_hex"`
		Expect struct {
			Malformed       bool
			Running         int64
			Waiting         int64
			Used            int64  `json:"used_tokens"`
			Capacity        *int64 `json:"capacity_tokens"`
			InPayload       *int64 `json:"rank_in_payload"`
			WaitingUncached *int64 `json:"waiting_uncached_tokens"`
			UsedPlusQueued  *int64 `json:"used_plus_queued_tokens"`
			MaxRunning      *int64 `json:"max_running"`
			PrefillUncached *int64 `json:"prefill_uncached_tokens_total"`
			PrefillBusyUS   *int64 `json:"prefill_busy_us_total"`
		}
	}
	if err := json.Unmarshal(read(t, path), &cases); err != nil || len(cases) == 0 {
		t.Fatal(len(cases), err)
	}
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			got, err := telemetry.ParseLoadStat(unhex(t, c.Frames[2]))
			if c.Expect.Malformed {
				if err == nil {
					t.Fatalf("accepted as %+v", got)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			e := c.Expect
			diff(t, "message", telemetry.LoadStat{Source: got.Source, Running: e.Running, Waiting: e.Waiting, Used: e.Used, Capacity: e.Capacity,
				InPayload: e.InPayload, WaitingUncached: e.WaitingUncached, UsedPlusQueued: e.UsedPlusQueued, MaxRunning: e.MaxRunning,
				PrefillUncached: e.PrefillUncached, PrefillBusyUS: e.PrefillBusyUS}, got)
			r, problems := got.Rank(3)
			if known := r.Running != nil; known != (e.Capacity != nil || e.Running > 0) || len(problems) > 0 || r.Rank != 3 {
				t.Errorf("as a rank: %+v, problems %v", r, problems)
			}
		})
	}
}

func ptr[T any](v T) *T { return &v }

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
