package subjects_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"pgregory.net/rapid"

	"github.com/rollbus/rollbus/subjects"
)

// anyText is what users put into free strings: line breaks, other scripts, NUL
// and broken UTF-8 included.
func anyText() *rapid.Generator[string] {
	return rapid.OneOf(
		rapid.Just(""),
		rapid.StringN(0, 40, subjects.MaxString),
		rapid.Just("a\r\nNats-Rollup: all"),
		rapid.Just(" 100%, \x00\xff\t"),
	)
}

func token() *rapid.Generator[string] { return rapid.StringMatching(`[a-z0-9][a-z0-9_-]{0,20}`) }

func count() *rapid.Generator[int] { return rapid.IntRange(0, subjects.MaxTokenCount) }

func maybe[T any](g *rapid.Generator[T]) *rapid.Generator[*T] { return rapid.Ptr(g, true) }

// overTheWire is what arrives: a header is text with line breaks.
func overTheWire(t *rapid.T, h nats.Header) nats.Header {
	size := 0
	for k, vs := range h {
		for _, v := range vs {
			size += len(k) + len(v) + 4
			if strings.TrimSpace(v) != v || strings.ContainsAny(v, "\r\n") {
				t.Fatalf("%s: %q does not survive as a header", k, v)
			}
		}
	}
	if size > 64<<10 {
		t.Fatalf("%d bytes of headers: NATS refuses more than 64 KiB", size)
	}
	return h
}

func TestAReservationsFactsSurviveTheWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := subjects.Held{
			Engine: "e1", Job: "j", ID: "1",
			State: rapid.SampledFrom([]subjects.State{subjects.StateBound, subjects.StateReturned, subjects.StateExternal}).Draw(t, "state"),
			Bind:  rapid.IntRange(1, subjects.MaxBind).Draw(t, "bind"), Burnt: rapid.IntRange(0, 9).Draw(t, "burnt"),
			Epoch: anyText().Draw(t, "epoch"), LeftMS: rapid.Int64Range(0, 1<<40).Draw(t, "left"),
			Tokens: count().Draw(t, "tokens"), PromptTokens: count().Draw(t, "prompt"), MaxTokens: count().Draw(t, "max"),
			Lane:   rapid.SampledFrom(append(subjects.Lanes[:], "")).Draw(t, "lane"),
			Reader: token().Draw(t, "reader"), Group: anyText().Draw(t, "group"), Trajectory: anyText().Draw(t, "trajectory"),
			Turn: rapid.IntRange(0, 99).Draw(t, "turn"), Affinity: anyText().Draw(t, "affinity"),
			Tried:      rapid.SliceOfN(token(), 0, subjects.MaxTried).Draw(t, "tried"),
			Dispatcher: token().Draw(t, "dispatcher"), Policy: anyText().Draw(t, "policy"), Reason: anyText().Draw(t, "reason"),
			ReturnReason: anyText().Draw(t, "return"), Accepted: rapid.Int64Range(0, 1<<62).Draw(t, "accepted"),
			MaxAttempts: rapid.IntRange(0, 100).Draw(t, "attempts"), AttemptTimeoutMS: rapid.Int64Range(0, 1<<40).Draw(t, "timeout"),
			Weights:         rapid.SampledFrom([]string{"", "min=3", "exact=0", "min=1,max_staleness=2"}).Draw(t, "weights"),
			Rank:            maybe(rapid.IntRange(0, 64)).Draw(t, "rank"),
			PredictedCached: maybe(count()).Draw(t, "cached"),
			OwnerKey:        rapid.SampledFrom([]string{"", "00000000000000ff", "0123456789abcdef"}).Draw(t, "owner key"),
			Anchor:          rapid.Uint64().Draw(t, "anchor"), WeightVersion: maybe(rapid.Int64Range(-9, 1<<40)).Draw(t, "version"),
		}
		if len(in.Tried) == 0 {
			in.Tried = nil
		}
		out, err := subjects.HeldFromHeader("e1", "j", "1", overTheWire(t, in.Header()))
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(in, out); d != "" {
			t.Fatal(d)
		}
	})
}

