package workeragent

import (
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/workeragent/engine"
)

// judging is a unit that only judges.
func judging(s subjects.Settings) *unit {
	a := &Agent{}
	s = s.WithDefaults()
	a.settings.Store(&s)
	return &unit{a: a, name: "e1"}
}

// scenario R18: one cause, one outcome, at whatever point it strikes.
func TestOneCauseHasOneOutcomeWheneverItStrikes(t *testing.T) {
	u := judging(subjects.Settings{})
	none := engine.Outcome{Kind: engine.Aborted}
	some := engine.Outcome{Kind: engine.Aborted, TokenIDs: []uint32{5, 6}, Text: "ab"}
	broken := engine.Outcome{Kind: engine.Failed, Code: "x", TokenIDs: []uint32{5}}
	for _, c := range []struct {
		cause  error
		status subjects.Status // of an answer
		reason string          // or of a return
		burn   int
	}{
		{&cancelledError{"enough"}, subjects.Cancelled, "", 0},
		{errExpired, subjects.Expired, "", 0},
		{errNoProgress, "", returnNoProgress, 1},
		{errAttemptTimeout, "", returnTimeout, 1},
		{errRestarted, "", returnRestarted, 1},
		{errHandBack, "", returnDraining, 0},
	} {
		for _, o := range []engine.Outcome{none, some, broken} {
			v := u.judge(&run{received: time.Now()}, request("1", 50), o, c.cause)
			switch {
			case c.status != "" && (v.answer == nil || v.answer.Status != c.status || len(v.answer.TokenIDs) != len(o.TokenIDs)):
				t.Errorf("%v after %d tokens: got %+v", c.cause, len(o.TokenIDs), v)
			case c.status == "" && (v.answer != nil || v.drop || v.reason != c.reason || v.burn != c.burn):
				t.Errorf("%v after %d tokens: got %+v", c.cause, len(o.TokenIDs), v)
			}
		}
		done := u.judge(&run{}, request("1", 50), engine.Outcome{Kind: engine.Completed, FinishReason: "stop", TokenIDs: []uint32{1}}, c.cause)
		if done.answer == nil || done.answer.Status != subjects.Completed {
			t.Errorf("a complete sample beside %v: got %+v", c.cause, done)
		}
	}
	if v := u.judge(&run{}, request("1", 50), some, errDropped); !v.drop {
		t.Errorf("a dropped run: got %+v", v)
	}
}

// scenario R14: what an engine cut is resumed, with the remaining budget, and
// rounds without any progress are bounded.
func TestWhatAnEngineCutGoesOnWhereItCan(t *testing.T) {
	u := judging(subjects.Settings{})
	cut := func(ids ...uint32) engine.Outcome {
		return engine.Outcome{Kind: engine.Aborted, Code: "c", TokenIDs: ids}
	}
	r := &run{res: kvstate.Reservation{Held: subjects.Held{Epoch: "1.0-m"}}}
	v := u.judge(r, request("1", 4), cut(7, 8), nil)
	if v.reason != "aborted:c" || v.burn != 0 || v.resume == nil || len(v.resume.TokenIDs) != 2 {
		t.Errorf("with output: got %+v", v)
	}
	if v := u.judge(r, request("1", 4), cut(), nil); v.burn != 1 || v.resume != nil {
		t.Errorf("without output: got %+v", v)
	}
	text := request("1", 4)
	text.PromptTokenIDs, text.Prompt = nil, "x"
	if v := u.judge(r, text, cut(7, 8), nil); v.burn != 1 || v.resume != nil {
		t.Errorf("of a text: got %+v", v)
	}
	one := 1
	scored := request("1", 4)
	scored.Sampling.Logprobs = &one
	if v := u.judge(r, scored, cut(7, 8), nil); v.resume != nil {
		t.Errorf("its logprobs would be lost: got %+v", v)
	}
	with := cut(7, 8)
	with.Logprobs = []byte(`{"tokens":["g","h"]}`)
	scored.Resume = &subjects.Resume{TokenIDs: []uint32{6}, Logprobs: json.RawMessage(`{"tokens":["f"]}`), Segments: []subjects.Segment{{Engine: "e0", End: 1}}}
	v = u.judge(r, scored, with, nil)
	if v.resume == nil || string(v.resume.Logprobs) != `{"tokens":["f","g","h"]}` || len(v.resume.TokenIDs) != 3 || len(v.resume.Segments) != 2 || v.resume.Segments[1].Start != 1 || v.resume.Segments[1].End != 3 {
		t.Errorf("cut twice: got %+v", v.resume)
	}
	// The last token is there, only its finish reason is not.
	full := u.judge(r, request("1", 2), cut(7, 8), nil)
	if full.answer == nil || full.answer.Status != subjects.Truncated || full.answer.FinishReason != "length" {
		t.Errorf("with every token: got %+v", full)
	}
}

func TestPartialOutputOfAFailureIsKeptOnlyWhereThePoolKeepsPartials(t *testing.T) {
	failed := engine.Outcome{Kind: engine.Failed, Code: "x", TokenIDs: []uint32{7}}
	for every, want := range map[int]bool{0: false, 16: true} {
		v := judging(subjects.Settings{PartialsEvery: every}).judge(&run{}, request("1", 4), failed, nil)
		if v.reason != "failed:x" || v.burn != 1 || (v.resume != nil) != want {
			t.Errorf("every %d: got %+v", every, v)
		}
	}
}

