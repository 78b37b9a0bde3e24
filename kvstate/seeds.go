package kvstate

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/subjects"
)

// Seeding is a bind that adds an owner to a key: the seed and the reservation
// are written together or not at all.
type Seeding struct {
	Bind
	Seed subjects.Seed // what the seed is for is taken from the bind: engine, rollout, bind number, epoch
	At   uint64        // last sequence seen at the seed's key, 0 = none
}

// Seed writes a seed and its reservation as one atomic batch, each under its own
// guard: the seed's key exactly at At, the engine's as Bind. seq is the
// reservation's; the seed stands one below it. Errors are those of Bind, and:
//
//   - ConflictError says which guard moved, and to where. Nothing was written.
//   - DuplicateError has no sequence: read the key with Reservation.
//
// The seed has the reservation's time to live: it ends with it at the latest.
func (s *Store) Seed(ctx context.Context, b Seeding) (seq uint64, err error) {
	what := func(err error) error {
		return fmt.Errorf("seed %s by %s#%d on %s: %w", b.Seed.Key, b.Held.Key(), b.Held.Bind, b.Held.Engine, err)
	}
	if err := subjects.CheckOwnerKey(b.Seed.Key); err != nil {
		return 0, fmt.Errorf("seed: %w", refuse(err))
	}
	bind, err := s.bindMsg(ctx, b.Bind)
	if err != nil {
		return 0, what(err)
	}
	sd := b.Seed
	sd.State, sd.Engine, sd.Job, sd.ID, sd.Bind, sd.Epoch = subjects.SeedLive, b.Held.Engine, b.Held.Job, b.Held.ID, b.Held.Bind, b.Held.Epoch
	seed := &nats.Msg{Subject: s.pool.SeedSubject(sd.Key), Header: sd.Header()}
	guard(seed.Header, b.At)
	seed.Header.Set(subjects.HdrTTL, bind.Header.Get(subjects.HdrTTL))
	if seq, err = s.publishPair(ctx, seed, bind); err == nil {
		return seq, nil
	}
	if c, ok := errors.AsType[*ConflictError](err); ok {
		err = s.whichGuard(ctx, c, seed.Subject, b.At)
	}
	return 0, what(err)
}

// whichGuard finds out whose sequence a refusal of a batch names. The seed's key
// moves up, or to 0 when its message has expired; if it stands, it was the
// engine's.
func (s *Store) whichGuard(ctx context.Context, c *ConflictError, subject string, at uint64) error {
	d, err := s.last(ctx, s.reservationsStream(), subject)
	if err != nil && !errors.Is(err, ErrGone) {
		return fmt.Errorf("%w: nothing was written, and which guard had moved is not known: %w", ErrUnavailable, err)
	}
	if d.seq != at {
		return &ConflictError{Actual: d.seq, Seed: true}
	}
	return c
}

// Cooldown ends a proven seed: until ttl is over its key gets no other. ErrGone
// and ErrSuperseded: somebody else has ended it.
func (s *Store) Cooldown(ctx context.Context, sd subjects.Seed, revision uint64, ttl time.Duration) (seq uint64, err error) {
	sd.State = subjects.SeedCooldown
	return s.endSeed(ctx, sd.Key, sd.Header(), revision, ttl)
}

// GiveBack ends a seed that failed, or whose proof nobody can give. Errors as
// for Cooldown.
func (s *Store) GiveBack(ctx context.Context, key string, revision uint64) (seq uint64, err error) {
	h := nats.Header{}
	h.Set(subjects.HdrKVOperation, subjects.KVOperationDelete)
	return s.endSeed(ctx, key, h, revision, MarkerTTL)
}

func (s *Store) endSeed(ctx context.Context, key string, h nats.Header, revision uint64, ttl time.Duration) (uint64, error) {
	if err := subjects.CheckOwnerKey(key); err != nil {
		return 0, fmt.Errorf("end of a seed: %w", refuse(err))
	}
	guard(h, revision)
	setTTL(h, ttl)
	seq, err := s.publish(ctx, s.pool.SeedSubject(key), h, nil)
	if err != nil {
		return 0, fmt.Errorf("end of seed %s at %d: %w", key, revision, superseded(err))
	}
	return seq, nil
}

