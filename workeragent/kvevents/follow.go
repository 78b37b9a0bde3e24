package kvevents

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/rollbus/rollbus/workeragent/kvevents/zmq"
)

// rankFeed follows one rank: receive is the socket's goroutine, work the other.
type rankFeed struct {
	f     *Feed
	src   Source
	ring  *ring
	seq   *Sequencer[[]byte]
	index *Index
	batch Batch

	// Under the view's lock.
	status   RankStatus
	epoch    string // of the publisher's topic
	useless  int    // batches in a row of which nothing could be used
	resynced time.Duration
	confirm  time.Duration // when to ask once more; 0 = done
	lost     bool
	away     time.Duration // since when there is no connection

	ctx       context.Context // of work
	replay    int             // number of the replay that counts
	cancel    context.CancelFunc
	answers   chan answer
	replaying sync.WaitGroup
	identity  string // of the process, as last seen by receive
}

// answer is one message of a replay.
type answer struct {
	replay int
	m      Message
	failed error
}

func newRankFeed(f *Feed, src Source) *rankFeed {
	r := &rankFeed{f: f, src: src, ring: newRing(f.cfg.RingMessages, f.cfg.RingBytes), answers: make(chan answer, 256), cancel: func() {}}
	r.index = NewIndex(f.cfg.Index, f.view, func(k AlarmKind, text string) { f.alarm(k, src.Rank, text) })
	r.index.show(false) // until the sequencer trusts
	r.seq = NewSequencer(SequenceConfig{Replay: src.Replay != "", CoolDown: f.cfg.CoolDown, MaxBuffered: f.cfg.HeldBatches}, r.clears)
	return r
}

// clears decodes a batch only to see whether it empties the cache.
func (r *rankFeed) clears(payload []byte) bool {
	_ = r.batch.Decode(payload)
	return r.batch.Clears()
}

// receive connects, again and again, and moves messages into the ring.
func (r *rankFeed) receive(ctx context.Context) {
	zmq.Redial(ctx, r.f.cfg.BackoffMin, r.f.cfg.BackoffMax, func(ctx context.Context) {
		err := r.connect(ctx)
		if ctx.Err() == nil {
			r.f.cfg.Log.Debug("cache events: connection ended", "engine", r.f.cfg.Engine, "rank", r.src.Rank, "endpoint", r.src.Endpoint, "err", err)
		}
	})
}

// connect lives as long as one connection, or one bound endpoint.
func (r *rankFeed) connect(ctx context.Context) error {
	if !r.src.Bind {
		s, err := r.f.cfg.Sockets.Subscribe(ctx, r.src.Endpoint, r.src.Topic)
		if err != nil {
			return err
		}
		return r.drink(ctx, s)
	}
	a, err := r.f.cfg.Sockets.Bind(ctx, r.src.Endpoint, r.src.Topic)
	if err != nil {
		return err
	}
	defer a.Close()
	var wg sync.WaitGroup
	defer wg.Wait()
	busy := make(chan struct{}, 1) // one publisher at a time
	for {
		s, err := a.Accept(ctx)
		if err != nil {
			return err
		}
		select {
		case busy <- struct{}{}:
			wg.Go(func() {
				_ = r.drink(ctx, s)
				<-busy
			})
		default: // two engines share a port: refuse to merge them
			r.f.alarm(AlarmPublishers, r.src.Rank, "a second publisher dialled "+r.src.Endpoint+" while the first is connected; it is not heard")
			_ = s.Close()
		}
	}
}

// drink moves the messages of one connection into the ring and does nothing
// else: whoever is slow here makes the engine drop.
func (r *rankFeed) drink(ctx context.Context, s Socket) error {
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	defer s.Close()
	r.ring.push(item{link: linkUp, same: r.sameProcess(ctx)})
	defer r.ring.push(item{link: linkDown})
	for {
		frames, err := s.Recv()
		if err != nil {
			return err
		}
		r.ring.push(item{frames: frames})
	}
}

// sameProcess asks the engine who it is. Unknown is another one.
func (r *rankFeed) sameProcess(ctx context.Context) bool {
	if r.f.cfg.Identity == nil {
		return false
	}
	const patience = 2 * time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	id, err := r.f.cfg.Identity(ctx)
	same := err == nil && id != "" && id == r.identity
	r.identity = id
	return same
}

