package kvstate

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A follower lives in sessions. A session has one consumer of its own:
//
//	create -> collect -> Swap -> changes -> any doubt -> pause -> create ...
//
// collect ends when the consumer has delivered all there is (drained) and that
// is at least what the stream's leader had when it was asked after the consumer
// was made: a consumer in memory reads the copy of its own server, which may be
// behind. Doubt is: a consumer sequence missing, no word for 4 heartbeats, a lost
// connection, a pause of this process, a consumer or stream that is gone or made
// anew, and a copy that stays behind its leader. Pauses grow and are jittered.
type follower[P, G any] struct {
	s      *Store
	sp     followSpec
	h      Handler[P, G]
	decode func(delivery) (P, G, kind, error)

	floor   uint64 // highest position of earlier sessions; of use where the leader may not be asked
	swapped bool   // in this session

	mu      sync.Mutex
	orphans []string // consumers of ours that could not be deleted yet
}

// maxOrphans bounds what is remembered; the rest goes by its inactive threshold.
const maxOrphans = 16

// Units of the heartbeat.
const (
	silence   = 4  // heartbeats without a word before a session ends
	probeTime = 2  // heartbeats between two questions to the leader
	lifetime  = 20 // heartbeats after which a session counts as a good one
	expires   = 60 // heartbeats that a pull request waits
	patience  = 40 // heartbeats that an old position is waited for without a leader's word
)

// follow runs until ctx ends (nil) or the connection is closed for good.
func follow[P, G any](ctx context.Context, s *Store, sp followSpec, h Handler[P, G], decode func(delivery) (P, G, kind, error)) error {
	f := &follower[P, G]{s: s, sp: sp, h: h, decode: decode}
	defer f.sweepLast(ctx)
	hb := s.opt.heartbeat
	again := pause{least: hb / 5, most: 10 * hb}
	for {
		began := time.Now()
		f.swapped = false
		err := f.session(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case s.nc.IsClosed():
			return fmt.Errorf("follow %s: %w: %w", sp.what, ErrUnavailable, nats.ErrConnectionClosed)
		}
		if f.swapped && time.Since(began) > lifetime*hb {
			again.reset()
		}
		s.opt.log.Info("a follower starts over", "follows", sp.what, "pool", s.pool.String(), "because", err)
		if !again.wait(ctx) {
			return nil
		}
	}
}

// session is one consumer's life; it never returns nil.
func (f *follower[P, G]) session(ctx context.Context) error {
	s := f.s
	ctx, end := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer end()

	lost := s.nc.StatusChanged(nats.RECONNECTING, nats.DISCONNECTED, nats.CLOSED)
	defer s.nc.RemoveStatusListener(lost)
	p, err := f.open(ctx)
	if err != nil {
		return err
	}
	defer p.close()

	x := &session[P, G]{f: f, pull: p, began: time.Now(), items: map[string]item[P, G]{}}
	proofs := make(chan proof)
	if !f.sp.unproved {
		wg.Go(func() { s.prove(ctx, f.sp.stream, proofs) })
	}
	if !f.sp.fixedName {
		wg.Go(func() { f.sweep(ctx) })
	}
	limit := silence * s.opt.heartbeat
	quiet := time.NewTimer(limit)
	defer quiet.Stop()
	if err := p.next(); err != nil {
		return err
	}
	for {
		waiting := time.Now()
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case st := <-lost:
			return fmt.Errorf("the connection is %v", st)
		case pr := <-proofs:
			err = x.proven(pr)
		case m := <-p.ch:
			quiet.Reset(limit)
			err = x.message(m)
		case <-quiet.C:
			err = fmt.Errorf("no word from its consumer for %v", limit)
		}
		if err == nil && time.Since(waiting) > 2*limit {
			err = fmt.Errorf("this process stood still for %v", time.Since(waiting).Round(time.Millisecond))
		}
		if err != nil {
			f.floor = max(f.floor, x.pos)
			return err
		}
	}
}

// session is what one session knows. Its goroutine alone touches it.
type session[P, G any] struct {
	f     *follower[P, G]
	pull  *puller
	began time.Time

	pos     uint64 // all that matches up to this stream sequence was delivered
	lastSeq uint64 // consumer sequence of the last message
	drained bool   // the consumer has once delivered all there was
	reached time.Time

	items map[string]item[P, G] // by subject, until Swap; then nil

	created time.Time // of the stream
	owed    proof     // the oldest word of the leader that pos has not reached
	provenT time.Time // when the leader was asked for the last word that pos has reached
}