// SeedOf reads what stands at a key's seed from the stream's leader; ErrGone when
// nothing does.
func (s *Store) SeedOf(ctx context.Context, key string) (sd subjects.Seed, revision uint64, err error) {
	if err := subjects.CheckOwnerKey(key); err != nil {
		return sd, 0, fmt.Errorf("read seed: %w", refuse(err))
	}
	d, err := s.last(ctx, s.reservationsStream(), s.pool.SeedSubject(key))
	switch {
	case err != nil:
		return sd, 0, err
	case d.deleted():
		return sd, d.seq, fmt.Errorf("%w: the seed of %s is given back, at sequence %d", ErrGone, key, d.seq)
	}
	if sd, err = subjects.SeedFromHeader(key, d.header); err != nil {
		return sd, d.seq, fmt.Errorf("%w: %s at sequence %d: %w", ErrRefused, d.subject, d.seq, err)
	}
	return sd, d.seq, nil
}

// Entry is one key of the reservations bucket as a dispatcher follows it: a
// reservation, or a seed beside which Revision, Stored and TTL are set.
type Entry struct {
	Reservation
	Seed *subjects.Seed
}

// Ended is the marker of either; SeedKey is set for a seed, beside Revision,
// Stored and TTL.
type Ended struct {
	Marker
	SeedKey string
}

// FollowAll is FollowReservations with the seeds, in stream order: a seed comes
// right before the reservation that it was written with.
func (s *Store) FollowAll(ctx context.Context, f FollowConfig, h Handler[Entry, Ended]) error {
	sp, err := s.spec(f, subjects.Reservations, s.reservationsStream(), subjects.BucketSubject(s.pool.Bucket(subjects.Reservations), ""))
	if err != nil {
		return err
	}
	sp.headersOnly = !f.Values
	return follow(ctx, s, sp, h, s.decodeAny)
}

func (s *Store) decodeAny(d delivery) (e Entry, x Ended, k kind, err error) {
	key, ok := s.pool.ParseSeedSubject(d.subject)
	if !ok {
		r, m, k, err := s.decodeReservation(d)
		return Entry{Reservation: r}, Ended{Marker: m}, k, err
	}
	x = Ended{SeedKey: key, Marker: Marker{Revision: d.seq, Stored: d.stored, TTL: ttlOf(d.header)}}
	if d.deleted() {
		return e, x, kindGone, nil
	}
	sd, err := subjects.SeedFromHeader(key, d.header)
	if err != nil {
		return e, x, kindGone, err // what was there before is overwritten
	}
	e = Entry{Seed: &sd, Reservation: Reservation{Revision: d.seq, Stored: d.stored, TTL: x.TTL}}
	return e, x, kindPut, nil
}

// PutOwners writes the owners of a key if they are still at that revision, 0 =
// there are none. ConflictError: somebody else was faster.
func (s *Store) PutOwners(ctx context.Context, o subjects.Ownership, expected uint64, ttl time.Duration) (uint64, error) {
	if o.SchemaVersion == 0 {
		o.SchemaVersion = subjects.SchemaVersion
	}
	if err := subjects.CheckOwnerKey(o.Key); err != nil {
		return 0, fmt.Errorf("owners: %w", refuse(err))
	}
	h := nats.Header{}
	guard(h, expected)
	setTTL(h, ttl)
	rev, err := s.put(ctx, s.pool.Bucket(subjects.Owners), o.Key, o, h)
	if err != nil {
		return 0, fmt.Errorf("owners of %s at %d: %w", o.Key, expected, err)
	}
	return rev, nil
}

// DeleteOwners takes the last owner of a key away, at that revision.
func (s *Store) DeleteOwners(ctx context.Context, key string, revision uint64) (uint64, error) {
	if err := subjects.CheckOwnerKey(key); err != nil {
		return 0, fmt.Errorf("owners: %w", refuse(err))
	}
	h := nats.Header{}
	h.Set(subjects.HdrKVOperation, subjects.KVOperationDelete)
	guard(h, revision)
	setTTL(h, MarkerTTL)
	rev, err := s.publish(ctx, subjects.BucketSubject(s.pool.Bucket(subjects.Owners), key), h, nil)
	if err != nil {
		return 0, fmt.Errorf("delete the owners of %s at %d: %w", key, revision, err)
	}
	return rev, nil
}

// FollowOwners follows the owner map. An entry ends without a word when its TTL
// is over.
func (s *Store) FollowOwners(ctx context.Context, f FollowConfig, h Handler[Value[subjects.Ownership], Value[struct{}]]) error {
	return followValues(ctx, s, f, subjects.Owners, s.pool.Bucket(subjects.Owners), h,
		func(key string, o subjects.Ownership) error {
			if strings.Contains(key, ".") {
				return fmt.Errorf("key %q is no owner key", key)
			}
			return named(key, o.Key)
		})
}
