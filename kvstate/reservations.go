package kvstate

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/subjects"
)

// MarkerTTL is how long the delete marker of a reservation stays, with outcome
// and usage in its headers.
const MarkerTTL = 60 * time.Second

// Bind is one guarded write of a reservation.
type Bind struct {
	Held     subjects.Held // State empty = bound; LeftMS is what is left now
	Expected uint64        // last sequence seen under the engine's keys, 0 = none
	TTL      time.Duration // 0 = LeftMS + 24 h; written in whole seconds, rounded up
	Body     []byte        // the request; empty for an external reservation
}

// Bind writes a reservation if nothing was written under the engine's keys since
// Expected: two binds with one expectation never both succeed. It is published
// once, under the id <job>.<id>#<bind number>.
//
//   - ConflictError: the sequence is Actual. Wait for the view to reach it (when
//     it is below Expected a marker has expired: use it as it is), decide again.
//   - ErrBusy: once more with the same expectation, then decide again.
//   - DuplicateError: this bind number was written before, at Seq: if the key
//     stands there it is bound, else the number is used up.
//   - ErrUnknown: repeat the identical Bind until it is answered otherwise; on a
//     ConflictError then, read the key with Reservation. Choose no other engine.
//   - ErrFull: the bucket is at FillLimit, or NATS takes no more.
func (s *Store) Bind(ctx context.Context, b Bind) (seq uint64, err error) {
	m, err := s.bindMsg(ctx, b)
	if err == nil {
		seq, err = s.publish(ctx, m.Subject, m.Header, m.Data)
	}
	if err != nil {
		return 0, fmt.Errorf("bind %s#%d on %s: %w", b.Held.Key(), b.Held.Bind, b.Held.Engine, err)
	}
	return seq, nil
}

// bindMsg is the message of a bind, guard included.
func (s *Store) bindMsg(ctx context.Context, b Bind) (*nats.Msg, error) {
	h := b.Held
	if h.State == "" {
		h.State = subjects.StateBound
	}
	if err := checkKey(h.Engine, h.Job, h.ID); err != nil {
		return nil, err
	}
	if h.State == subjects.StateReturned || h.Bind < 1 {
		return nil, fmt.Errorf("%w: state is %s and bind number %d: a bind is bound or external and counts from 1", ErrRefused, h.State, h.Bind)
	}
	if b.TTL < 0 {
		return nil, fmt.Errorf("%w: time to live is %v: give what is left and a day, or 0", ErrRefused, b.TTL)
	}
	header := h.Header()
	header.Set(subjects.HdrMsgID, msgID(h.Job, h.ID, h.Bind))
	guard(header, b.Expected)
	header.Set(subjects.HdrExpectLastSubj, s.pool.EngineGuard(h.Engine))
	if b.TTL > 0 {
		setTTL(header, b.TTL)
	} else {
		setTTL(header, keepFor(h.LeftMS))
	}
	if err := s.room(ctx, len(b.Body)); err != nil {
		return nil, err
	}
	return &nats.Msg{Subject: s.pool.ReservationSubject(h.Engine, h.Job, h.ID), Header: header, Data: b.Body}, nil
}

// keepFor is a reservation's time to live: what nobody retires is reclaimed by
// the server a day after its deadline.
func keepFor(leftMS int64) time.Duration {
	const grace = subjects.ReservationGraceMS * time.Millisecond
	left := min(max(0, leftMS), subjects.MaxDeadline.D().Milliseconds())
	return time.Duration(left)*time.Millisecond + grace
}

// Release deletes a reservation at the revision held; its marker carries how it
// ended and what it used. ErrSuperseded: the key is no longer at that revision
// (released by somebody, perhaps by an earlier attempt of this very call, or
// bound anew). ErrGone: nothing is there. In both cases there is nothing to do.
func (s *Store) Release(ctx context.Context, r subjects.Released, revision uint64) (seq uint64, err error) {
	if err := checkKey(r.Engine, r.Job, r.ID); err != nil {
		return 0, fmt.Errorf("release: %w", err)
	}
	header := r.Header()
	guard(header, revision)
	setTTL(header, MarkerTTL)
	seq, err = s.publish(ctx, s.pool.ReservationSubject(r.Engine, r.Job, r.ID), header, nil)
	if err != nil {
		return 0, fmt.Errorf("release %s on %s at %d: %w", subjects.RolloutKey(r.Job, r.ID), r.Engine, revision, superseded(err))
	}
	return seq, nil
}

