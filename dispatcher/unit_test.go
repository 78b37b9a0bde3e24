package dispatcher

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate/natstest"
)

func TestEveryComplaintAboutAConfigurationIsMadeAtOnce(t *testing.T) {
	cfg := Config{Pool: "Bad Pool", Name: "x.y"}.WithDefaults()
	cfg.Timings.AckWait = time.Second
	cfg.Timings.Attempt = -1
	cfg.Timings.Core.Lost = cfg.Timings.Core.Suspect
	cfg.Limits.Events = -3
	err := cfg.Validate()
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{"pool", "dispatcher name", "AckWait", "Attempt", "Core.Lost", "Events"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no complaint about %s in:\n%v", want, err)
		}
	}
	if _, err := New(cfg, nil); err == nil {
		t.Error("New accepted it")
	}
}

func TestTheDefaultsAreValidAndTwoDispatchersDifferInName(t *testing.T) {
	a, b := Config{Pool: "p"}.WithDefaults(), Config{Pool: "p"}.WithDefaults()
	if err := errors.Join(a.Validate(), b.Validate()); err != nil {
		t.Fatal(err)
	}
	if a.Name == b.Name {
		t.Fatalf("both are called %s", a.Name)
	}
}

func TestTimingsScaleTogether(t *testing.T) {
	def := DefaultTimings()
	tenth := def.Scale(0.1)
	if err := tenth.Validate(); err != nil {
		t.Fatal(err)
	}
	n := 0
	eachDuration(reflect.ValueOf(&def).Elem(), reflect.ValueOf(&tenth).Elem(), "", func(name string, d, s reflect.Value) {
		n++
		if s.Int() != int64(float64(d.Int())*0.1) || d.Int() == 0 {
			t.Errorf("%s: %v became %v", name, time.Duration(d.Int()), time.Duration(s.Int()))
		}
	})
	if n < 30 {
		t.Errorf("%d durations were found", n)
	}
	var zero Timings
	zero.Heartbeat = time.Second
	if filled := zero.WithDefaults(); filled.Heartbeat != time.Second || filled.AckWait != def.AckWait || filled.Core.Lost != def.Core.Lost {
		t.Errorf("filled in: %+v", filled)
	}
}

func TestAMailboxLosesNothingAndKeepsTheOrderOfOnePutter(t *testing.T) {
	m := newMailbox[int]()
	const n = 20_000
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	var mu sync.Mutex
	got := make([]bool, n)
	taken := 0
	for range 4 {
		wg.Go(func() {
			last := -1
			for {
				v, ok := m.take(ctx)
				if !ok {
					return
				}
				if v <= last {
					t.Errorf("one taker got %d after %d", v, last)
				}
				last = v
				mu.Lock()
				got[v] = true
				if taken++; taken == n {
					cancel()
				}
				mu.Unlock()
			}
		})
	}
	for i := range n {
		m.put(i)
	}
	wg.Wait()
	if i := slices.Index(got, false); i >= 0 || m.len() != 0 {
		t.Fatalf("%d was lost, %d are left", i, m.len())
	}
}

func TestNaksSayTheirDelayInNanoseconds(t *testing.T) {
	for d, want := range map[time.Duration]string{0: "-NAK", -1: "-NAK", 1500 * time.Millisecond: `-NAK {"delay": 1500000000}`} {
		if got := string(nakBody(d)); got != want {
			t.Errorf("%v: %s", d, got)
		}
	}
}

func TestAPeerHasATaskUntilItFallsSilentOrLeaves(t *testing.T) {
	p := newPeers("a", time.Hour)
	if p.first("x") {
		t.Fatal("a task was taken before anybody was known")
	}
	p.swap(nil)
	if !p.first("x") {
		t.Fatal("alone, and not the first")
	}
	higher := ""
	for _, n := range []string{"b", "c", "d", "e", "f", "g", "h", "i"} {
		if rank("x", n) > rank("x", "a") {
			higher = n
		}
	}
	p.put(higher)
	if p.first("x") {
		t.Fatal("first beside a higher one")
	}
	p.seen[higher] = time.Now().Add(-2 * time.Hour)
	if !p.first("x") {
		t.Fatal("a silent peer keeps the task")
	}
	p.put(higher)
	p.gone(higher)
	if !p.first("x") {
		t.Fatal("a peer that left keeps the task")
	}
}

