package client

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// Option changes a Client.
type Option func(*options) error

type options struct {
	reader        string
	maxInFlight   int
	maxHeld       int
	maxUnanswered int
	ledgerBytes   int64
	ledger        bool
	manual        bool
	grace         time.Duration
	retryFor      time.Duration
	poll          time.Duration
	settings      *subjects.Settings
	secret        []byte
	log           *slog.Logger
}

func defaults() options {
	return options{
		reader: subjects.DefaultReader, maxInFlight: 256, maxHeld: 256, maxUnanswered: 100_000,
		ledgerBytes: 256 << 20, ledger: true, grace: 2 * time.Minute, retryFor: 30 * time.Second,
		poll: 2 * time.Second, log: slog.New(slog.DiscardHandler),
	}
}

func number(o *int, name string, n, lo, hi int) error {
	if n < lo || n > hi {
		return fmt.Errorf("%w: %s is %d: give %d to %d", ErrBadOption, name, n, lo, hi)
	}
	*o = n
	return nil
}

func duration(o *time.Duration, name string, d, lo, hi time.Duration) error {
	if d < lo || d > hi {
		return fmt.Errorf("%w: %s is %v: give %v to %v", ErrBadOption, name, d, lo, hi)
	}
	*o = d
	return nil
}

// Reader names this process among those of its job: it is handed the answers of
// what is submitted under this name. Default "main".
func Reader(name string) Option {
	return func(o *options) error {
		if err := subjects.CheckToken("reader", name); err != nil {
			return fmt.Errorf("%w: %w", ErrBadOption, err)
		}
		o.reader = name
		return nil
	}
}

// MaxInFlight bounds what SubmitMany sends before the first is acknowledged,
// requests: 256, 1 to 4,096.
func MaxInFlight(n int) Option {
	return func(o *options) error { return number(&o.maxInFlight, "MaxInFlight", n, 1, 4096) }
}

// MaxHeld bounds the answers fetched and not yet handed out: 256, 1 to 8,192.
func MaxHeld(n int) Option {
	return func(o *options) error { return number(&o.maxHeld, "MaxHeld", n, 1, 8192) }
}

// MaxUnanswered bounds the rollouts submitted by this client and not answered:
// 100,000. One more is a BackpressureError.
func MaxUnanswered(n int) Option {
	return func(o *options) error { return number(&o.maxUnanswered, "MaxUnanswered", n, 1, 10_000_000) }
}

// LedgerBytes bounds the requests kept to be submitted once more if they are
// lost, bytes: 256 MiB. What is beyond it is reported as lost at once.
func LedgerBytes(n int64) Option {
	return func(o *options) error {
		if n < 0 {
			return fmt.Errorf("%w: LedgerBytes is %d: give 0 or more", ErrBadOption, n)
		}
		o.ledgerBytes = n
		return nil
	}
}

// WithoutLedger keeps nothing of what is submitted: for a process that ends
// before the answers come. Reply keys are checked only with a ReplySecret then.
func WithoutLedger() Option {
	return func(o *options) error { o.ledger = false; return nil }
}

// ManualDone makes Done the only way to receive: asking a Results loop for the
// next answer says nothing of the last. For trainers that keep answers in
// batches.
func ManualDone() Option {
	return func(o *options) error { o.manual = true; return nil }
}

// Grace is how long after a deadline without an answer the client begins to
// look for a rollout: 2 min, 1 s to 24 h.
func Grace(d time.Duration) Option {
	return func(o *options) error { return duration(&o.grace, "Grace", d, time.Second, 24*time.Hour) }
}

// RetryFor bounds how long a submit is repeated while NATS does not answer:
// 30 s, 0 (once) to 1 h. The context's deadline counts too.
func RetryFor(d time.Duration) Option {
	return func(o *options) error { return duration(&o.retryFor, "RetryFor", d, 0, time.Hour) }
}

// Settings gives the pool's settings instead of reading them from NATS KV.
// They decide block hashes and the default deadline; a wrong block size only
// costs the dispatcher the decoding of the body.
func Settings(s subjects.Settings) Option {
	return func(o *options) error {
		if err := s.Validate(); err != nil {
			return fmt.Errorf("%w: %w", ErrBadOption, err)
		}
		o.settings = &s
		return nil
	}
}

// ReplySecret makes reply keys the same after a restart, so that answers to
// what an earlier process submitted are checked too. 16 to 1,024 bytes; by
// default a random one that lives as long as the client.
func ReplySecret(secret []byte) Option {
	return func(o *options) error {
		if len(secret) < 16 || len(secret) > 1024 {
			return fmt.Errorf("%w: ReplySecret has %d bytes: give 16 to 1024", ErrBadOption, len(secret))
		}
		o.secret = append([]byte(nil), secret...)
		return nil
	}
}

// Logger gets a line for each rare thing (a rollout that was lost, a consumer
// made anew); none by default.
func Logger(l *slog.Logger) Option {
	return func(o *options) error {
		if l == nil {
			return fmt.Errorf("%w: Logger is nil: leave the option out", ErrBadOption)
		}
		o.log = l
		return nil
	}
}