func TestAReleaseAndAnAnswerSurviveTheWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rel := subjects.Released{
			Engine: "e1", Job: "j", ID: "1",
			Outcome: rapid.SampledFrom([]subjects.Outcome{"", subjects.OutcomeAnswered, subjects.OutcomeSuperseded, subjects.OutcomeRequeued,
				subjects.OutcomeExpired, subjects.OutcomeFailed, subjects.OutcomeCancelled}).Draw(t, "outcome"),
			Bind: count().Draw(t, "bind"), Epoch: anyText().Draw(t, "epoch"), Tokens: count().Draw(t, "tokens"),
			PromptTokens: count().Draw(t, "prompt"), CompletionTokens: maybe(count()).Draw(t, "completion"),
			CachedTokens: maybe(count()).Draw(t, "cached"), Group: anyText().Draw(t, "group"),
			Status: rapid.SampledFrom([]subjects.Status{"", subjects.Completed, subjects.Failed}).Draw(t, "ran"),
		}
		h := overTheWire(t, rel.Header())
		if h.Get(subjects.HdrKVOperation) != subjects.KVOperationDelete {
			t.Fatal("a release is no delete marker")
		}
		got, err := subjects.ReleasedFromHeader("e1", "j", "1", h)
		if d := cmp.Diff(rel, got); d != "" || err != nil {
			t.Fatal(d, err)
		}
		ans := subjects.Answer{
			Job: "j", ID: "1", Reader: "main",
			Status: rapid.SampledFrom([]subjects.Status{"", subjects.Completed, subjects.Truncated, subjects.Aborted, subjects.Failed,
				subjects.Cancelled, subjects.Expired, subjects.Stale, subjects.Rejected}).Draw(t, "status"),
			Bind: count().Draw(t, "bind2"), Epoch: anyText().Draw(t, "epoch2"), Engine: token().Draw(t, "engine"),
			PromptTokens: maybe(count()).Draw(t, "p"), CompletionTokens: maybe(count()).Draw(t, "c"), CachedTokens: maybe(count()).Draw(t, "k"),
			Group: anyText().Draw(t, "group2"), LeftMS: rapid.Int64Range(0, 1<<40).Draw(t, "left"),
		}
		gotA, err := subjects.AnswerFromHeader("j", "main", "1", overTheWire(t, ans.Header()))
		if d := cmp.Diff(ans, gotA); d != "" || err != nil {
			t.Fatal(d, err)
		}
	})
}

func drawFacts(t *rapid.T) subjects.Facts {
	f := subjects.Facts{
		Job: "j", ID: "1", Reader: token().Draw(t, "reader"), Lane: rapid.SampledFrom(subjects.Lanes[:]).Draw(t, "lane"),
		Model: anyText().Draw(t, "model"), LoRA: anyText().Draw(t, "lora"),
		PromptTokens: rapid.IntRange(1, subjects.MaxTokenCount).Draw(t, "prompt"), MaxTokens: rapid.IntRange(1, subjects.MaxTokenCount).Draw(t, "max"),
		ExpectedTokens: count().Draw(t, "expected"), Namespace: rapid.Uint64().Draw(t, "namespace"),
		BlockTokens: rapid.IntRange(0, subjects.MaxBlockTokens).Draw(t, "block"),
		Blocks:      rapid.SliceOfN(rapid.Uint64(), 0, subjects.MaxHeaderBlocks).Draw(t, "blocks"),
		Affinity:    anyText().Draw(t, "affinity"), Group: anyText().Draw(t, "group"), Trajectory: anyText().Draw(t, "trajectory"),
		Turn: rapid.IntRange(0, 99).Draw(t, "turn"), Step: rapid.Int64Range(0, 1<<60).Draw(t, "step"),
		WeightMin: maybe(rapid.Int64Range(0, 99)).Draw(t, "min"), WeightExact: maybe(rapid.Int64Range(0, 99)).Draw(t, "exact"),
		WeightStaleness: maybe(rapid.Int64Range(0, 99)).Draw(t, "staleness"), Rank: maybe(rapid.IntRange(0, 64)).Draw(t, "rank"),
		DeadlineMS: rapid.Int64Range(0, 24*3600*1000).Draw(t, "deadline"), AttemptTimeoutMS: rapid.Int64Range(0, 1<<40).Draw(t, "timeout"),
		MaxAttempts: rapid.IntRange(0, 100).Draw(t, "attempts"),
		Bind:        rapid.IntRange(0, 99).Draw(t, "bind"), Burnt: rapid.IntRange(0, 99).Draw(t, "burnt"),
		Tried:  rapid.SliceOfN(token(), 0, 5).Draw(t, "tried"),
		LeftMS: rapid.Int64Range(0, 1<<40).Draw(t, "left"), Accepted: rapid.Int64Range(0, 1<<62).Draw(t, "accepted"),
	}
	if len(f.Blocks) == 0 {
		f.Blocks = nil
	}
	if len(f.Tried) == 0 {
		f.Tried = nil
	}
	return f
}

func TestFactsSurviveTheWireAndOnlyRetryMayCount(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := drawFacts(t)
		h := overTheWire(t, in.Header())
		out, complete, err := subjects.FactsFromHeader("j", "1", "", h)
		if err != nil || !complete {
			t.Fatal(complete, err)
		}
		if d := cmp.Diff(in, out); d != "" {
			t.Fatal(d)
		}
		// The same headers on a submit: the trainer's word on attempts and
		// lanes counts for nothing.
		fresh, complete, err := subjects.FactsFromHeader("j", "1", subjects.LaneBatch, h)
		if err != nil || !complete {
			t.Fatal(complete, err)
		}
		want := in.Requeued(subjects.Facts{Lane: subjects.LaneBatch})
		if d := cmp.Diff(want, fresh); d != "" {
			t.Fatal(d)
		}
	})
}