// Return gives a reservation back: the whole value again with state returned, at
// the revision held. r.Body must be whole and r.LeftMS what is left now. burnt
// replaces r.Burnt. ErrSuperseded and ErrGone as for Release: drop it.
func (s *Store) Return(ctx context.Context, r Reservation, reason string, burnt int) (seq uint64, err error) {
	if err := checkKey(r.Engine, r.Job, r.ID); err != nil {
		return 0, fmt.Errorf("return: %w", err)
	}
	h := r.Held
	h.State, h.ReturnReason, h.Burnt = subjects.StateReturned, reason, burnt
	if len(r.Body) == 0 {
		return 0, fmt.Errorf("return %s on %s: %w: the body is missing: read it with Reservation first", h.Key(), h.Engine, ErrRefused)
	}
	header := h.Header()
	guard(header, r.Revision)
	setTTL(header, keepFor(h.LeftMS))
	seq, err = s.publish(ctx, s.pool.ReservationSubject(h.Engine, h.Job, h.ID), header, r.Body)
	if err != nil {
		return 0, fmt.Errorf("return %s on %s at %d: %w", h.Key(), h.Engine, r.Revision, superseded(err))
	}
	return seq, nil
}

// Reservation reads a key, body included, from the stream's leader. ErrGone when
// it is not there or deleted, ErrUnavailable without an answer.
func (s *Store) Reservation(ctx context.Context, engine, job, id string) (Reservation, error) {
	if err := checkKey(engine, job, id); err != nil {
		return Reservation{}, fmt.Errorf("read reservation: %w", err)
	}
	d, err := s.last(ctx, s.reservationsStream(), s.pool.ReservationSubject(engine, job, id))
	if err != nil {
		return Reservation{}, err
	}
	if d.deleted() {
		return Reservation{}, fmt.Errorf("%w: %s on %s is released, at sequence %d", ErrGone, subjects.RolloutKey(job, id), engine, d.seq)
	}
	return reservationOf(d, engine, job, id)
}

func reservationOf(d delivery, engine, job, id string) (Reservation, error) {
	held, err := subjects.HeldFromHeader(engine, job, id, d.header)
	if err != nil {
		return Reservation{}, fmt.Errorf("%w: %s at sequence %d: %w", ErrRefused, d.subject, d.seq, err)
	}
	return Reservation{Held: held, Revision: d.seq, Stored: d.stored, TTL: ttlOf(d.header), Body: d.data}, nil
}

// FollowReservations follows the pool's reservations, without bodies unless
// f.Values. The filter is a key filter: "e1.>", "*.j.*".
func (s *Store) FollowReservations(ctx context.Context, f FollowConfig, h Handler[Reservation, Marker]) error {
	sp, err := s.spec(f, subjects.Reservations, s.reservationsStream(), subjects.BucketSubject(s.pool.Bucket(subjects.Reservations), ""))
	if err != nil {
		return err
	}
	sp.headersOnly = !f.Values
	return follow(ctx, s, sp, h, s.decodeReservation)
}

// FollowOwn follows one engine's reservations with their bodies, for its agent,
// under the only consumer name that an agent's credential allows. Of two agents
// that follow one engine each takes the consumer from the other, slower and
// slower: one of them has to see that it is replaced, and stop.
func (s *Store) FollowOwn(ctx context.Context, engine string, h Handler[Reservation, Marker]) error {
	if err := subjects.CheckToken("engine", engine); err != nil {
		return fmt.Errorf("%w: follow: %w", ErrBadOption, err)
	}
	return follow(ctx, s, followSpec{
		stream: s.reservationsStream(), config: s.pool.AgentConsumer(engine),
		fixedName: true, unproved: true, what: "own reservations of " + engine,
	}, h, s.decodeReservation)
}

func (s *Store) decodeReservation(d delivery) (r Reservation, m Marker, k kind, err error) {
	engine, job, id, ok := s.pool.ParseReservationSubject(d.subject)
	if !ok {
		return r, m, kindNone, nil // a seed (seeds.go), or something of a later version
	}
	if d.deleted() {
		rel, err := subjects.ReleasedFromHeader(engine, job, id, d.header)
		return r, Marker{Released: rel, Revision: d.seq, Stored: d.stored, TTL: ttlOf(d.header)}, kindGone, err
	}
	if r, err = reservationOf(d, engine, job, id); err != nil {
		// What was there before is overwritten: gone, whatever this is.
		rel := subjects.Released{Engine: engine, Job: job, ID: id}
		return r, Marker{Released: rel, Revision: d.seq, Stored: d.stored, TTL: ttlOf(d.header)}, kindGone, err
	}
	return r, m, kindPut, nil
}

func (s *Store) reservationsStream() string { return s.bucketStream(subjects.Reservations) }

func checkKey(engine, job, id string) error {
	return refuse(subjects.CheckToken("engine", engine), checkRollout(job, id))
}

func checkRollout(job, id string) error {
	return errors.Join(subjects.CheckToken("job", job), subjects.CheckToken("id", id))
}

func refuse(errs ...error) error {
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%w: %w", ErrRefused, err)
	}
	return nil
}

func msgID(job, id string, bind int) string {
	return subjects.RolloutKey(job, id) + "#" + strconv.Itoa(bind)
}

// deleted tells whether the last message of a key says that there is none.
func (d delivery) deleted() bool { return isMarker(d.header) }

func isMarker(h nats.Header) bool {
	switch h.Get(subjects.HdrKVOperation) {
	case subjects.KVOperationDelete, "PURGE":
		return true
	}
	return h.Get(subjects.HdrMarkerReason) != ""
}
