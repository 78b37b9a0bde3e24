package journal

import (
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"slices"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// ReplayOptions change how a journal is re-run. The zero value verifies.
type ReplayOptions struct {
	// From and Until bound what is of interest, on the NATS server's clock, unix
	// ns; 0 = no bound. Replay starts at the last checkpoint at or before From, else
	// where the journal starts.
	From, Until int64
	// Config changes the core's configuration, Event an event before it is
	// stepped: what would have been different. nil = as recorded.
	Config func(*core.Config)
	Event  func(core.Event) core.Event
	// Explain makes the replayed decisions carry their candidates.
	Explain bool
	// Step sees each step of interest with the effects of the replay; they are
	// valid only during the call. ErrStop ends the replay in order, another error
	// ends it too and is returned.
	Step func(s *Step, effects []core.Effect) error
	// Pause is called before each step; nil = never. A background check bounds its CPU time with it.
	Pause func() error
	// GoOn does not stop at the first difference.
	GoOn bool
}

// ErrStop ends a replay from its Step, in order.
var ErrStop = errors.New("stop here")

// Report of a replay.
type Report struct {
	Dispatcher   string      `json:"dispatcher"`
	Start        string      `json:"start"`
	Program      string      `json:"program,omitempty"`
	Core         int         `json:"core"`        // version that recorded
	CoreHere     int         `json:"core_replay"` // version that replayed
	FromEvent    uint64      `json:"from_event"`  // first one stepped: 0, or that of a checkpoint
	Events       uint64      `json:"events"`      // compared
	Decisions    uint64      `json:"decisions"`   // of them, decisions
	Checkpoints  int         `json:"checkpoints"` // passed, whose state was compared too
	Differences  int         `json:"differences"` // 1 at most unless told to go on
	First        *Difference `json:"first_difference,omitempty"`
	Ended        bool        `json:"ended"`                // the journal reaches to the dispatcher's orderly stop
	Incomplete   string      `json:"incomplete,omitempty"` // why not everything could be compared
	Gaps         []Gap       `json:"gaps,omitempty"`
	Unverified   uint64      `json:"unverified,omitempty"` // events that can be read behind a gap, and not compared
	CPUSeconds   float64     `json:"step_seconds"`         // spent in the core, about
	PerSecond    float64     `json:"decisions_per_s,omitempty"`
	TailMissing  bool        `json:"tail_missing"`
	LastEventNow float64     `json:"last_event_s"` // of the core's time
}

// Gap is a place where events are missing or cannot be read.
type Gap struct {
	Event   uint64  `json:"event"` // number of the first that is not there
	Missing uint64  `json:"missing,omitempty"`
	Skipped uint64  `json:"skipped,omitempty"` // events that are there and could not be compared
	Resumed *uint64 `json:"resumed,omitempty"` // event of the checkpoint at which replay went on; null = not again
	AtS     float64 `json:"at_s,omitempty"`    // core time of that checkpoint
	Why     string  `json:"why"`
}

// OK tells whether all that could be read was compared and is the same.
func (r *Report) OK() bool { return r.Differences == 0 && r.Incomplete == "" }

// Replay re-runs a journal with the core of this program. Its error is the
// caller's Step's, or that nothing could be read at all.
//
// At a gap it waits for the next checkpoint and goes on from there; the report
// says what could not be compared.
func Replay(j *Journal, opt ReplayOptions) (*Report, error) {
	r, err := newReader(j, j.startFor(opt.From))
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b := j.Begin
	p := &replay{opt: opt, r: r, rep: &Report{
		Dispatcher: j.Dispatcher, Start: j.Start, Program: b.Program, FromEvent: r.event,
		Core: b.Core, CoreHere: core.Version, Ended: j.Ended, TailMissing: !j.Ended,
	}}
	p.cfg = core.Config{Dispatcher: j.Dispatcher, Timings: b.Timings, MaxInHand: b.MaxInHand, MaxAnswered: b.MaxAnswered, MaxIndexBytes: b.MaxIndex, Explain: opt.Explain}
	if opt.Config != nil {
		opt.Config(&p.cfg)
	}
	if r.event == 0 {
		p.core = core.New(p.cfg)
	} else if !j.Begins() && opt.From == 0 {
		p.incomplete("the journal's beginning is gone: it was replayed from its first checkpoint on")
	}
	err = p.run()
	p.rep.CPUSeconds = p.spent.Seconds()
	if p.spent > 0 {
		p.rep.PerSecond = float64(p.rep.Decisions) / p.spent.Seconds()
	}
	if errors.Is(err, ErrStop) {
		err = nil
	}
	return p.rep, err
}

// startFor is the last start at or before a server time.
func (j *Journal) startFor(from int64) int {
	at := 0
	for i, s := range j.starts {
		if from > 0 && s.server > 0 && s.server <= from {
			at = i
		}
	}
	return at
}

// replay is one run of Replay.
type replay struct {
	opt    ReplayOptions
	r      *Reader
	rep    *Report
	cfg    core.Config
	core   *core.Core // nil: behind a gap, or before the first checkpoint
	sum    digest
	spent  time.Duration
	server int64 // the server's clock at core time 0, unix ns; 0 = unknown
	gap    *Gap  // open
}

func (p *replay) incomplete(why string) {
	if p.rep.Incomplete == "" {
		p.rep.Incomplete = why
	}
}

func (p *replay) run() error {
	for {
		if p.opt.Pause != nil {
			if err := p.opt.Pause(); err != nil {
				return err
			}
		}
		s, err := p.r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			p.lost(err)
			continue
		}
		if m := p.r.Mark(); m != nil && m.N == s.N {
			p.passed(m)
		}
		p.clock(s)
		if p.opt.Until > 0 && s.Server > p.opt.Until {
			p.rep.TailMissing = false // what was asked for is there
			return nil
		}
		if p.core == nil {
			p.rep.Unverified++
			if p.gap != nil {
				p.gap.Skipped++
			}
			continue
		}
		if err := p.step(s); err != nil {
			return err
		}
		if p.rep.Differences > 0 && !p.opt.GoOn {
			return nil
		}
	}
}

