package journal

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// Happened is one line of a rollout's story.
type Happened struct {
	AtNS       int64          `json:"at_ns,omitempty"` // the server's clock as the dispatcher knew it, unix ns
	CoreS      float64        `json:"core_s"`          // of the dispatcher's core
	Dispatcher string         `json:"dispatcher"`
	Event      uint64         `json:"event"` // number in its journal
	What       string         `json:"what"`  // submitted, queued, decided, binding, bound, running, released, answered, ...
	Detail     string         `json:"detail,omitempty"`
	Engine     string         `json:"engine,omitempty"`
	Bind       int            `json:"bind,omitempty"`
	Decision   *core.Decision `json:"decision,omitempty"` // with candidates
}

// Story is all that journals tell of one rollout.
type Story struct {
	Rollout string     `json:"rollout"`
	Found   bool       `json:"found"`
	Ended   bool       `json:"ended"` // an answer was seen
	Lines   []Happened `json:"lines"`
	Notes   []string   `json:"notes,omitempty"` // what is missing
}

// Why re-runs the journals with explanations and tells one rollout's story.
func Why(journals []*Journal, job, id string) (*Story, error) {
	st := &Story{Rollout: subjects.RolloutKey(job, id)}
	seen := map[string]bool{}
	for _, j := range journals {
		w := teller{story: st, j: j, key: st.Rollout, job: job, id: id, seen: seen, handles: map[core.Handle]bool{}}
		rep, err := Replay(j, ReplayOptions{Explain: true, Step: w.step})
		switch {
		case err != nil && rep == nil:
			st.Notes = append(st.Notes, err.Error())
			continue
		case err != nil:
			return nil, err
		}
		if rep.Incomplete != "" {
			st.Notes = append(st.Notes, "not all of it could be re-run: "+rep.Incomplete)
		}
		if rep.Differences > 0 {
			st.Notes = append(st.Notes, fmt.Sprintf("the replay of %s differs from event %d on, and was not followed there: %s", j.Dispatcher, rep.First.Event, rep.First.What))
		}
		if rep.TailMissing {
			st.Notes = append(st.Notes, fmt.Sprintf("the journal of %s ends at %.3f s without the dispatcher's stop: it runs still, or its tail is missing", j.Dispatcher, rep.LastEventNow))
		}
	}
	slices.SortStableFunc(st.Lines, func(a, b Happened) int { return cmp.Compare(a.AtNS, b.AtNS) })
	st.Found = len(st.Lines) > 0
	return st, nil
}

// teller picks from one journal what touches one rollout.
type teller struct {
	story        *Story
	j            *Journal
	key, job, id string
	seen         map[string]bool // what several dispatchers see is told once
	handles      map[core.Handle]bool
	server       int64 // its clock at core time 0, unix ns; 0 = unknown
	at           Happened
}

func (w *teller) add(what, detail, engine string, bind int) {
	h := w.at
	h.What, h.Detail, h.Engine, h.Bind = what, detail, engine, bind
	w.story.Lines = append(w.story.Lines, h)
}

// once adds what every dispatcher sees of the streams.
func (w *teller) once(kind, engine string, revision uint64, stored int64, add func()) {
	k := fmt.Sprint(kind, engine, revision)
	if w.seen[k] {
		return
	}
	w.seen[k] = true
	if stored > 0 {
		w.at.AtNS = stored
	}
	add()
}

func (w *teller) is(job, id string) bool { return job == w.job && id == w.id }

func (w *teller) step(s *Step, effects []core.Effect) error {
	w.at = Happened{CoreS: s.Now.Seconds(), Dispatcher: w.j.Dispatcher, Event: s.N}
	if e, ok := s.Event.(core.ServerTime); ok {
		w.server = e.UnixNano - int64(s.Now)
	}
	clock := int64(0)
	if w.server != 0 {
		clock = w.server + int64(s.Now)
	}
	w.at.AtNS = clock
	w.event(s.Event)
	w.at.AtNS = clock
	for _, e := range effects {
		w.effect(e)
	}
	return nil
}

func (w *teller) event(ev core.Event) {
	switch e := ev.(type) {
	case core.Fetched:
		if !w.is(e.Facts.Job, e.Facts.ID) {
			return
		}
		w.handles[e.Handle] = true
		from := "ROLLOUTS"
		if e.Queue.Retry {
			from = "RETRY"
		}
		taken := w.at.AtNS
		w.once("submitted "+from, "", e.Seq, e.Stored, func() {
			w.add("submitted", fmt.Sprintf("stored in %s at %d, lane %s, %d prompt tokens, at most %d more", from, e.Seq, e.Facts.Lane, e.Facts.PromptTokens, e.Facts.MaxTokens), "", e.Facts.Bind)
		})
		w.at.AtNS = taken
		w.add("fetched", fmt.Sprintf("%d behind it in its queue", e.Pending), "", 0)
	case core.Acquire:
		if w.is(e.Facts.Job, e.Facts.ID) {
			w.handles[e.Handle] = true
			w.add("acquire", fmt.Sprintf("a caller asks for a reservation of %d ms", e.TTLMS), "", 0)
		}
	case core.BindAnswer:
		if w.is(e.Job, e.ID) {
			w.add("bind answered", string(e.Answer)+sequences(e), e.Engine, e.Bind)
		}
	case core.ViewSwap:
		for _, p := range e.Reservations {
			w.reservation(p)
		}
		for _, p := range e.Answered {
			w.answered(p)
		}
	case core.ReservationPut:
		w.reservation(e)
	case core.ReservationGone:
		if w.is(e.Job, e.ID) {
			w.once("gone", e.Engine, e.Revision, e.Stored, func() {
				w.add("released", strings.TrimSpace(string(e.Outcome)), e.Engine, e.Bind)
			})
		}
	case core.Answered:
		w.answered(e)
	case core.LeaderAnswer:
		if w.is(e.Job, e.ID) {
			w.add("leader answered", fmt.Sprintf("reservation %t, answer %t %s", e.Reservation != nil, e.Answered != nil, e.Err), e.Engine, 0)
		}
	case core.RetryAnswer:
		if w.is(e.Job, e.ID) {
			w.add("requeue answered", string(e.Answer), e.Engine, 0)
		}
	case core.DeleteAnswer:
		if w.is(e.Job, e.ID) {
			w.add("release answered", string(e.Answer), e.Engine, 0)
		}
	case core.ResultAnswer:
		if w.is(e.Job, e.ID) {
			w.add("answer stored", string(e.Answer), "", 0)
		}
	case core.DeadAnswer:
		if w.is(e.Job, e.ID) {
			w.add("dead letter stored", string(e.Answer), "", 0)
		}
	}
}

