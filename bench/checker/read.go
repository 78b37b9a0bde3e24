package checker

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/subjects"
)

// guardOf reads the guard a stored message was published with.
func guardOf(h nats.Header) (seq uint64, filter string, ok bool) {
	v := h.Get(subjects.HdrExpectLastSeq)
	if v == "" {
		return 0, "", false
	}
	seq, err := strconv.ParseUint(v, 10, 64)
	return seq, h.Get(subjects.HdrExpectLastSubj), err == nil
}

func readReservation(pool subjects.Pool, engine, job, id string, h nats.Header) (Reservation, error) {
	seq, filter, guarded := guardOf(h)
	exact := filter == "" || filter == pool.ReservationSubject(engine, job, id)
	if h.Get(subjects.HdrKVOperation) != "" {
		g, err := subjects.ReleasedFromHeader(engine, job, id, h)
		if err != nil {
			return Reservation{}, err
		}
		rec := Reservation{Released: &g, Unguarded: !guarded || !exact}
		if !rec.Unguarded {
			rec.Guard = seq
		}
		return rec, nil
	}
	held, err := subjects.HeldFromHeader(engine, job, id, h)
	if err != nil {
		return Reservation{}, err
	}
	rec := Reservation{Held: &held}
	switch {
	case !guarded:
		rec.Unguarded = true
	case exact:
		rec.Guard = seq
	case filter != pool.EngineGuard(engine):
		rec.Unguarded = true // guarded by another string: races unseen
	}
	return rec, nil
}

func readResult(job, reader, id string, h nats.Header) (Result, error) {
	a, err := subjects.AnswerFromHeader(job, reader, id, h)
	rec := Result{Answer: a}
	seq, filter, guarded := guardOf(h)
	switch {
	case !guarded || filter != "" && !strings.HasSuffix(filter, "."+id):
		rec.Unguarded = true
	case a.Status == "":
		rec.Replaces = seq
	case seq != 0:
		rec.Unguarded = true // an answer may only be the first
	}
	return rec, err
}

// readCopy reads the headers that the server adds to a republished message.
func readCopy(h nats.Header) (subject string, seq uint64, stored int64, ok bool) {
	subject = h.Get(jetstream.SubjectHeader)
	seq, err := strconv.ParseUint(h.Get(jetstream.SequenceHeader), 10, 64)
	if err != nil || subject == "" {
		return "", 0, 0, false
	}
	at, err := time.Parse(time.RFC3339Nano, h.Get(jetstream.TimeStampHeaer))
	if err != nil {
		return "", 0, 0, false
	}
	return subject, seq, at.UnixNano(), true
}

// readMsgID splits <job>.<id>#<bind>; bind is 0 without one.
func readMsgID(v string) (job, id string, bind int, ok bool) {
	key, num, numbered := strings.Cut(v, "#")
	if numbered {
		n, err := strconv.Atoi(num)
		if err != nil {
			return "", "", 0, false
		}
		bind = n
	}
	job, id, ok = subjects.SplitRolloutKey(key)
	return job, id, bind, ok
}

func readDead(subject string, h nats.Header) Dead {
	d := Dead{Job: subject[strings.LastIndexByte(subject, '.')+1:], Reason: h.Get(subjects.HdrError)}
	if job, id, _, ok := readMsgID(h.Get(subjects.HdrMsgID)); ok {
		d.Job, d.ID = job, id
	}
	return d
}

// History returns what was recorded so far, as a history that has not ended.
func (r *Recorder) History() History {
	r.mu.Lock()
	defer r.mu.Unlock()
	h := History{
		Pool:       r.pool.String(),
		Submits:    slices.Clone(r.submits),
		Attempts:   slices.Clone(r.attempts),
		Retries:    slices.Clone(r.retries),
		Dead:       slices.Clone(r.dead),
		Seen:       slices.Clone(r.seen),
		Bounds:     slices.Clone(r.bounds),
		Unreadable: slices.Clone(r.unreadable),
		Windows:    map[string]int{},
	}
	for i := range h.Submits {
		h.Submits[i].Stored = r.stored[h.Submits[i].Seq]
	}
	for engine, slots := range r.slots {
		h.Windows[engine] = slots + r.prefetch
	}
	all := maps.Clone(r.reservations)
	var last uint64
	for rev := range r.reservations {
		last = max(last, rev)
	}
	for rev := range r.others {
		last = max(last, rev)
	}
	infer(all, r.others)
	h.UnseenReservations = int(last) - len(all) - len(r.others)
	for _, rev := range slices.Sorted(maps.Keys(all)) {
		h.Reservations = append(h.Reservations, all[rev])
	}
	for _, rev := range slices.Sorted(maps.Keys(r.seeds)) {
		h.Seeds = append(h.Seeds, r.seeds[rev])
	}
	for _, rev := range slices.Sorted(maps.Keys(r.owned)) {
		h.Owned = append(h.Owned, r.owned[rev])
	}
	last = 0
	for _, rev := range slices.Sorted(maps.Keys(r.results)) {
		h.Results = append(h.Results, r.results[rev])
		last = rev
	}
	h.UnseenResults = int(last) - len(r.results)
	return h
}

// infer adds the writes that were overwritten before they were seen and that
// what overwrote them names by revision. Its stored time is that of the
// release: late, and marked so.
func infer(all map[uint64]Reservation, others map[uint64]bool) {
	for _, rev := range slices.Sorted(maps.Keys(all)) {
		r := all[rev]
		if r.Guard == 0 || others[r.Guard] {
			continue
		}
		if _, seen := all[r.Guard]; seen {
			continue
		}
		held := subjects.Held{State: subjects.StateBound}
		if g := r.Released; g != nil {
			held.Engine, held.Job, held.ID = g.Engine, g.Job, g.ID
			held.Bind, held.Epoch, held.Tokens, held.PromptTokens, held.Group = g.Bind, g.Epoch, g.Tokens, g.PromptTokens, g.Group
		} else {
			held = *r.Held
			held.State = subjects.StateBound
		}
		all[r.Guard] = Reservation{Revision: r.Guard, Stored: r.Stored, Held: &held, Inferred: true}
	}
}
