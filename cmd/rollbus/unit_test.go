package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// fakePart ends when it is stopped, or at once when its stop is hasty.
type fakePart struct {
	name     string
	order    *[]string
	slow     bool // a soft stop of it does not end by itself
	stopping chan struct{}
	end      chan error
}

func newFake(name string, order *[]string, slow bool) *fakePart {
	return &fakePart{name: name, order: order, slow: slow, stopping: make(chan struct{}), end: make(chan error, 1)}
}

func (f *fakePart) part() part {
	return part{
		name: f.name,
		run:  func(context.Context) error { return <-f.end },
		stop: func(ctx context.Context) error {
			*f.order = append(*f.order, f.name)
			close(f.stopping)
			if f.slow {
				<-ctx.Done()
			}
			f.end <- nil
			return nil
		},
	}
}

func supervised(t *testing.T, ctx context.Context, signals chan os.Signal, parts ...*fakePart) <-chan error {
	t.Helper()
	done := make(chan error, 1)
	var all []part
	for _, p := range parts {
		all = append(all, p.part())
	}
	go func() { done <- superviseWith(ctx, slog.New(slog.DiscardHandler), time.Minute, signals, all) }()
	return done
}

func receive[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(10 * time.Second):
		t.Fatalf("no %s within 10 s", what)
		panic("unreachable")
	}
}

func TestASignalStopsPartsInReverseOrder(t *testing.T) {
	var order []string
	signals := make(chan os.Signal, 1)
	done := supervised(t, t.Context(), signals, newFake("http", &order, false), newFake("dispatcher", &order, false))
	signals <- syscall.SIGTERM
	if err := receive(t, done, "end"); err != nil {
		t.Error(err)
	}
	if got := strings.Join(order, " "); got != "dispatcher http" {
		t.Errorf("stopped in the order %s", got)
	}
}

func TestASecondSignalMakesAStopHasty(t *testing.T) {
	var order []string
	signals := make(chan os.Signal, 2)
	agent := newFake("agent", &order, true)
	done := supervised(t, t.Context(), signals, agent)
	signals <- syscall.SIGTERM
	receive(t, agent.stopping, "soft stop")
	select {
	case err := <-done:
		t.Fatalf("a soft stop did not wait for what runs: %v", err)
	default:
	}
	signals <- syscall.SIGTERM
	if err := receive(t, done, "end after the second signal"); err != nil {
		t.Error(err)
	}
}

func TestAPartThatEndsByItselfStopsTheOthersAndIsNamed(t *testing.T) {
	var order []string
	web, d := newFake("http", &order, false), newFake("dispatcher", &order, false)
	broken := errors.New("connection closed for good")
	done := supervised(t, t.Context(), nil, web, d)
	d.end <- broken
	err := receive(t, done, "end")
	if !errors.Is(err, broken) || !strings.Contains(err.Error(), "dispatcher: ") {
		t.Errorf("got %v", err)
	}
	receive(t, web.stopping, "stop of the other part")
}

func TestTheEndOfTheContextIsASoftStop(t *testing.T) {
	var order []string
	ctx, cancel := context.WithCancel(t.Context())
	done := supervised(t, ctx, nil, newFake("dispatcher", &order, false))
	cancel()
	if err := receive(t, done, "end"); err != nil {
		t.Error(err)
	}
}

func TestHealthIsServedWithMetricsAndTheReasonOfUnreadiness(t *testing.T) {
	var ready error = errors.New("engine e1 is registered but not counted")
	h := web(prometheus.NewGauge(prometheus.GaugeOpts{Name: "rollbus_test", Help: "x"}), func() error { return ready })
	p, addr, err := httpPart("127.0.0.1:0", h)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- p.run(t.Context()) }()
	get := func(path string) (int, string) {
		res, err := http.Get("http://" + addr + path)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return res.StatusCode, string(b)
	}
	if code, body := get("/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "engine e1") {
		t.Errorf("/readyz: %d %q", code, body)
	}
	ready = nil
	for path, want := range map[string]string{"/readyz": "ok", "/healthz": "ok", "/metrics": "rollbus_test 0"} {
		if code, body := get(path); code != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%s: %d without %q", path, code, want)
		}
	}
	http.DefaultClient.CloseIdleConnections()
	if err := p.stop(t.Context()); err != nil {
		t.Error(err)
	}
	if err := receive(t, done, "end of the server"); err != nil {
		t.Error(err)
	}
}

