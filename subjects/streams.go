package subjects

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// dupWindow is how long a message id is remembered.
const dupWindow = 2 * time.Minute

// Streams is the configuration of every stream of the pool, buckets included,
// in the order in which they are made.
func (p Pool) Streams(l Layout) []jetstream.StreamConfig {
	l = l.WithDefaults()
	out := []jetstream.StreamConfig{
		p.bucket(l, BucketPools, "settings of the pools", l.SmallBytes, 0),
		p.bucket(l, p.Bucket(Engines), "engines, renewed by their agents", l.SmallBytes, l.LivenessTTL),
		p.bucket(l, p.Bucket(Dispatchers), "dispatchers, renewed by themselves", l.SmallBytes, l.LivenessTTL),
		p.bucket(l, p.Bucket(Owners), "which engines own which prefix", l.SmallBytes, 0),
		p.bucket(l, p.Bucket(Cancels), "what to give up", l.SmallBytes, MaxDeadline.D()+time.Hour),
		p.bucket(l, p.Bucket(Partials), "checkpoints of unfinished output", l.PartialsBytes, MaxDeadline.D()+time.Hour),
		p.reservations(l),
		p.queue(l, p.Rollouts(), "submitted requests", "submit", l.RolloutsBytes),
		p.queue(l, p.Retry(), "requeued requests", "retry", l.RetryBytes),
		p.results(l),
		p.log(l, p.Dead(), "what could not be served", []string{p.DeadSubject(">")}, l.DeadKeep, l.DeadBytes),
		p.log(l, p.Journal(), "recorded inputs of dispatchers", []string{p.JournalSubject(">")}, l.JournalKeep, l.JournalBytes),
	}
	if l.Record {
		out = append(out, p.log(l, p.Record(), "copies for people and tools",
			[]string{p.RecordPrefix() + ".>", p.Load(">"), p.Cache(">"), p.Decision()}, l.RecordKeep, l.RecordBytes))
	}
	return out
}

func (l Layout) stream(name, description string, bytes int64) jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name: name, Description: "rollbus: " + description,
		MaxBytes: bytes, MaxMsgs: -1, MaxMsgsPerSubject: -1,
		MaxConsumers: l.MaxConsumers, Storage: l.Storage, Replicas: l.Replicas,
		Discard: jetstream.DiscardNew, Duplicates: dupWindow, AllowDirect: true,
	}
}

// bucket is a NATS KV bucket without what wipes one: CreateKeyValue always
// allows rollup, and so does any SubjectDeleteMarkerTTL, silently.
func (p Pool) bucket(l Layout, name, description string, bytes int64, age time.Duration) jetstream.StreamConfig {
	c := l.stream(BucketStream(name), description, bytes)
	c.Subjects = []string{BucketSubject(name, ">")}
	c.MaxMsgsPerSubject = 1
	c.MaxAge = age
	if age > 0 {
		c.Duplicates = min(c.Duplicates, age)
	}
	c.DenyDelete, c.AllowMsgTTL, c.AllowAtomicPublish = true, true, true
	return c
}

func (p Pool) reservations(l Layout) jetstream.StreamConfig {
	c := p.bucket(l, p.Bucket(Reservations), "requests bound to engines", l.ReservationsBytes, 0)
	c.MaxMsgSize = int32(MaxRequestBytes + maxHeaderBytes)
	return c
}

func (p Pool) queue(l Layout, name, description, kind string, bytes int64) jetstream.StreamConfig {
	c := l.stream(name, description, bytes)
	c.Subjects = []string{"rollout." + p.name + "." + kind + ".>"}
	if kind == "submit" {
		// Lane by lane: a submit to a misspelt lane has no stream, and its
		// publisher is told at once.
		c.Subjects = nil
		for _, lane := range Lanes {
			c.Subjects = append(c.Subjects, p.Submit("*", lane))
		}
	}
	c.Retention = jetstream.WorkQueuePolicy
	c.MaxMsgSize = int32(MaxRequestBytes + maxHeaderBytes)
	c.DenyDelete = true
	c.RePublish = p.recorded(kind)
	return c
}

// results is the register: one message a subject, which a guarded write
// replaces. DiscardNewPerSubject would refuse the replacement that says
// "received"; the first answer is protected by its guard, expected sequence 0.
func (p Pool) results(l Layout) jetstream.StreamConfig {
	c := l.stream(p.Results(), "one answer a rollout", l.ResultsBytes)
	c.Subjects = []string{p.ResultFilter("", "")}
	c.MaxMsgsPerSubject = 1
	c.MaxAge = l.ResultsKeep
	c.DenyDelete, c.AllowMsgTTL = true, true
	c.RePublish = p.recorded("result")
	return c
}