func TestAMalformedHeaderIsNamedInTheError(t *testing.T) {
	ok := subjects.Held{State: subjects.StateBound, Bind: 1, LeftMS: 1000}
	for _, c := range []struct{ header, value string }{
		{subjects.HdrState, "asleep"}, {subjects.HdrState, ""}, {subjects.HdrBind, "-1"}, {subjects.HdrBind, "1e3"}, {subjects.HdrBind, ""},
		{subjects.HdrLeft, "99999999999999999999"}, {subjects.HdrLeft, ""}, {subjects.HdrTokens, "NaN"}, {subjects.HdrGroup, "%"}, {subjects.HdrGroup, "%G0"},
		{subjects.HdrGroup, strings.Repeat("x", 5000)}, {subjects.HdrReader, "A.B"}, {subjects.HdrLane, "fast"},
		{subjects.HdrTried, "e1,,e2"}, {subjects.HdrTried, strings.Repeat("e,", 100) + "e"}, {subjects.HdrWeights, "max=1"}, {subjects.HdrWeights, "min=1,min=2"},
		{subjects.HdrRank, "-1"}, {subjects.HdrRank, "70000"}, {subjects.HdrCachedTokens, ""},
	} {
		h := ok.Header()
		h[c.header] = []string{c.value}
		_, err := subjects.HeldFromHeader("e", "j", "1", h)
		if c.header == subjects.HdrCachedTokens {
			if err != nil {
				t.Errorf("an empty optional header: %v", err)
			}
			continue
		}
		if !errors.Is(err, subjects.ErrBadHeader) || !strings.Contains(err.Error(), c.header) {
			t.Errorf("%s: %.20q gave %v", c.header, c.value, err)
		}
	}
	h := ok.Header()
	h.Add(subjects.HdrBind, "2")
	if _, err := subjects.HeldFromHeader("e", "j", "1", h); !errors.Is(err, subjects.ErrBadHeader) {
		t.Errorf("two bind numbers: %v", err)
	}
}

func TestASubmitWithAGuardOfItsOwnIsRefused(t *testing.T) {
	for _, name := range []string{"Nats-Expected-Last-Sequence", "nats-expected-stream", "Nats-Expected-Last-Subject-Sequence-Subject"} {
		_, _, err := subjects.FactsFromHeader("j", "1", subjects.LaneNormal, nats.Header{name: {"0"}})
		if !errors.Is(err, subjects.ErrBadHeader) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAPlainSubmitNeedsItsBodyDecoded(t *testing.T) {
	f, complete, err := subjects.FactsFromHeader("j", "1", subjects.LaneNormal, nil)
	if err != nil || complete || f.Key() != "j.1" {
		t.Errorf("%v %v %v", f, complete, err)
	}
	if _, _, err := subjects.FactsFromHeader("j", "1", "", nil); !errors.Is(err, subjects.ErrBadHeader) {
		t.Errorf("a requeued message without a lane: %v", err)
	}
}

func FuzzFactsFromHeader(f *testing.F) {
	f.Add(subjects.HdrBlocks, "AAAAAAAAAAA=", subjects.HdrTried, "e1,e2", true)
	f.Add(subjects.HdrWeights, "min=1,exact=2", subjects.HdrGroup, "%41%", false)
	f.Add(subjects.HdrPromptTokens, "12", subjects.HdrMaxTokens, "0x1", false)
	f.Fuzz(func(t *testing.T, n1, v1, n2, v2 string, retry bool) {
		lane := subjects.LaneNormal
		if retry {
			lane = ""
		}
		h := nats.Header{n1: {v1}, n2: {v2}, subjects.HdrLane: {"batch"}, subjects.HdrPromptTokens: {"5"}, subjects.HdrMaxTokens: {"5"}, subjects.HdrReader: {"main"}}
		facts, complete, err := subjects.FactsFromHeader("j", "1", lane, h)
		if err != nil {
			if complete {
				t.Fatal("complete in spite of an error")
			}
			return
		}
		if facts.PromptTokens < 0 || facts.MaxTokens < 0 || facts.LeftMS < 0 || len(facts.Blocks) > subjects.MaxHeaderBlocks || len(facts.Tried) > subjects.MaxTried {
			t.Fatalf("out of bounds: %+v", facts)
		}
		again, _, err := subjects.FactsFromHeader("j", "1", lane, facts.Header())
		if err != nil {
			t.Fatalf("facts that were read do not write: %v", err)
		}
		if d := cmp.Diff(facts, again); facts.Reader != "" && d != "" {
			t.Fatal(d)
		}
	})
}