type item[P, G any] struct {
	seq uint64
	k   kind
	p   P
	g   G
}

func (x *session[P, G]) message(m *nats.Msg) error {
	if status := m.Header.Get("Status"); status != "" && len(m.Data) == 0 && m.Reply == "" {
		return x.status(status, m)
	}
	meta, err := m.Metadata()
	if err != nil {
		return fmt.Errorf("a message without place: %w", err)
	}
	if meta.Sequence.Consumer != x.lastSeq+1 {
		return fmt.Errorf("its consumer jumped from %d to %d", x.lastSeq, meta.Sequence.Consumer)
	}
	x.lastSeq = meta.Sequence.Consumer
	x.pos = max(x.pos, meta.Sequence.Stream)
	x.f.s.opt.clock.Observe(meta.Timestamp)
	if meta.NumPending == 0 {
		x.drained = true
	}
	if err := x.pull.count(); err != nil {
		return err
	}
	x.entry(delivery{subject: m.Subject, header: m.Header, data: m.Data, seq: meta.Sequence.Stream, stored: meta.Timestamp})
	x.settle()
	return nil
}

// status handles what a pull consumer says beside messages.
func (x *session[P, G]) status(status string, m *nats.Msg) error {
	switch status {
	case "100": // idle: all there is was delivered, up to the sequence that it names
		if n, ok := headerNumber(m, "Nats-Last-Consumer"); ok && n != x.lastSeq {
			return fmt.Errorf("its consumer is at %d, the last message was %d", n, x.lastSeq)
		}
		if n, ok := headerNumber(m, "Nats-Last-Stream"); ok {
			x.pos = max(x.pos, n)
		}
		x.drained = true
		x.settle()
		if late := time.Since(x.owed.answered); !x.owed.asked.IsZero() && late > silence*x.f.s.opt.heartbeat {
			return fmt.Errorf("its consumer stays at sequence %d, the stream's leader has %d", x.pos, x.owed.last)
		}
		return nil
	case "404", "408", "409":
		return x.pull.ended(m)
	}
	return fmt.Errorf("its consumer answers %s %s", status, m.Header.Get("Description"))
}

// proven takes the leader's word.
func (x *session[P, G]) proven(p proof) error {
	if p.err != nil {
		x.f.s.opt.log.Debug("the stream's leader does not answer", "stream", x.f.sp.stream, "err", p.err)
		return nil // Alive stays away until it does
	}
	if x.created.IsZero() {
		x.created = p.created
	}
	if !p.created.Equal(x.created) {
		return errors.New("the stream was made anew")
	}
	if x.owed.asked.IsZero() {
		x.owed = p
	}
	x.settle()
	return nil
}

// settle draws the conclusions after anything moved.
func (x *session[P, G]) settle() {
	if !x.owed.asked.IsZero() && x.pos >= x.owed.last {
		// An entry that was overwritten before it could be delivered stands
		// further on. A second word, asked for after the first was reached, is
		// beyond all of those: so is a busy stream drained that never rests.
		if !x.reached.IsZero() && x.owed.asked.After(x.reached) {
			x.drained = true
		}
		if x.reached.IsZero() {
			x.reached = time.Now()
		}
		x.provenT, x.owed = x.owed.asked, proof{}
	}
	if x.items != nil && x.complete() {
		x.swap()
	}
	if x.items == nil && x.f.h.Alive != nil && (x.f.sp.unproved || time.Since(x.provenT) < silence*x.f.s.opt.heartbeat) {
		x.f.h.Alive()
	}
}

func (x *session[P, G]) complete() bool {
	switch {
	case !x.drained:
		return false
	case !x.f.sp.unproved:
		return !x.provenT.IsZero()
	}
	// An agent may not ask the leader. It does not go back behind what it has
	// seen; only a stream that was made anew stays behind for long.
	return x.pos >= x.f.floor || time.Since(x.began) > patience*x.f.s.opt.heartbeat
}

func (x *session[P, G]) entry(d delivery) {
	h := &x.f.h
	p, g, k, err := x.f.decode(d)
	if err != nil {
		x.f.s.opt.log.Warn("an entry does not decode", "subject", d.subject, "sequence", d.seq, "err", err)
		if h.Bad != nil {
			h.Bad(Undecodable{Subject: d.subject, Revision: d.seq, Stored: d.stored, Err: err})
		}
	}
	switch {
	case x.items != nil && k == kindNone:
		delete(x.items, d.subject)
	case x.items != nil:
		x.items[d.subject] = item[P, G]{seq: d.seq, k: k, p: p, g: g}
	case k == kindPut && h.Put != nil:
		h.Put(p)
	case k == kindGone && h.Gone != nil:
		h.Gone(g)
	}
}