// log keeps what it can and drops the oldest. No AllowMsgTTL: republished
// headers are obeyed, so that "received" and what expires are refused here.
func (p Pool) log(l Layout, name, description string, subjects []string, age time.Duration, bytes int64) jetstream.StreamConfig {
	c := l.stream(name, description, bytes)
	c.Subjects = subjects
	c.Discard = jetstream.DiscardOld
	c.MaxAge = age
	c.Duplicates = min(c.Duplicates, age)
	return c
}

// recorded copies what is stored to RECORD's subjects, whether RECORD exists or
// not: streams are never updated, so that it can be made later.
func (p Pool) recorded(kind string) *jetstream.RePublish {
	base := "rollout." + p.name + "."
	return &jetstream.RePublish{Source: base + kind + ".>", Destination: base + "record." + kind + ".>"}
}

// ErrForeignStream says that a stream of that name exists and is not made as
// rollbus needs it. Nothing was changed.
var ErrForeignStream = errors.New("stream exists with another configuration")

// Ensure makes what is missing of the pool's streams and buckets and checks
// what is there. It is safe from many processes at one instant and never
// updates or deletes a stream: sizes, ages and replicas of existing streams are
// the operator's, only what safety rests on is checked. It waits for NATS until
// ctx ends; give it a deadline.
func Ensure(ctx context.Context, js jetstream.JetStream, p Pool, l Layout) error {
	if p.name == "" {
		return fmt.Errorf("%w: the pool has no name: make it with NewPool", ErrBadName)
	}
	if err := l.Validate(); err != nil {
		return err
	}
	for _, want := range p.Streams(l) {
		if err := ensure(ctx, js, want); err != nil {
			return fmt.Errorf("ensure stream %s: %w", want.Name, err)
		}
	}
	return nil
}

// EnsureBucketPools makes only the bucket that all pools share.
func EnsureBucketPools(ctx context.Context, js jetstream.JetStream, l Layout) error {
	if err := l.Validate(); err != nil {
		return err
	}
	l = l.WithDefaults()
	want := Pool{}.bucket(l, BucketPools, "settings of the pools", l.SmallBytes, 0)
	if err := ensure(ctx, js, want); err != nil {
		return fmt.Errorf("ensure stream %s: %w", want.Name, err)
	}
	return nil
}

// lookTime is how long one look at a stream, and its creation, may take.
const lookTime = 5 * time.Second

func ensure(ctx context.Context, js jetstream.JetStream, want jetstream.StreamConfig) error {
	pause := 20 * time.Millisecond
	for {
		// A request that is lost in an election is never answered: each look has
		// its own time, or one of them would use up all there is.
		try, cancel := context.WithTimeout(ctx, lookTime)
		s, err := js.Stream(try, want.Name)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			s, err = js.CreateStream(try, want)
		}
		late := try.Err() != nil && ctx.Err() == nil
		cancel()
		if err == nil {
			return Check(want, s.CachedInfo().Config)
		}
		// Somebody made it meanwhile, or the cluster is not ready: look again.
		// Everything else is an answer.
		if !errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) && !passing(err) && !late {
			return err
		}
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("%w, last answer: %w", context.Cause(ctx), err)
		case <-t.C:
		}
		pause = min(2*pause, time.Second)
	}
}

// codeNoPeers is JetStream's "no suitable peers for placement", with the reason.
const codeNoPeers = 10005

// passing tells whether an error of the JetStream API may go away by itself.
func passing(err error) bool {
	if api, ok := errors.AsType[*jetstream.APIError](err); ok {
		// 10005, no suitable peers, too: they are offline, as in a rolling restart,
		// or there are too few; only who waits can tell.
		return (api.Code == 503 || api.ErrorCode == codeNoPeers) && !strings.Contains(api.Description, "insufficient")
	}
	return errors.Is(err, jetstream.ErrNoStreamResponse)
}

