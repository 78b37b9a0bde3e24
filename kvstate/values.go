package kvstate

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/subjects"
)

// PutEngine writes or renews a registration; the bucket's age ends it.
func (s *Store) PutEngine(ctx context.Context, e subjects.Engine) (rev uint64, err error) {
	if e.SchemaVersion == 0 {
		e.SchemaVersion = subjects.SchemaVersion
	}
	return s.putToken(ctx, subjects.Engines, "engine", e.Engine, e)
}

// DeleteEngine takes a registration away if it is still the one of that
// revision. ErrSuperseded: somebody else has registered since; ErrGone: nothing
// is there. In both cases there is nothing to do.
func (s *Store) DeleteEngine(ctx context.Context, engine string, revision uint64) error {
	return s.deleteToken(ctx, subjects.Engines, "engine", engine, revision)
}

// PutDispatcher writes or renews a registration; the bucket's age ends it.
func (s *Store) PutDispatcher(ctx context.Context, d subjects.Dispatcher) (rev uint64, err error) {
	if d.SchemaVersion == 0 {
		d.SchemaVersion = subjects.SchemaVersion
	}
	return s.putToken(ctx, subjects.Dispatchers, "dispatcher", d.Dispatcher, d)
}

// DeleteDispatcher is DeleteEngine for a dispatcher.
func (s *Store) DeleteDispatcher(ctx context.Context, name string, revision uint64) error {
	return s.deleteToken(ctx, subjects.Dispatchers, "dispatcher", name, revision)
}

// PutCancel asks that work is given up.
func (s *Store) PutCancel(ctx context.Context, c subjects.Cancel) error {
	if c.SchemaVersion == 0 {
		c.SchemaVersion = subjects.SchemaVersion
	}
	errs := []error{subjects.CheckToken("job", c.Job)}
	switch c.Kind {
	case subjects.CancelJob:
	case subjects.CancelVersion:
		if _, err := strconv.ParseInt(c.Value, 10, 64); err != nil {
			errs = append(errs, fmt.Errorf("value of a cancel by version is %q: give a whole number", c.Value))
		}
	case subjects.CancelID, subjects.CancelGroup, subjects.CancelTrajectory:
		if c.Value == "" || len(c.Value) > subjects.MaxString {
			errs = append(errs, fmt.Errorf("value of a cancel by %s is %d bytes long: give 1 to %d", c.Kind, len(c.Value), subjects.MaxString))
		}
	default:
		errs = append(errs, fmt.Errorf("kind of cancel is %q: give id, group, trajectory, job or version", c.Kind))
	}
	if err := refuse(errs...); err != nil {
		return fmt.Errorf("cancel: %w", err)
	}
	if _, err := s.put(ctx, s.pool.Bucket(subjects.Cancels), c.Key(), c, nats.Header{}); err != nil {
		return fmt.Errorf("cancel %s: %w", c.Key(), err)
	}
	return nil
}

// Settings reads the pool's settings and their revision from the leader. ErrGone
// when there are none.
func (s *Store) Settings(ctx context.Context) (subjects.Settings, uint64, error) {
	var out subjects.Settings
	subject := subjects.BucketSubject(subjects.BucketPools, s.pool.String())
	d, err := s.last(ctx, subjects.BucketStream(subjects.BucketPools), subject)
	switch {
	case err != nil:
		return out, 0, fmt.Errorf("settings of pool %s: %w", s.pool, err)
	case d.deleted():
		return out, 0, fmt.Errorf("settings of pool %s: %w: they were deleted, at sequence %d", s.pool, ErrGone, d.seq)
	}
	if err := json.Unmarshal(d.data, &out); err != nil {
		return out, d.seq, fmt.Errorf("settings of pool %s at %d: %w: %w", s.pool, d.seq, ErrRefused, err)
	}
	return out, d.seq, nil
}

// PutSettings replaces the pool's settings if they are still at that revision, 0
// = there are none. One bad value refuses the whole change. ConflictError:
// somebody else was faster.
func (s *Store) PutSettings(ctx context.Context, v subjects.Settings, expected uint64) (uint64, error) {
	if v.SchemaVersion == 0 {
		v.SchemaVersion = subjects.SchemaVersion
	}
	if err := refuse(v.Validate()); err != nil {
		return 0, fmt.Errorf("settings of pool %s: %w", s.pool, err)
	}
	h := nats.Header{}
	guard(h, expected)
	rev, err := s.put(ctx, subjects.BucketPools, s.pool.String(), v, h)
	if err != nil {
		return 0, fmt.Errorf("settings of pool %s: %w", s.pool, err)
	}
	return rev, nil
}

