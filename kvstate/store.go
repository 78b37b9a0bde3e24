package kvstate

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/subjects"
)

// Defaults of the options.
const (
	// DefaultTimeout bounds one attempt of a write or of a read from the leader.
	DefaultTimeout = 2 * time.Second
	// DefaultHeartbeat is how often an idle follower hears from NATS.
	DefaultHeartbeat = 500 * time.Millisecond
	// FillLimit is the share of the reservations bucket's bytes at which binds
	// stop, so that returns and releases still fit.
	FillLimit = 0.9
)

// Option changes a Store.
type Option func(*options) error

type options struct {
	timeout   time.Duration
	heartbeat time.Duration
	log       *slog.Logger
	clock     *ServerClock
}

// ErrBadOption says that an option of Open or a FollowConfig is refused.
var ErrBadOption = errors.New("bad option")

// Timeout bounds one attempt of a write or of a read from the leader: 2 s, from
// 10 ms to 1 min. No answer within it is ErrUnknown for a write.
func Timeout(d time.Duration) Option {
	return func(o *options) error {
		if d < 10*time.Millisecond || d > time.Minute {
			return fmt.Errorf("%w: timeout is %v: give 10ms to 1m", ErrBadOption, d)
		}
		o.timeout = d
		return nil
	}
}

// Heartbeat scales everything a follower waits for: 500 ms, from 10 ms to 1 min.
// An idle consumer speaks once a heartbeat; after 4 without a word the follower
// starts over; every 2 it asks the stream's leader whether it is up to date.
func Heartbeat(d time.Duration) Option {
	return func(o *options) error {
		if d < 10*time.Millisecond || d > time.Minute {
			return fmt.Errorf("%w: heartbeat is %v: give 10ms to 1m", ErrBadOption, d)
		}
		o.heartbeat = d
		return nil
	}
}

// Logger gets one line for each rare thing (a follower that starts over, an
// entry that does not decode); none by default.
func Logger(l *slog.Logger) Option {
	return func(o *options) error {
		if l == nil {
			return fmt.Errorf("%w: logger is nil: leave the option out", ErrBadOption)
		}
		o.log = l
		return nil
	}
}

// Clock shares one estimate of server time among stores; each has its own by default.
func Clock(c *ServerClock) Option {
	return func(o *options) error {
		if c == nil {
			return fmt.Errorf("%w: clock is nil: leave the option out", ErrBadOption)
		}
		o.clock = c
		return nil
	}
}

// Store is one pool on one connection. Its methods may be called from any
// goroutine. It owns neither the connection nor any goroutine that outlives a
// call.
//
// Open the connection with nats.ReconnectBufSize(-1): a write that waits in the
// client's buffer over an outage is sent when nobody expects it any more.
type Store struct {
	nc   *nats.Conn
	js   jetstream.JetStream
	pool subjects.Pool
	opt  options
	fill fill
	seq  counter
}

// Open makes a Store; it talks to nobody and creates nothing (see subjects.Ensure).
func Open(nc *nats.Conn, pool subjects.Pool, opts ...Option) (*Store, error) {
	if nc == nil {
		return nil, fmt.Errorf("%w: connection is nil: connect to NATS first", ErrBadOption)
	}
	if pool.String() == "" {
		return nil, fmt.Errorf("%w: pool has no name: make it with subjects.NewPool", ErrBadOption)
	}
	o := options{timeout: DefaultTimeout, heartbeat: DefaultHeartbeat, log: slog.New(slog.DiscardHandler)}
	var errs []error
	for _, f := range opts {
		errs = append(errs, f(&o))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if o.clock == nil {
		o.clock = new(ServerClock)
	}
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(o.timeout))
	if err != nil {
		return nil, fmt.Errorf("open pool %s: %w", pool, err)
	}
	return &Store{nc: nc, js: js, pool: pool, opt: o, seq: newCounter()}, nil
}

// JS is the JetStream context of the store's connection.
func (s *Store) JS() jetstream.JetStream { return s.js }

// Pool is the pool's names.
func (s *Store) Pool() subjects.Pool { return s.pool }

// Clock is the store's estimate of server time, fed by followers and ServerTime.
func (s *Store) Clock() *ServerClock { return s.opt.clock }

func (s *Store) bucketStream(kind string) string {
	return subjects.BucketStream(s.pool.Bucket(kind))
}