func TestEngineSpecs(t *testing.T) {
	good := map[string]engineSpec{
		"sim":                             {name: "e1", kind: "sim"},
		"fast=sim":                        {name: "fast", kind: "sim"},
		"openai=http://127.0.0.1:8000":    {name: "e1", kind: "openai", url: "http://127.0.0.1:8000"},
		"gpu0=openai=https://host:8000/v": {name: "gpu0", kind: "openai", url: "https://host:8000/v"},
	}
	for spec, want := range good {
		got, err := parseEngines([]string{spec}, true, ordinal)
		if err != nil || len(got) != 1 || got[0] != want {
			t.Errorf("%s: got %+v, %v", spec, got, err)
		}
	}
	for _, spec := range []string{"", "openai", "openai=", "http://x", "tgi=http://x", "GPU=openai=http://x", "_a=openai=http://x", "openai=http://", "a=b=openai=http://x"} {
		if got, err := parseEngines([]string{spec}, true, ordinal); err == nil || exitCode(err) != exitUsage {
			t.Errorf("%q: got %+v, %v", spec, got, err)
		}
	}
	if _, err := parseEngines([]string{"a=sim", "a=sim"}, true, ordinal); err == nil {
		t.Error("two engines of one name were accepted")
	}
	if _, err := parseEngines([]string{"sim"}, false, ordinal); err == nil {
		t.Error("an agent was given an engine that is simulated elsewhere")
	}
}

func TestSettingsChangeAsAWholeOrNotAtAll(t *testing.T) {
	base := subjects.Settings{SchemaVersion: 1, Policy: "kv_tokens", JobWeights: map[string]float64{"a": 2}}
	got, err := change(base, []string{"max_attempts=5", "deadline=2h", "job_weights.b=3", "job_weights.a=", "mode=enforce", "paused=true"})
	if err != nil {
		t.Fatal(err)
	}
	if got.MaxAttempts != 5 || got.Deadline.D() != 2*time.Hour || got.JobWeights["b"] != 3 || len(got.JobWeights) != 1 || got.Mode != "enforce" || !got.Paused || got.Policy != "kv_tokens" {
		t.Errorf("got %+v", got)
	}
	for _, bad := range []string{"max_attempts", "max_attempts=two", "max_attempts=-1", "max_attempts=1.5", "deadline=soon", "deadline=48h", "colour=red", "mode=maybe", "job_weights.b=-1", "policy=No!"} {
		if got, err := change(base, []string{"prefetch=3", bad}); err == nil {
			t.Errorf("%s was accepted: %+v", bad, got)
		}
	}
	_, err = change(base, []string{"colour=red", "shape=round"})
	if err == nil || !strings.Contains(err.Error(), "colour") || !strings.Contains(err.Error(), "shape") {
		t.Errorf("both unknown settings must be named: %v", err)
	}
}

func TestExitCodesFollowWhatWentWrong(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want int
	}{
		{nil, exitOK},
		{errors.New("anything"), exitNo},
		{fmt.Errorf("read: %w", kvstate.ErrGone), exitNotFound},
		{fmt.Errorf("read: %w", jetstream.ErrStreamNotFound), exitNotFound},
		{nats.ErrAuthorization, exitAuth},
		{nats.ErrPermissionViolation, exitAuth},
		{nats.ErrNoServers, exitUnavailable},
		{context.DeadlineExceeded, exitUnavailable},
		{kvstate.ErrUnavailable, exitUnavailable},
		{subjects.ErrBadName, exitUsage},
		{subjects.ErrInvalid, exitUsage},
		{errInterrupted, exitInterrupted},
		{fmt.Errorf("x: %w", coded(exitAuth, "no: %w", nats.ErrNoServers)), exitAuth},
	} {
		if got := exitCode(tt.err); got != tt.want {
			t.Errorf("%v: exit code %d, want %d", tt.err, got, tt.want)
		}
	}
}

func TestTablesAlignAndFormatsAgree(t *testing.T) {
	type row struct {
		Name string `json:"name"`
		N    int    `json:"n"`
	}
	rows := []row{{"a", 1}, {"longer<", 1000}}
	show := func(format string) string {
		var b bytes.Buffer
		if err := list(printer{&b, format}, []string{"NAME", ">N"}, rows, func(r row) []string { return []string{r.Name, fmt.Sprint(r.N)} }); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	for format, want := range map[string]string{
		formatTable: "NAME        N\na           1\nlonger<  1000\n",
		formatJSONL: "{\"name\":\"a\",\"n\":1}\n{\"name\":\"longer<\",\"n\":1000}\n",
		formatJSON:  "[\n  {\n    \"name\": \"a\",\n    \"n\": 1\n  },\n  {\n    \"name\": \"longer<\",\n    \"n\": 1000\n  }\n]\n",
	} {
		if got := show(format); got != want {
			t.Errorf("%s:\n%q\nwant\n%q", format, got, want)
		}
	}
	rows = nil
	if got := show(formatJSON); got != "[]\n" {
		t.Errorf("nothing as JSON is %q", got)
	}
}