func (s *Store) putToken(ctx context.Context, kind, field, key string, v any) (uint64, error) {
	if err := refuse(subjects.CheckToken(field, key)); err != nil {
		return 0, fmt.Errorf("register: %w", err)
	}
	rev, err := s.put(ctx, s.pool.Bucket(kind), key, v, nats.Header{})
	if err != nil {
		return 0, fmt.Errorf("register %s %s: %w", field, key, err)
	}
	return rev, nil
}

func (s *Store) put(ctx context.Context, bucket, key string, v any, h nats.Header) (uint64, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return 0, fmt.Errorf("%w: %w", ErrRefused, err)
	}
	return s.publish(ctx, subjects.BucketSubject(bucket, key), h, body)
}

func (s *Store) deleteToken(ctx context.Context, kind, field, key string, revision uint64) error {
	if err := refuse(subjects.CheckToken(field, key)); err != nil {
		return fmt.Errorf("deregister: %w", err)
	}
	h := nats.Header{}
	h.Set(subjects.HdrKVOperation, subjects.KVOperationDelete)
	guard(h, revision)
	if _, err := s.publish(ctx, subjects.BucketSubject(s.pool.Bucket(kind), key), h, nil); err != nil {
		return fmt.Errorf("deregister %s %s at %d: %w", field, key, revision, superseded(err))
	}
	return nil
}

// FollowEngines follows registrations. A registration that is not renewed ends
// without a word: time it by Stored.
func (s *Store) FollowEngines(ctx context.Context, f FollowConfig, h Handler[Value[subjects.Engine], Value[struct{}]]) error {
	return followValues(ctx, s, f, subjects.Engines, s.pool.Bucket(subjects.Engines), h,
		func(key string, e subjects.Engine) error { return named(key, e.Engine) })
}

// FollowDispatchers is FollowEngines for dispatchers.
func (s *Store) FollowDispatchers(ctx context.Context, f FollowConfig, h Handler[Value[subjects.Dispatcher], Value[struct{}]]) error {
	return followValues(ctx, s, f, subjects.Dispatchers, s.pool.Bucket(subjects.Dispatchers), h,
		func(key string, d subjects.Dispatcher) error { return named(key, d.Dispatcher) })
}

// FollowCancels follows what is to be given up.
func (s *Store) FollowCancels(ctx context.Context, f FollowConfig, h Handler[Value[subjects.Cancel], Value[struct{}]]) error {
	return followValues(ctx, s, f, subjects.Cancels, s.pool.Bucket(subjects.Cancels), h,
		func(key string, c subjects.Cancel) error { return named(key, c.Key()) })
}

// FollowPools follows the settings of all pools; the filter is a pool's name.
func (s *Store) FollowPools(ctx context.Context, f FollowConfig, h Handler[Value[subjects.Settings], Value[struct{}]]) error {
	return followValues(ctx, s, f, "pools", subjects.BucketPools, h, nil)
}

// named refuses a value that says another name than its key: the server checks
// who may write a key, nobody checks a body.
func named(key, name string) error {
	if key != name {
		return fmt.Errorf("the value at %q names %q: it is not believed", key, name)
	}
	return nil
}

func followValues[T any](ctx context.Context, s *Store, f FollowConfig, what, bucket string, h Handler[Value[T], Value[struct{}]], check func(key string, v T) error) error {
	prefix := subjects.BucketSubject(bucket, "")
	sp, err := s.spec(f, what, subjects.BucketStream(bucket), prefix)
	if err != nil {
		return err
	}
	return follow(ctx, s, sp, h, func(d delivery) (v Value[T], g Value[struct{}], k kind, err error) {
		key := strings.TrimPrefix(d.subject, prefix)
		g = Value[struct{}]{Key: key, Revision: d.seq, Stored: d.stored, TTL: ttlOf(d.header)}
		if d.deleted() {
			return v, g, kindGone, nil
		}
		v = Value[T]{Key: key, Revision: d.seq, Stored: d.stored, TTL: g.TTL}
		if err = json.Unmarshal(d.data, &v.V); err == nil && check != nil {
			err = check(key, v.V)
		}
		switch {
		case err != nil && bucket == subjects.BucketPools:
			return v, g, kindNone, err // bad settings are refused whole: the old ones stay
		case err != nil:
			return v, g, kindGone, err // what was there before is overwritten
		}
		return v, g, kindPut, nil
	})
}
