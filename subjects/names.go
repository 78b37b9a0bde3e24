package subjects

import (
	"errors"
	"fmt"
	"strings"
)

// MaxToken is the longest subject token accepted, in bytes.
const MaxToken = 128

// ErrBadName says that a token cannot stand in a subject.
var ErrBadName = errors.New("bad name")

// CheckToken refuses anything but [a-z0-9_-], 1 to MaxToken bytes, not starting
// with '_' (those names are rollbus's own). The error names field and value.
func CheckToken(field, value string) error {
	switch {
	case value == "":
		return fmt.Errorf("%w: %s is empty: give 1 to %d characters of a-z 0-9 _ -", ErrBadName, field, MaxToken)
	case len(value) > MaxToken:
		return fmt.Errorf("%w: %s is %d bytes long: at most %d are allowed", ErrBadName, field, len(value), MaxToken)
	case value[0] == '_':
		return fmt.Errorf("%w: %s %q starts with '_', which is reserved: choose another first character", ErrBadName, field, value)
	}
	for i := range len(value) {
		c := value[i]
		if c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '_' || c == '-' {
			continue
		}
		return fmt.Errorf("%w: %s %q has %q at byte %d: use only a-z 0-9 _ -", ErrBadName, field, value, rune(c), i)
	}
	return nil
}

// RolloutKey names a rollout everywhere: <job>.<id>.
func RolloutKey(job, id string) string { return job + "." + id }

// SplitRolloutKey is the inverse of RolloutKey.
func SplitRolloutKey(key string) (job, id string, ok bool) {
	job, id, ok = strings.Cut(key, ".")
	return job, id, ok && job != "" && id != "" && !strings.Contains(id, ".")
}

// Pool spells the names of one pool. The zero value is useless: make it with NewPool.
type Pool struct{ name string }

// NewPool checks the name.
func NewPool(name string) (Pool, error) {
	if err := CheckToken("pool", name); err != nil {
		return Pool{}, err
	}
	return Pool{name}, nil
}

// String is the pool's name.
func (p Pool) String() string { return p.name }

// Streams.

// Rollouts is the WorkQueue stream of submitted requests.
func (p Pool) Rollouts() string { return "ROLLOUTS_" + p.name }

// Retry is the WorkQueue stream of requeued requests.
func (p Pool) Retry() string { return "RETRY_" + p.name }

// Results is the result register.
func (p Pool) Results() string { return "RESULTS_" + p.name }

// Dead keeps what could not be served.
func (p Pool) Dead() string { return "DEAD_" + p.name }

// Journal keeps the recorded inputs of dispatchers.
func (p Pool) Journal() string { return "JOURNAL_" + p.name }

// Record keeps copies for people and tools.
func (p Pool) Record() string { return "RECORD_" + p.name }

// Buckets.

// BucketPools is the one bucket shared by all pools: settings by pool name.
const BucketPools = "rollbus_pools"

// Bucket kinds of a pool.
const (
	Reservations = "reservations"
	Engines      = "engines"
	Dispatchers  = "dispatchers"
	Owners       = "owners"
	Cancels      = "cancels"
	Partials     = "partials"
)

// Bucket is the name of the pool's bucket of that kind.
func (p Pool) Bucket(kind string) string { return "rollbus_" + p.name + "_" + kind }

// BucketStream is the stream behind a bucket.
func BucketStream(bucket string) string { return "KV_" + bucket }

// BucketSubject is the subject of a key of a bucket ("" for the whole bucket's prefix).
func BucketSubject(bucket, key string) string { return "$KV." + bucket + "." + key }

// Subjects.

// Submit is where a trainer publishes a request.
func (p Pool) Submit(job string, lane Lane) string {
	return "rollout." + p.name + ".submit." + job + "." + string(lane)
}

// SubmitFilter is every submit subject of the pool.
func (p Pool) SubmitFilter() string { return "rollout." + p.name + ".submit.>" }

// RetrySubject is where dispatchers requeue.
func (p Pool) RetrySubject(job string) string { return "rollout." + p.name + ".retry." + job }

// RetryFilter is every retry subject of the pool.
func (p Pool) RetryFilter() string { return "rollout." + p.name + ".retry.>" }

// Result is the register entry of a rollout.
func (p Pool) Result(job, reader, id string) string {
	return "rollout." + p.name + ".result." + job + "." + reader + "." + id
}

// ResultFilter is every result subject of the pool; with a job, of that job;
// with a reader too, of that reader.
func (p Pool) ResultFilter(job, reader string) string {
	base := "rollout." + p.name + ".result."
	switch {
	case job == "":
		return base + ">"
	case reader == "":
		return base + job + ".>"
	default:
		return base + job + "." + reader + ".>"
	}
}

// Tokens carries streamed deltas of one rollout.
func (p Pool) Tokens(job, id string) string { return "rollout." + p.name + ".tokens." + job + "." + id }

// Load carries an engine's load snapshots.
func (p Pool) Load(engine string) string { return "rollout." + p.name + ".load." + engine }

