package subjects

import (
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Layout is how the streams and buckets of a pool are made. It counts only for
// what does not exist yet: Ensure never changes a stream. Zero fields take the
// defaults named beside them.
type Layout struct {
	Replicas int                   // copies of everything: 1 to 5; 1 (production: 3)
	Storage  jetstream.StorageType // file (the zero value) or memory
	Record   bool                  // make RECORD_<pool>, the copy for people and tools

	ResultsKeep time.Duration // unread answers; 7 days, 2 m to 90 days
	JournalKeep time.Duration // JOURNAL; 7 days
	RecordKeep  time.Duration // RECORD; 24 h
	DeadKeep    time.Duration // DEAD; 30 days
	LivenessTTL time.Duration // registrations of engines and dispatchers; 15 s, at least 1 s (the server's grain)

	// Budget is what the pool may occupy in bytes on each replica: 8 GiB on
	// file, 1 GiB in memory. NATS reserves it. Each stream takes its share
	// unless it is given by name below. At least 64 MiB.
	Budget int64

	RolloutsBytes     int64 // waiting requests; 12/32 of Budget
	ResultsBytes      int64 // unread answers; 8/32
	ReservationsBytes int64 // requests bound to engines; 4/32. Binds stop at 90 %
	RetryBytes        int64 // requests coming back; 2/32
	DeadBytes         int64 // 1/32, oldest go first
	JournalBytes      int64 // 1/32, oldest go first
	RecordBytes       int64 // 2/32, oldest go first
	PartialsBytes     int64 // checkpoints of output; 1/32
	SmallBytes        int64 // each of engines, dispatchers, owners, cancels, pools; 1/256

	// MaxConsumers a stream may have: 100,000. A job takes up to five
	// (NATS would stop at 1,000).
	MaxConsumers int
}

const (
	minBudget      = 64 << 20
	maxHeaderBytes = 64 << 10 // NATS ends headers there
	minStreamBytes = 64 << 10
)

// WithDefaults returns the layout with every zero replaced by its default.
func (l Layout) WithDefaults() Layout {
	if l.Replicas == 0 {
		l.Replicas = 1
	}
	if l.MaxConsumers == 0 {
		l.MaxConsumers = 100_000
	}
	dur := func(p *time.Duration, v time.Duration) {
		if *p == 0 {
			*p = v
		}
	}
	dur(&l.ResultsKeep, DefaultResultsKeep.D())
	dur(&l.JournalKeep, 7*24*time.Hour)
	dur(&l.RecordKeep, 24*time.Hour)
	dur(&l.DeadKeep, 30*24*time.Hour)
	dur(&l.LivenessTTL, DefaultLivenessTTL)
	if l.Budget == 0 {
		l.Budget = 8 << 30
		if l.Storage == jetstream.MemoryStorage {
			l.Budget = 1 << 30
		}
	}
	share := func(p *int64, part, of int64) {
		if *p == 0 {
			*p = l.Budget / of * part
		}
	}
	share(&l.RolloutsBytes, 12, 32)
	share(&l.ResultsBytes, 8, 32)
	share(&l.ReservationsBytes, 4, 32)
	share(&l.RetryBytes, 2, 32)
	share(&l.RecordBytes, 2, 32)
	share(&l.DeadBytes, 1, 32)
	share(&l.JournalBytes, 1, 32)
	share(&l.PartialsBytes, 1, 32)
	share(&l.SmallBytes, 1, 256)
	return l
}

// DefaultLivenessTTL is how long a registration lives unrenewed.
const DefaultLivenessTTL = 15 * time.Second

// ErrBadLayout says that a layout is refused.
var ErrBadLayout = errors.New("bad layout")

// Validate names everything that is wrong with a layout.
func (l Layout) Validate() error {
	l = l.WithDefaults()
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: %s", ErrBadLayout, fmt.Sprintf(format, args...)))
	}
	if l.Replicas < 1 || l.Replicas > 5 {
		bad("replicas is %d: give 1 to 5, 3 in production", l.Replicas)
	}
	if l.Storage != jetstream.FileStorage && l.Storage != jetstream.MemoryStorage {
		bad("storage is %d: give file or memory", int(l.Storage))
	}
	between := func(name string, v, lo, hi time.Duration) {
		if v < lo || v > hi {
			bad("%s is %v: give %v to %v", name, v, lo, hi)
		}
	}
	const day = 24 * time.Hour
	between("results_keep", l.ResultsKeep, dupWindow, 90*day)
	between("journal_keep", l.JournalKeep, time.Minute, 365*day)
	between("record_keep", l.RecordKeep, time.Minute, 365*day)
	between("dead_keep", l.DeadKeep, time.Minute, 365*day)
	between("liveness_ttl", l.LivenessTTL, time.Second, 10*time.Minute)
	if l.Budget < minBudget {
		bad("budget is %d bytes: give at least %d", l.Budget, minBudget)
	}
	for _, b := range []struct {
		name string
		v    int64
	}{
		{"rollouts_bytes", l.RolloutsBytes}, {"results_bytes", l.ResultsBytes},
		{"reservations_bytes", l.ReservationsBytes}, {"retry_bytes", l.RetryBytes},
		{"dead_bytes", l.DeadBytes}, {"journal_bytes", l.JournalBytes}, {"record_bytes", l.RecordBytes},
		{"partials_bytes", l.PartialsBytes}, {"small_bytes", l.SmallBytes},
	} {
		if b.v < minStreamBytes {
			bad("%s is %d: give at least %d", b.name, b.v, minStreamBytes)
		}
	}
	if l.MaxConsumers < 16 {
		bad("max_consumers is %d: give at least 16", l.MaxConsumers)
	}
	return errors.Join(errs...)
}
