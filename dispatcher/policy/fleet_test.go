package policy_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// failer is what helpers need of a test, a benchmark or a property.
type failer interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// knobs is short for the pool's knobs.
type knobs = map[string]float64

func settings(t failer, name, mode string, k knobs) policy.Settings {
	t.Helper()
	s, err := policy.Resolve(subjects.Settings{Policy: name, Mode: mode, Knobs: k})
	if err != nil {
		t.Fatalf("the test's settings: %v", err)
	}
	return s
}

func decider(t failer, name, mode string, k knobs) *policy.Decider {
	t.Helper()
	d, err := policy.NewDecider(settings(t, name, mode, k))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func enforcing(t failer, name string, k knobs) *policy.Decider {
	return decider(t, name, subjects.ModeEnforce, k)
}

// engine is a ready candidate with 38 slots and a million tokens of KV.
func engine(name string) policy.Candidate {
	return policy.Candidate{
		Engine: name, Epoch: "x", Model: "m", MaxModelLen: 131072, CapacityTokens: 1_000_000, Ranks: 1, Slots: 38, Window: 40,
	}
}

func engines(n int) []policy.Candidate {
	out := make([]policy.Candidate, n)
	for i := range out {
		out[i] = engine(fmt.Sprintf("e%d", i))
	}
	return out
}

// reports makes every candidate report: idle unless what is reserved runs.
func reports(cs []policy.Candidate) []policy.Candidate {
	for i := range cs {
		c := &cs[i]
		c.MatchKnown = true
		c.Observed = &policy.Observed{
			Running: min(c.ReservedRequests, c.Slots), Waiting: max(0, c.ReservedRequests-c.Slots),
			UsedTokens: c.ReservedTokens, KVUsageWorst: float64(c.ReservedTokens) / float64(max(1, c.CapacityTokens)), MaxRunning: c.Slots,
		}
	}
	return cs
}

// request has 2,048 tokens and expects 512.
func request() policy.Request {
	return policy.Request{Rollout: "j.1", Model: "m", PromptTokens: 2048, MaxTokens: 2048, ExpectedTokens: 512, BlockTokens: 64, MayWait: time.Minute}
}

func input(cs []policy.Candidate, r policy.Request) *policy.Input {
	return &policy.Input{Dispatcher: "d1", Request: r, Candidates: cs}
}

// decide returns the chosen engine's name, "" for none, and the record.
func decide(d *policy.Decider, in *policy.Input) (string, *policy.Record) {
	var rec policy.Record
	if i := d.Decide(in, &rec); i >= 0 {
		return in.Candidates[i].Engine, &rec
	}
	return "", &rec
}

func explain(in *policy.Input, r *policy.Record) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s %s %s", r.Outcome, r.Reason, r.Basis, r.Detail)
	for i := range r.Candidates {
		s := &r.Candidates[i]
		fmt.Fprintf(&b, "\n  %s %s score %.4f", in.Candidates[s.Index].Engine, s.Filter, s.Score)
		for p, v := range s.Parts() {
			fmt.Fprintf(&b, " %s=%.4f", p, v)
		}
	}
	return b.String()
}

// wantEngine fails unless the decision is that engine for that reason.
func wantEngine(t *testing.T, d *policy.Decider, in *policy.Input, name string, why policy.Reason) {
	t.Helper()
	got, rec := decide(d, in)
	if got != name || rec.Reason != why {
		t.Fatalf("chosen %q (%s), want %q (%s)\n%s", got, rec.Reason, name, why, explain(in, rec))
	}
}

// fleet plays the dispatcher: it reserves what is decided, and retires it.
type fleet struct {
	in    policy.Input
	d     *policy.Decider
	rec   policy.Record
	picks uint64
}

func newFleet(d *policy.Decider, cs []policy.Candidate) *fleet {
	return &fleet{in: policy.Input{Dispatcher: "d1", Candidates: cs}, d: d}
}

// place decides for a request and reserves it; -1 = not placed.
func (f *fleet) place(r policy.Request) int {
	f.in.Request = r
	i := f.d.Decide(&f.in, &f.rec)
	if i >= 0 {
		f.picks++
		f.in.Candidates[i].LastPicked = f.picks
		f.add(i, r, 1)
	}
	return i
}

func (f *fleet) retire(i int, r policy.Request) { f.add(i, r, -1) }

func (f *fleet) add(i int, r policy.Request, sign int) {
	c := &f.in.Candidates[i]
	c.ReservedRequests += sign
	c.ReservedTokens += int64(sign * (r.PromptTokens + r.ExpectedTokens))
	c.ReservedPromptTokens += int64(sign * r.PromptTokens)
	if o := c.Observed; o != nil {
		o.NewerRequests = max(0, o.NewerRequests+sign)
		o.NewerTokens = max(0, o.NewerTokens+int64(sign*(r.PromptTokens+r.ExpectedTokens)))
		o.NewerPrefillTokens = max(0, o.NewerPrefillTokens+int64(sign*r.PromptTokens))
		o.UsedTokens += int64(sign * (r.PromptTokens + r.ExpectedTokens))
	}
}

// spread is the least and the most of the counts.
func spread(counts []int) (least, most int) {
	least, most = counts[0], counts[0]
	for _, n := range counts {
		least, most = min(least, n), max(most, n)
	}
	return least, most
}

func ptr[T any](v T) *T { return &v }