// Cache carries an engine's cache events.
func (p Pool) Cache(engine string) string { return "rollout." + p.name + ".cache." + engine }

// Snapshot is the request/reply subject for an engine's whole block set.
func (p Pool) Snapshot(engine string) string { return "rollout." + p.name + ".snapshot." + engine }

// Decision carries one line per decision, for consoles.
func (p Pool) Decision() string { return "rollout." + p.name + ".decision" }

// JournalSubject is a dispatcher's journal.
func (p Pool) JournalSubject(dispatcher string) string {
	return "rollout." + p.name + ".journal." + dispatcher
}

// DeadSubject is where what could not be served of a job goes.
func (p Pool) DeadSubject(job string) string { return "rollout." + p.name + ".dead." + job }

// Ping asks dispatchers to look for new jobs at once.
func (p Pool) Ping() string { return "rollout." + p.name + ".ping" }

// RecordPrefix is where RECORD's subjects live.
func (p Pool) RecordPrefix() string { return "rollout." + p.name + ".record" }

// ReservationSubject is the subject of one binding.
func (p Pool) ReservationSubject(engine, job, id string) string {
	return BucketSubject(p.Bucket(Reservations), engine+"."+job+"."+id)
}

// EngineGuard is the one string that every bind on an engine is guarded by.
// All binders must send it byte for byte: on R3 the server serialises guarded
// writes by this string, not by the set of subjects it matches
// (docs/decisions/0004).
func (p Pool) EngineGuard(engine string) string {
	return BucketSubject(p.Bucket(Reservations), engine+".>")
}

// ParseReservationSubject reads engine, job and id back from a reservation's subject.
func (p Pool) ParseReservationSubject(subject string) (engine, job, id string, ok bool) {
	rest, ok := strings.CutPrefix(subject, BucketSubject(p.Bucket(Reservations), ""))
	if !ok {
		return "", "", "", false
	}
	parts := strings.Split(rest, ".")
	if len(parts) != 3 {
		return "", "", "", false
	}
	return parts[0], parts[1], parts[2], true
}

// ParseResultSubject reads job, reader and id back from a result's subject.
func (p Pool) ParseResultSubject(subject string) (job, reader, id string, ok bool) {
	rest, ok := strings.CutPrefix(subject, "rollout."+p.name+".result.")
	if !ok {
		return "", "", "", false
	}
	parts := strings.Split(rest, ".")
	if len(parts) != 3 {
		return "", "", "", false
	}
	return parts[0], parts[1], parts[2], true
}

// ParseSubmitSubject reads job and lane back from a submit subject.
func (p Pool) ParseSubmitSubject(subject string) (job string, lane Lane, ok bool) {
	rest, ok := strings.CutPrefix(subject, "rollout."+p.name+".submit.")
	if !ok {
		return "", "", false
	}
	j, l, ok := strings.Cut(rest, ".")
	if !ok || j == "" || !Lane(l).Valid() {
		return "", "", false
	}
	return j, Lane(l), true
}

// ParseRetrySubject reads the job back from a retry subject.
func (p Pool) ParseRetrySubject(subject string) (job string, ok bool) {
	job, ok = strings.CutPrefix(subject, "rollout."+p.name+".retry.")
	return job, ok && job != "" && !strings.Contains(job, ".")
}

// Lane is a queue of a job, most urgent first: urgent, continue, normal, batch.
type Lane string

// The lanes.
const (
	LaneUrgent   Lane = "urgent"
	LaneContinue Lane = "continue" // turn > 1 of a trajectory
	LaneNormal   Lane = "normal"
	LaneBatch    Lane = "batch"
)

// Lanes lists every lane, most urgent first.
var Lanes = [...]Lane{LaneUrgent, LaneContinue, LaneNormal, LaneBatch}

// Valid tells whether the lane is one of Lanes.
func (l Lane) Valid() bool {
	switch l {
	case LaneUrgent, LaneContinue, LaneNormal, LaneBatch:
		return true
	}
	return false
}

// ConsumerRollouts is the durable of a job and lane on ROLLOUTS.
// The prefix changes with the consumer's configuration, never the configuration under a name.
func ConsumerRollouts(job string, lane Lane) string { return "d1-" + job + "-" + string(lane) }

// ConsumerRetry is the durable of a job on RETRY.
func ConsumerRetry(job string) string { return "d1-" + job }

// ConsumerTrainer is the durable of a job's reader on RESULTS.
func ConsumerTrainer(job, reader string) string { return "t-" + job + "-" + reader }

// ConsumerAgent is the one consumer an agent may have on reservations.
func ConsumerAgent(engine string) string { return "a-" + engine }

// ConsumerAgentFollower is the one consumer that the agent of an engine may have
// on each of the buckets of engines, cancels and pools. The last one is shared by
// all pools, hence the pool's name; + is in no token.
func (p Pool) ConsumerAgentFollower(engine string) string { return "a-" + p.name + "+" + engine }