// Check compares a stream with what rollbus needs and names every difference
// that matters: what an entry's safety rests on, not sizes, ages and replicas.
func Check(want, got jetstream.StreamConfig) error {
	var errs []error
	bad := func(what string, got, need any) {
		errs = append(errs, fmt.Errorf("%w: %s has %s %v and needs %v: make the pool under another name, or move that stream away", ErrForeignStream, want.Name, what, got, need))
	}
	if !slices.Equal(slices.Sorted(slices.Values(got.Subjects)), slices.Sorted(slices.Values(want.Subjects))) {
		bad("subjects", got.Subjects, want.Subjects)
	}
	if got.Retention != want.Retention {
		bad("retention", got.Retention, want.Retention)
	}
	if got.Discard != want.Discard {
		bad("discard", got.Discard, want.Discard)
	}
	if got.DiscardNewPerSubject {
		bad("discard_new_per_subject", true, false)
	}
	if got.MaxMsgsPerSubject != want.MaxMsgsPerSubject {
		bad("max_msgs_per_subject", got.MaxMsgsPerSubject, want.MaxMsgsPerSubject)
	}
	flag := func(what string, got, need bool) {
		if got != need {
			bad(what, got, need)
		}
	}
	flag("allow_rollup_hdrs", got.AllowRollup, false)
	flag("deny_delete", got.DenyDelete, want.DenyDelete)
	flag("allow_msg_ttl", got.AllowMsgTTL, want.AllowMsgTTL)
	flag("allow_atomic", got.AllowAtomicPublish, want.AllowAtomicPublish)
	flag("allow_direct", got.AllowDirect, true)
	flag("no_ack", got.NoAck, false)
	flag("sealed", got.Sealed, false)
	if got.SubjectDeleteMarkerTTL != 0 {
		bad("subject_delete_marker_ttl", got.SubjectDeleteMarkerTTL, 0)
	}
	if (got.MaxAge > 0) != (want.MaxAge > 0) {
		bad("max_age", got.MaxAge, want.MaxAge)
	}
	if got.Mirror != nil || len(got.Sources) > 0 || got.SubjectTransform != nil {
		bad("a mirror, sources or a transform:", true, false)
	}
	if got.RePublish != nil && (want.RePublish == nil || got.RePublish.Destination != want.RePublish.Destination) {
		bad("republish to", got.RePublish.Destination, "none")
	}
	return errors.Join(errs...)
}

// Consumer configurations. All are created and never updated: a changed one
// takes a new name.

// RolloutsConsumer is the durable of a job and lane on ROLLOUTS. NATS delivers
// for ever (attempts are counted by us), and delayed naks count as pending,
// hence no bound on pending acks.
func (p Pool) RolloutsConsumer(job string, lane Lane) jetstream.ConsumerConfig {
	return queueConsumer(ConsumerRollouts(job, lane), p.Submit(job, lane))
}

// RetryConsumer is the durable of a job on RETRY.
func (p Pool) RetryConsumer(job string) jetstream.ConsumerConfig {
	return queueConsumer(ConsumerRetry(job), p.RetrySubject(job))
}

func queueConsumer(name, filter string) jetstream.ConsumerConfig {
	return jetstream.ConsumerConfig{
		Durable: name, FilterSubject: filter,
		DeliverPolicy: jetstream.DeliverAllPolicy, AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: 30 * time.Second, MaxDeliver: -1, MaxAckPending: -1,
		InactiveThreshold: time.Hour,
	}
}

// TrainerConsumer is the durable of a job's reader on RESULTS. It goes when
// nobody has read for 8 days; a new one delivers what was not received.
func (p Pool) TrainerConsumer(job, reader string) jetstream.ConsumerConfig {
	return jetstream.ConsumerConfig{
		Durable: ConsumerTrainer(job, reader), FilterSubject: p.ResultFilter(job, reader),
		DeliverPolicy: jetstream.DeliverAllPolicy, AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: time.Minute, MaxDeliver: -1, MaxAckPending: 10_000,
		InactiveThreshold: 8 * 24 * time.Hour,
	}
}

// AgentConsumer is the one consumer an agent may have: its own keys, the last
// of each, then every change. Made anew at each start.
func (p Pool) AgentConsumer(engine string) jetstream.ConsumerConfig {
	return FollowerConsumer(ConsumerAgent(engine), p.EngineGuard(engine), false)
}

// FollowerConsumer follows a bucket or RESULTS from the last message of each
// subject on; headersOnly leaves the bodies behind. It lives in memory on one
// server and goes 5 minutes after its follower.
func FollowerConsumer(name, filter string, headersOnly bool) jetstream.ConsumerConfig {
	return jetstream.ConsumerConfig{
		Name: name, FilterSubject: filter, HeadersOnly: headersOnly,
		DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy, AckPolicy: jetstream.AckNonePolicy,
		MemoryStorage: true, Replicas: 1, InactiveThreshold: 5 * time.Minute,
	}
}