// work decodes and applies.
func (r *rankFeed) work(ctx context.Context) {
	r.ctx = ctx
	defer r.replaying.Wait()
	defer func() { r.cancel() }()
	tick := time.NewTicker(r.f.cfg.Tick)
	defer tick.Stop()
	var items []item
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.ring.ready:
			var lost bool
			items, lost = r.ring.take(items)
			r.locked(func() {
				r.lost = r.lost || lost
				for i := range items {
					r.take(&items[i])
				}
				r.lookLost()
			})
		case a := <-r.answers:
			r.locked(func() { r.answer(a) })
		case <-tick.C:
			r.locked(r.tick)
		}
	}
}

func (r *rankFeed) locked(f func()) {
	r.f.view.mu.Lock()
	defer r.f.view.mu.Unlock()
	f()
	r.f.view.flush()
}

func (r *rankFeed) lookLost() {
	if r.lost && r.seq.Following() {
		r.lost = false
		r.carry(r.seq.Lost(r.f.now()))
	}
}

func (r *rankFeed) tick() {
	now := r.f.now()
	r.index.Expire(now)
	r.carry(r.seq.Tick(now))
	r.lookLost()
	if !r.status.Connected && now-r.away > r.f.cfg.MuteAfter {
		r.f.alarm(AlarmMute, r.src.Rank, fmt.Sprintf("nobody publishes at %s, where this rank's events should be", r.src.Endpoint))
	}
	if r.confirm != 0 && now >= r.confirm && r.seq.Following() {
		r.confirm = 0
		r.carry(r.seq.Confirm())
	}
	// A store behind a parent that never comes, in a stream of which all is
	// known: something was lost unseen (scenario C4). Once in ten minutes.
	const patience, again = 5 * time.Second, 10 * time.Minute
	if !r.seq.Partial() && r.seq.Following() && r.index.parked.oldest(now) > patience {
		r.f.alarm(AlarmOrphans, r.src.Rank, "stores name parents that were never stored")
		if r.resynced == 0 || now-r.resynced > again {
			r.resynced = now
			r.carry(r.seq.Distrust(now, "stores behind unknown parents", true))
		}
	}
}

// take handles one item of the ring.
func (r *rankFeed) take(it *item) {
	switch it.link {
	case linkUp:
		r.status.Connected, r.status.Refused, r.useless = true, false, 0
		r.confirm = r.f.now() + r.f.cfg.Confirm
		if it.same {
			r.carry(r.seq.Resume())
		} else {
			r.epoch = ""
			r.carry(r.seq.Start())
		}
		return
	case linkDown:
		r.status.Connected, r.away = false, r.f.now()
		return
	}
	if r.status.Refused {
		return
	}
	m, err := ParseLive(it.frames)
	if err != nil {
		r.status.Malformed++
		return
	}
	if !strings.HasPrefix(m.Topic, r.src.Topic) {
		r.status.Malformed++
		r.f.alarm(AlarmTopic, r.src.Rank, fmt.Sprintf("topic %.60q, want %q", m.Topic, r.src.Topic))
		return
	}
	if m.Epoch != r.epoch {
		if r.epoch != "" {
			r.carry(r.seq.Start())
		}
		r.epoch = m.Epoch
	}
	r.carry(r.seq.Live(r.f.now(), m.Seq, m.Payload))
}

// answer handles one message of a replay.
func (r *rankFeed) answer(a answer) {
	if a.replay != r.replay {
		return
	}
	now := r.f.now()
	switch {
	case a.failed != nil:
		r.f.cfg.Log.Info("cache events: replay failed", "engine", r.f.cfg.Engine, "rank", r.src.Rank, "err", a.failed)
		r.carry(r.seq.ReplayFailed(now))
	case a.m.End:
		r.carry(r.seq.ReplayEnd(now))
	default:
		r.carry(r.seq.Replayed(now, a.m.Seq, a.m.Payload))
	}
	r.lookLost()
}

// carry does what the sequencer says. What applying finds out (a broken event)
// goes back to it afterwards.
func (r *rankFeed) carry(steps []Step[[]byte]) {
	distrust := ""
	for i := range steps {
		st := &steps[i]
		if r.status.Refused && st.Do != Clear {
			continue
		}
		switch st.Do {
		case Apply:
			if why := r.apply(st.Batch); why != "" {
				distrust = why
			}
		case Clear:
			r.index.clear(r.f.alone(r))
		case AskReplay:
			r.ask(st.Seq)
		case Degrade:
			r.status.Trusted, r.status.Reason = false, st.Reason
			r.index.show(false)
			r.f.alarm(AlarmDegraded, r.src.Rank, st.Reason)
		case Trust:
			r.status.Trusted, r.status.Reason = true, ""
			r.index.show(true)
		}
	}
	if distrust != "" && !r.status.Refused {
		r.carry(r.seq.Distrust(r.f.now(), distrust, false))
	}
}