func sequences(e core.BindAnswer) string {
	switch {
	case e.Seq > 0:
		return fmt.Sprintf(", revision %d", e.Seq)
	case e.Seed:
		return fmt.Sprintf(", the seed of its key stands at %d", e.Actual)
	case e.Actual > 0:
		return fmt.Sprintf(", the engine stands at %d", e.Actual)
	}
	return ""
}

func (w *teller) reservation(p core.ReservationPut) {
	if w.is(p.Job, p.ID) {
		w.once("held", p.Engine, p.Revision, p.Stored, func() {
			w.add(string(p.State), fmt.Sprintf("revision %d, %d tokens reserved by %s", p.Revision, p.Tokens, p.Dispatcher), p.Engine, p.Bind)
		})
	}
}

func (w *teller) answered(p core.Answered) {
	if w.is(p.Job, p.ID) {
		w.story.Ended = true
		w.once("answered", "", p.Revision, p.Stored, func() {
			what, detail := "answered", string(p.Status)
			if p.Status == "" {
				what, detail = "received", "its reader has it"
			}
			if p.CompletionTokens != nil {
				detail += fmt.Sprintf(", %d tokens made", *p.CompletionTokens)
			}
			if p.CachedTokens != nil {
				detail += fmt.Sprintf(", %d of the prompt cached", *p.CachedTokens)
			}
			w.add(what, detail, p.Engine, p.Bind)
		})
	}
}

func (w *teller) effect(e core.Effect) {
	switch e := e.(type) {
	case core.Decision:
		if e.Rollout != w.key {
			return
		}
		d := e // its candidates are made anew for each decision
		w.add("decided", e.Reason, e.Engine, e.Bind)
		w.story.Lines[len(w.story.Lines)-1].Decision = &d
	case core.Bind:
		if w.is(e.Held.Job, e.Held.ID) {
			w.add("binding", fmt.Sprintf("guard %d, %d tokens, ttl %v", e.Expected, e.Held.Tokens, e.TTL.Round(time.Millisecond)), e.Held.Engine, e.Held.Bind)
		}
	case core.SeedBind:
		if w.is(e.Held.Job, e.Held.ID) {
			w.add("seeding", fmt.Sprintf("key %s at %d, guard %d, %d tokens", e.Seed.Key, e.SeedAt, e.Expected, e.Held.Tokens), e.Held.Engine, e.Held.Bind)
		}
	case core.Transition:
		if e.Rollout == w.key {
			w.add(strings.ReplaceAll(e.What, "_", " "), strings.TrimSpace(fmt.Sprintf("key %s has %d owners %s", e.Key, e.Owners, e.Why)), e.Engine, 0)
		}
	case core.Retry:
		if w.is(e.Job, e.ID) {
			w.add("requeueing", fmt.Sprintf("%d attempts burnt", e.Burnt), e.Engine, e.Bind)
		}
	case core.DeleteKey:
		if w.is(e.Job, e.ID) {
			w.add("releasing", string(e.Released.Outcome), e.Engine, e.Released.Bind)
		}
	case core.PublishResult:
		if w.is(e.Job, e.ID) {
			w.add("answering", fmt.Sprintf("%s %s: %s", e.Status, e.Error.Code, e.Error.Message), e.Engine, e.Attempt)
		}
	case core.PublishDead:
		if w.is(e.Job, e.ID) {
			w.add("keeping as dead", e.Reason, e.Engine, 0)
		}
	case core.NakDelay:
		w.handle(e.Handle, "given back", fmt.Sprintf("for %v", e.Delay))
	case core.Ack:
		w.handle(e.Handle, "acked", "its next place is written")
	case core.Granted:
		w.handle(e.Handle, "granted", fmt.Sprintf("revision %d", e.Revision))
	case core.Refused:
		w.handle(e.Handle, "refused", e.Message)
	}
}

func (w *teller) handle(h core.Handle, what, detail string) {
	if w.handles[h] {
		w.add(what, detail, "", 0)
		delete(w.handles, h)
	}
}

// Name of an event's type, for people.
func Name(ev core.Event) string { return reflect.TypeOf(ev).Name() }