func TestTheServersClockNeverGoesBack(t *testing.T) {
	var c serverClock
	if c.now() != 0 || c.recent(time.Hour) {
		t.Fatal("a clock before its first sample")
	}
	base := time.Unix(1_000_000, 0)
	c.observe(base)
	first := c.now()
	c.observe(base.Add(-time.Hour)) // another server, or a step
	if second := c.now(); second < first {
		t.Fatalf("it went back from %d to %d", first, second)
	}
	c.observe(base.Add(time.Hour))
	if c.now() < base.Add(time.Hour).UnixNano() || !c.recent(time.Hour) {
		t.Fatal("it does not follow its server")
	}
}

func get(t *testing.T, srv *httptest.Server, path string) (int, string) {
	t.Helper()
	resp, err := srv.Client().Get(srv.URL + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	return resp.StatusCode, string(must(io.ReadAll(resp.Body)))
}

func TestHealthAndReadinessSayWhatIsMissing(t *testing.T) { // scenario B9
	b := newBench(t)
	nc := b.node.Conn(t)
	d := must(newDispatcher(b.config().WithDefaults(), nc, &fakeCore{}))
	srv := httptest.NewServer(d.Handler())
	defer srv.Close()
	if code, text := get(t, srv, "/readyz"); code != http.StatusServiceUnavailable ||
		!strings.Contains(text, "view reservations") || !strings.Contains(text, `"streams"`) {
		t.Fatalf("before Run: %d %s", code, text)
	}
	ended := make(chan error, 1)
	go func() { ended <- d.Run(context.Background()) }()
	natstest.Eventually(t, within, "readiness", func() bool { code, _ := get(t, srv, "/readyz"); return code == http.StatusOK })
	if code, _ := get(t, srv, "/healthz"); code != http.StatusOK {
		t.Fatalf("health: %d", code)
	}
	if err := b.node.Running().DisableJetStream(); err != nil {
		t.Fatal(err)
	}
	natstest.Eventually(t, within, "a complaint about JetStream", func() bool {
		code, text := get(t, srv, "/readyz")
		return code == http.StatusServiceUnavailable && strings.Contains(text, string(partQueues)) && strings.Contains(text, string(partRegistration))
	})
	b.node.Restart()
	natstest.Eventually(t, within, "readiness again", func() bool { code, _ := get(t, srv, "/readyz"); return code == http.StatusOK })
	if err := d.Stop(b.ctx()); err != nil {
		t.Fatal(err)
	}
	<-ended
	if code, text := get(t, srv, "/healthz"); code != http.StatusServiceUnavailable {
		t.Fatalf("health after the end: %d %s", code, text)
	}
	if code, text := get(t, srv, "/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(text, "stopping") {
		t.Fatalf("readiness after the end: %d %s", code, text)
	}
}

func TestMetricsAreWellFormedAndBounded(t *testing.T) {
	m := newMetrics()
	for i := range 1000 {
		m.count(core.Count{Name: "requeues", Label: strings.Repeat("x", i%60), N: 1})
		m.count(core.Count{Name: "n" + strings.Repeat("y", i%70), N: 2})
		m.count(core.Count{Name: "Bad-Name", N: 1})
	}
	m.decided(core.Decision{Mode: "off", Reason: "least_requests"})
	all, err := m.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	labels := 0
	for _, f := range all {
		if f.GetHelp() == "" {
			t.Errorf("%s says nothing of itself", f.GetName())
		}
		if f.GetName() == "rollbus_dispatcher_core_requeues_total" {
			labels = len(f.GetMetric())
		}
	}
	if labels == 0 || labels > maxCoreLabels+1 || len(m.core.by) > maxCoreNames {
		t.Errorf("%d labels, %d names", labels, len(m.core.by))
	}
	problems, err := promlint.NewWithMetricFamilies(all).Lint()
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	if err != nil {
		t.Error(err)
	}
}

func TestDecisionsArePublishedAndCopied(t *testing.T) {
	b := newBench(t)
	f := &fakeCore{}
	cfg := b.config()
	var hooked []string
	cfg.Decisions = func(d core.Decision) { hooked = append(hooked, d.Rollout) }
	d, _ := b.running(cfg, f)
	b.ready(d)
	got := make(chan *nats.Msg, 4)
	sub, err := b.nc.ChanSubscribe(b.pool.Decision(), got)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := b.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	record := core.Decision{
		Rollout: "j.0001", Bind: 1, Engine: "e1", Policy: "kv_tokens", Mode: "enforce", Reason: "x",
		Candidates: []core.Considered{{Engine: "e1", Score: 1, Parts: map[string]float64{"load": 1}}},
		Filtered:   map[string]int{"paused": 2},
	}
	kept := copyDecision(record)
	// The core uses its record again for the next decision.
	record.Candidates[0].Engine, record.Candidates[0].Parts["load"] = "overwritten", -1
	record.Filtered["paused"] = -1
	d.decisions.put(line{Decision: kept})
	f.do(core.Decision{Rollout: "j.0002", Mode: "off", Reason: "y"})
	var first line
	if err := json.Unmarshal((<-got).Data, &first); err != nil {
		t.Fatal(err)
	}
	if first.Candidates[0].Engine != "e1" || first.Candidates[0].Parts["load"] != 1 || first.Filtered["paused"] != 2 {
		t.Errorf("first %+v", first)
	}
	var second line
	if err := json.Unmarshal((<-got).Data, &second); err != nil {
		t.Fatal(err)
	}
	if second.Rollout != "j.0002" || second.Dispatcher != d.Name() || second.AtNS == 0 {
		t.Errorf("second %+v", second)
	}
	if err := d.Stop(b.ctx()); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(hooked, []string{"j.0002"}) {
		t.Errorf("hooked %v", hooked)
	}
}

func TestDecisionsThatNobodyTakesAreDropped(t *testing.T) {
	b := newBench(t)
	l := newLines(b.nc, b.pool.Decision(), 2, newMetrics())
	for range 5 {
		l.put(line{})
	}
	if len(l.in) != 2 {
		t.Fatalf("%d lines wait", len(l.in))
	}
}

// steps is a Recorder.
type steps struct {
	mu     sync.Mutex
	last   time.Duration
	events []core.Event
	back   bool
}

func (s *steps) Record(now time.Duration, ev core.Event, _ []core.Effect) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.back = s.back || now < s.last
	s.last = now
	s.events = append(s.events, ev)
}