// manyUseless batches in a row say that the decoder does not know this engine.
const manyUseless = 50

func (r *rankFeed) apply(payload []byte) (distrust string) {
	err := r.batch.Decode(payload)
	b := &r.batch
	r.status.Batches++
	r.status.Unknown += int64(b.Unknown)
	r.status.Broken += int64(b.Broken)
	if b.Rank >= 0 && b.Rank != r.src.Rank {
		r.refuse(b.Rank)
		return ""
	}
	for i := range b.Events {
		if b.Events[i].Kind == Stored && b.Events[i].BlockSize > 0 {
			r.status.BlockSize = b.Events[i].BlockSize
		}
	}
	r.index.Apply(r.f.now(), b, r.f.alone(r))
	if len(b.Events) == 0 && (err != nil || b.Skipped() > 0) {
		if r.useless++; r.useless >= manyUseless {
			r.f.alarm(AlarmUndecodable, r.src.Rank, fmt.Sprintf("%d batches in a row without one usable event", r.useless))
		}
	} else {
		r.useless = 0
	}
	switch {
	case err != nil:
		r.f.alarm(AlarmBroken, r.src.Rank, err.Error())
		return "a batch does not decode"
	case b.Broken > 0:
		r.f.alarm(AlarmBroken, r.src.Rank, fmt.Sprintf("%d of %d events of a batch do not decode", b.Broken, b.Broken+len(b.Events)))
		return "an event does not decode"
	}
	return ""
}

// refuse: the port belongs to another engine or rank. Nothing of it counts
// until the connection is another one (scenario C12).
func (r *rankFeed) refuse(rank int) {
	r.f.alarm(AlarmRank, r.src.Rank, fmt.Sprintf("batches of rank %d at %s, which is rank %d's: another engine's port?", rank, r.src.Endpoint, r.src.Rank))
	r.status.Refused, r.status.Trusted = true, false
	r.status.Reason = "another rank or engine publishes here"
	r.index.clear(r.f.alone(r))
	r.index.show(false)
}

// ask starts a replay; the one before it counts no more.
func (r *rankFeed) ask(from uint64) {
	r.cancel()
	r.replay++
	r.status.Replays++
	if r.ctx == nil {
		return
	}
	ctx, cancel := context.WithCancel(r.ctx)
	r.cancel = cancel
	id := r.replay
	r.replaying.Go(func() {
		defer cancel()
		if err := r.replayFrom(ctx, id, from); err != nil && ctx.Err() == nil {
			r.tell(ctx, answer{replay: id, failed: err})
		}
	})
}

func (r *rankFeed) tell(ctx context.Context, a answer) {
	select {
	case r.answers <- a:
	case <-ctx.Done():
	}
}

// maxReplay bounds a replay whose publisher never says that it ends.
const maxReplay = 1 << 20

// replayFrom asks and reads as fast as it can: live events wait at the engine
// while it answers.
func (r *rankFeed) replayFrom(ctx context.Context, id int, from uint64) error {
	select {
	case r.f.cfg.Replays <- struct{}{}:
		defer func() { <-r.f.cfg.Replays }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	s, err := r.f.cfg.Sockets.Ask(ctx, r.src.Replay)
	if err != nil {
		return err
	}
	defer s.Close()
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	if err := s.Send(ReplayRequest(from)...); err != nil {
		return err
	}
	for range maxReplay {
		if err := s.SetReadDeadline(time.Now().Add(r.f.cfg.ReplayIdle)); err != nil {
			return err
		}
		frames, err := s.Recv()
		if err != nil {
			return fmt.Errorf("replay from %d: %w", from, err)
		}
		m, err := ParseReplay(frames)
		if err != nil {
			return err
		}
		r.tell(ctx, answer{replay: id, m: m})
		if m.End {
			return nil
		}
	}
	return fmt.Errorf("replay from %d: more than %d batches without an end", from, maxReplay)
}