func (x *session[P, G]) swap() {
	all := make([]item[P, G], 0, len(x.items))
	for _, it := range x.items {
		all = append(all, it)
	}
	slices.SortFunc(all, func(a, b item[P, G]) int {
		if a.seq < b.seq {
			return -1
		}
		return 1
	})
	var ps []P
	var gs []G
	for _, it := range all {
		if it.k == kindPut {
			ps = append(ps, it.p)
		} else {
			gs = append(gs, it.g)
		}
	}
	x.items, x.f.floor, x.f.swapped = nil, x.pos, true
	if x.f.h.Swap != nil {
		x.f.h.Swap(ps, gs)
	}
}

// proof is the leader's word on a stream.
type proof struct {
	asked    time.Time // before the question left
	answered time.Time
	last     uint64 // the stream's last sequence
	created  time.Time
	err      error
}

// prove asks the stream's leader again and again, the first time at once.
func (s *Store) prove(ctx context.Context, stream string, out chan<- proof) {
	for {
		p := proof{asked: time.Now()}
		info, err := s.streamInfo(ctx, stream)
		p.last, p.created, p.err, p.answered = info.State.LastSeq, info.Created, err, time.Now()
		select {
		case out <- p:
		case <-ctx.Done():
			return
		}
		every := probeTime * s.opt.heartbeat
		t := time.NewTimer(every - rand.N(every/5+1))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

// open makes a consumer and subscribes to what it will deliver.
func (f *follower[P, G]) open(ctx context.Context) (*puller, error) {
	s := f.s
	cfg := f.sp.consumer(s.seq.next())
	ctx, cancel := context.WithTimeout(ctx, s.opt.timeout)
	defer cancel()
	if err := s.connected(ctx); err != nil {
		return nil, err
	}
	if f.sp.fixedName {
		if err := s.js.DeleteConsumer(ctx, f.sp.stream, cfg.Name); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
			return nil, fmt.Errorf("delete the consumer %s: %w", cfg.Name, err)
		}
	}
	p, err := newPuller(s, f.sp.stream, cfg.Name, f.sp.headersOnly)
	if err != nil {
		return nil, err
	}
	if _, err := s.js.CreateConsumer(ctx, f.sp.stream, cfg); err != nil {
		p.close()
		f.abandon(cfg.Name)
		return nil, fmt.Errorf("create the consumer %s: %w", cfg.Name, err)
	}
	p.done = func() { f.abandon(cfg.Name) }
	return p, nil
}

// abandon remembers a consumer to delete. Never an agent's: by the time it is
// deleted it may be its successor's.
func (f *follower[P, G]) abandon(name string) {
	if f.sp.fixedName {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.orphans = append(f.orphans, name)
	if over := len(f.orphans) - maxOrphans; over > 0 {
		f.orphans = slices.Delete(f.orphans, 0, over)
	}
}

// sweep deletes what earlier sessions left.
func (f *follower[P, G]) sweep(ctx context.Context) {
	f.mu.Lock()
	names := slices.Clone(f.orphans)
	f.mu.Unlock()
	for _, name := range names {
		if err := f.s.js.DeleteConsumer(ctx, f.sp.stream, name); err != nil &&
			!errors.Is(err, jetstream.ErrConsumerNotFound) && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return // next time
		}
		f.mu.Lock()
		f.orphans = slices.DeleteFunc(f.orphans, func(n string) bool { return n == name })
		f.mu.Unlock()
	}
}

// sweepLast is sweep on the way out, when ctx has ended; it does not wait long.
func (f *follower[P, G]) sweepLast(ctx context.Context) {
	if !f.s.nc.IsConnected() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(time.Second, f.s.opt.timeout))
	defer cancel()
	f.sweep(ctx)
}

// pause is a growing, jittered wait.
type pause struct {
	least, most, now time.Duration
}

func (p *pause) reset() { p.now = 0 }

// wait is false when ctx ended first.
func (p *pause) wait(ctx context.Context) bool {
	p.now = min(max(p.least, 2*p.now), p.most)
	t := time.NewTimer(p.now/2 + rand.N(p.now/2+1))
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