// clock puts the server's time to a step.
func (p *replay) clock(s *Step) {
	if e, ok := s.Event.(core.ServerTime); ok && e.UnixNano > 0 {
		p.server = e.UnixNano - int64(s.Now)
	}
	if p.server != 0 {
		s.Server = p.server + int64(s.Now)
	}
}

// lost notes a gap. The core cannot go on behind it.
func (p *replay) lost(err error) {
	p.incomplete(err.Error())
	e, ok := errors.AsType[*ReadError](err)
	if !ok {
		e = &ReadError{Event: p.r.event, Err: err}
	}
	if p.gap != nil {
		p.gap.Missing += e.Missing
		return
	}
	p.core = nil
	p.rep.Gaps = append(p.rep.Gaps, Gap{Event: e.Event, Missing: e.Missing, Why: err.Error()})
	p.gap = &p.rep.Gaps[len(p.rep.Gaps)-1]
}

// passed goes on from a checkpoint behind a gap, or compares the core with it. A
// journal that was begun in the middle of its core's life has one before its
// first event.
func (p *replay) passed(m *Mark) {
	if p.core != nil && m.N > 0 {
		if same, known := m.holds(p.core); known {
			p.rep.Checkpoints++
			if !same && p.rep.Differences == 0 && p.opt.Config == nil && p.opt.Event == nil {
				p.rep.Differences++
				p.rep.First = &Difference{Event: m.N, AtS: m.Now.Seconds(), Type: "Checkpoint", Recorded: []core.Decision{}, Replayed: []core.Decision{},
					State: p.core.Around(), What: "every effect until here is the same, the state behind them differs from the checkpoint's"}
			}
		}
		return
	}
	c, err := m.Restore(p.cfg)
	if err != nil {
		p.incomplete(err.Error())
		return
	}
	p.core, p.sum.sum = c, m.digest
	if m.Server > 0 {
		p.server = m.Server - int64(m.Now)
	}
	if p.gap != nil {
		p.gap.Resumed, p.gap.AtS, p.gap = &m.N, m.Now.Seconds(), nil
	}
}

// timedEach is of how many steps one is timed: reading the clock takes as long as
// many a step.
const timedEach = 8

func (p *replay) timed(ev core.Event, s *Step) []core.Effect {
	if s.N%timedEach != 0 {
		return p.core.Step(ev, s.Now)
	}
	began := time.Now()
	effects := p.core.Step(ev, s.Now)
	p.spent += timedEach * time.Since(began)
	return effects
}

func (p *replay) step(s *Step) error {
	ev := s.Event
	if p.opt.Event != nil {
		ev = p.opt.Event(ev)
	}
	effects := p.timed(ev, s)
	if len(effects) > 0 {
		p.sum.step(effects)
	}
	if p.opt.Step != nil && s.Server >= p.opt.From {
		s.core = p.core
		if err := p.opt.Step(s, effects); err != nil {
			return err
		}
	}
	p.rep.Events++
	p.rep.Decisions += uint64(len(s.Decisions))
	p.rep.LastEventNow = s.Now.Seconds()
	if p.same(s, effects) {
		return nil
	}
	p.rep.Differences++
	if p.rep.First == nil {
		p.rep.First = differ(s, effects)
		p.rep.First.State = p.core.Around()
	}
	return nil
}

// same compares a step. The digest is a chain: behind the first difference it
// says nothing more, and what can be compared is how many effects there were,
// and the decisions among them.
func (p *replay) same(s *Step, effects []core.Effect) bool {
	switch {
	case len(effects) != s.Effects:
		return false
	case p.rep.Differences == 0:
		return s.Effects == 0 || uint32(p.sum.sum) == s.Digest
	}
	now := Decisions(effects)
	for i := range now {
		now[i].Candidates, now[i].Filtered = nil, nil
	}
	return slices.EqualFunc(now, s.Decisions, func(a, b core.Decision) bool { return reflect.DeepEqual(a, b) })
}

// Decisions are those among the effects of a step.
func Decisions(effects []core.Effect) []core.Decision {
	out := []core.Decision{}
	for _, e := range effects {
		if d, ok := e.(core.Decision); ok {
			out = append(out, d)
		}
	}
	return out
}

// Effect is one effect, for people.
type Effect struct {
	Type string      `json:"type"`
	Body core.Effect `json:"body"`
}

// Effects are those of a step with the names of their types.
func Effects(effects []core.Effect) []Effect {
	out := make([]Effect, 0, len(effects))
	for _, e := range effects {
		out = append(out, Effect{reflect.TypeOf(e).Name(), e})
	}
	return out
}

// body is an event for people; one that cannot be shown is null.
func body(ev core.Event) json.RawMessage {
	b, err := json.Marshal(ev)
	if err != nil {
		return nil
	}
	return b
}