func TestAResumedAnswerIsTheWholeOne(t *testing.T) {
	u := judging(subjects.Settings{})
	cached := 3
	req := request("1", 10)
	req.Resume = &subjects.Resume{TokenIDs: []uint32{1, 2}, Segments: []subjects.Segment{{Engine: "e0", Epoch: "a", WeightVersion: "6", End: 2}}}
	r := &run{res: kvstate.Reservation{Held: subjects.Held{Epoch: "b"}}}
	got := u.judge(r, req, engine.Outcome{
		Kind: engine.Completed, FinishReason: "stop", TokenIDs: []uint32{3}, Text: "c", WeightVersion: "7",
		Usage: &subjects.Usage{PromptTokens: 6, CompletionTokens: 1, CachedTokens: &cached},
		Extra: map[string]json.RawMessage{"stop_reason": json.RawMessage("5")},
	}, nil).answer
	if len(got.TokenIDs) != 3 || got.Text != "" || got.Usage.PromptTokens != 4 || got.Usage.CompletionTokens != 3 || *got.Usage.CachedTokens != 3 || string(got.Extra["stop_reason"]) != "5" {
		t.Errorf("got %+v", got)
	}
	if len(got.Segments) != 2 || got.Segments[1] != (subjects.Segment{Engine: "e1", Epoch: "b", WeightVersion: "7", Start: 2, End: 3}) {
		t.Errorf("segments %+v", got.Segments)
	}
	// Where the engine tells its segments they stand, behind those of before.
	got = u.judge(r, req, engine.Outcome{
		Kind: engine.Completed, FinishReason: "stop", TokenIDs: []uint32{3, 4},
		Segments: []subjects.Segment{{WeightVersion: "7", End: 1}, {WeightVersion: "8", Start: 1, End: 2}},
	}, nil).answer
	if len(got.Segments) != 3 || got.Segments[2] != (subjects.Segment{Engine: "e1", Epoch: "b", WeightVersion: "8", Start: 3, End: 4}) {
		t.Errorf("segments %+v", got.Segments)
	}
}

func TestABodyThatWouldNotFitGoesBackWithoutItsOutput(t *testing.T) {
	req := request("1", 1<<20)
	req.PromptTokenIDs = nil
	req.Prompt = strings.Repeat("x", subjects.MaxRequestBytes-1000)
	if _, ok := subjects.WithResume(req, &subjects.Resume{TokenIDs: make([]uint32, 4096)}); ok {
		t.Error("a body over the limit passed")
	}
}

func TestTimingsAreFilledScaledAndRefused(t *testing.T) {
	d := Timings{Heartbeat: time.Second}.WithDefaults()
	if d.Heartbeat != time.Second || d.ProgressTimeout != 2*time.Minute || d.Scale(0.5).ProgressTimeout != time.Minute || d.ProgressTimeout != 2*time.Minute {
		t.Errorf("got %+v", d)
	}
	if err := d.Validate(); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*Timings){
		"Probe": func(t *Timings) { t.Probe = -1 }, "RepeatMin": func(t *Timings) { t.RepeatMin = time.Hour },
		"Watch": func(t *Timings) { t.Watch = time.Hour }, "HandBack": func(t *Timings) { t.HandBack = time.Second },
	} {
		bad := d
		change(&bad)
		if err := bad.Validate(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The time a run may be silent starts anew while it can only be waiting.
func TestTheWatchdogTellsWaitingFromSilence(t *testing.T) {
	a := &Agent{t: DefaultTimings(), log: slog.New(slog.DiscardHandler)}
	now := time.Now()
	long := now.Add(-3 * time.Minute)
	for name, c := range map[string]struct {
		slots  int
		queued int  // as the engine reports it
		others bool // another run moves
		taken  bool
	}{
		"silent alone":                          {slots: 8, taken: true},
		"silent beside others, with free slots": {slots: 8, others: true, taken: true},
		"behind full slots that move":           {slots: 1, others: true, taken: false},
		"the engine reports a queue and moves":  {slots: 8, queued: 2, others: true, taken: false},
		"the engine reports a queue and stands": {slots: 8, queued: 2, taken: true},
		"behind full slots that stand":          {slots: 1, taken: true},
	} {
		u := newUnit(a, EngineConfig{Name: "e1", Slots: c.slots})
		var ended error
		u.runs["j.1"] = &run{phase: running, handed: long.Add(-time.Minute), moved: long, since: long, cancel: func(error) {}}
		u.runs["j.2"] = &run{phase: running, handed: long, since: long, cancel: func(err error) { ended = err }}
		u.lastMove = long
		if c.others {
			u.runs["j.1"].moved, u.lastMove = now, now
		}
		u.queued, u.queuedAt = c.queued, now
		u.watch(now)
		if errors.Is(ended, errNoProgress) != c.taken {
			t.Errorf("%s: ended with %v", name, ended)
		}
	}
}