func TestTheRecorderSeesEveryStepInOrder(t *testing.T) {
	b := newBench(t)
	rec, f := &steps{}, &fakeCore{}
	cfg := b.config()
	cfg.Recorder = rec
	d, _ := b.running(cfg, f)
	b.ready(d)
	if err := d.Stop(b.ctx()); err != nil {
		t.Fatal(err)
	}
	var got []core.Event
	for _, e := range rec.events {
		if _, ok := e.(core.Tick); !ok {
			got = append(got, e)
		}
	}
	if rec.back || !reflect.DeepEqual(got, f.events) || len(rec.events) != len(got)+f.ticks {
		t.Fatalf("%d steps recorded, %d events and %d ticks taken; time went back: %v", len(rec.events), len(f.events), f.ticks, rec.back)
	}
}

func TestOnlyARealCoreCanBeInspected(t *testing.T) {
	b := newBench(t)
	d, _ := b.faked()
	if err := d.Inspect(b.ctx(), func(*core.Core) {}); !errors.Is(err, ErrNoCore) {
		t.Fatalf("inspect: %v", err)
	}
	real, _ := b.running(b.config(), nil)
	var missing []core.ViewKind
	natstest.Eventually(t, within, "a core that has seen every view", func() bool {
		if err := real.Inspect(b.ctx(), func(c *core.Core) { missing = c.Missing() }); err != nil {
			t.Fatal(err)
		}
		return len(missing) == 0
	})
	if err := real.Stop(b.ctx()); err != nil {
		t.Fatal(err)
	}
	if err := real.Inspect(b.ctx(), func(*core.Core) {}); !errors.Is(err, ErrStopped) {
		t.Fatalf("inspect after the end: %v", err)
	}
}

func TestEveryCountOfTheCoreSaysWhatItCounts(t *testing.T) {
	files, err := filepath.Glob("core/*.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("the core's files: %v, %v", files, err)
	}
	counted := regexp.MustCompile(`\bcount\("([a-z_]+)"`)
	names := 0
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range counted.FindAllStringSubmatch(string(b), -1) {
			names++
			if coreHelp[m[1]] == "" {
				t.Errorf("%s counts %s, and the metric's help does not say what that is: name it in coreHelp", f, m[1])
			}
		}
	}
	if names < 10 {
		t.Errorf("only %d counts were found: the test does not see them any more", names)
	}
}
