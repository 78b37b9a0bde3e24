package checker

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/subjects"
)

// A consumer dies with its server, and what is overwritten until the next one
// reads is in no stream any more: a key is bound and released within a second.
// Watch therefore reads the same stream at several servers at once, each from
// that server's own copy, through a connection to that server alone. What one
// misses while its server is away the others see.

// replica reads one stream from one server's copy.
type replica struct {
	stream string
	handle func(jetstream.Msg, *jetstream.MsgMetadata)
	js     jetstream.JetStream
	nc     *nats.Conn
	seen   uint64 // highest sequence handled
}

// Bounds of a replica's work.
const (
	replicaBeat  = 500 * time.Millisecond // the least that the client takes: how often an idle consumer speaks; two missed ones begin it anew
	replicaAsk   = 2 * time.Second        // for one question to JetStream
	replicaPause = 50 * time.Millisecond  // before it begins anew
	replicaTries = 64                     // consumers made until one is on the wanted server
	replicaGone  = 5 * time.Second        // an unused consumer goes by itself
)

// errElsewhere says that the server did not put a consumer where it was wanted.
var errElsewhere = errors.New("the consumer is on another server")

// Watch reads reservations and results from the copies of more servers, each
// connection being to one of them and staying with it. It returns when each
// reads; Close ends them. With one server there is nothing to gain.
func (r *Recorder) Watch(ctx context.Context, servers ...*nats.Conn) error {
	life, end := context.WithCancel(context.Background())
	r.mu.Lock()
	r.ends = append(r.ends, end)
	r.mu.Unlock()
	reads := make(chan struct{}, 2*len(servers))
	for _, nc := range servers {
		js, err := jetstream.New(nc)
		if err != nil {
			return fmt.Errorf("watch pool %s: %w", r.pool, err)
		}
		for _, x := range []*replica{
			{stream: subjects.BucketStream(r.pool.Bucket(subjects.Reservations)), handle: r.onReservation},
			{stream: r.pool.Results(), handle: r.onResult},
		} {
			x.nc, x.js = nc, js
			var once sync.Once
			r.watches.Go(func() { x.run(life, func() { once.Do(func() { reads <- struct{}{} }) }) })
		}
	}
	for range 2 * len(servers) {
		select {
		case <-reads:
		case <-ctx.Done():
			return fmt.Errorf("watch pool %s: %w", r.pool, context.Cause(ctx))
		}
	}
	return nil
}

// run reads until ctx ends, with one consumer after the other.
func (x *replica) run(ctx context.Context, reads func()) {
	for ctx.Err() == nil {
		// Whatever ended it: the server is away, or is not current yet.
		_ = x.session(ctx, reads)
		t := time.NewTimer(replicaPause + rand.N(replicaPause))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
		}
	}
}

func (x *replica) session(ctx context.Context, reads func()) error {
	if !x.nc.IsConnected() {
		return nats.ErrDisconnected
	}
	cons, err := x.place(ctx)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), replicaAsk)
		defer cancel()
		_ = x.js.DeleteConsumer(ctx, x.stream, cons.CachedInfo().Name) // it goes by itself
	}()
	msgs, err := cons.Messages(jetstream.PullMaxMessages(4096), jetstream.PullHeartbeat(replicaBeat), jetstream.WithMessagesErrOnMissingHeartbeat(true))
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, msgs.Stop)
	defer stop()
	defer msgs.Stop()
	reads()
	for n := uint64(1); ; n++ {
		m, err := msgs.Next()
		if err != nil {
			return err
		}
		meta, err := m.Metadata()
		if err != nil {
			return err
		}
		if meta.Sequence.Consumer != n {
			return fmt.Errorf("delivery %d after %d", meta.Sequence.Consumer, n-1)
		}
		x.handle(m, meta)
		x.seen = max(x.seen, meta.Sequence.Stream)
	}
}

// place makes a consumer on the server that the connection is to. A server
// chooses a place by chance among those that have a copy.
func (x *replica) place(ctx context.Context) (jetstream.Consumer, error) {
	want := x.nc.ConnectedServerName()
	for range replicaTries {
		cfg := jetstream.ConsumerConfig{
			Name: "watch-" + strconv.FormatUint(rand.Uint64(), 36), HeadersOnly: true, AckPolicy: jetstream.AckNonePolicy,
			MemoryStorage: true, Replicas: 1, InactiveThreshold: replicaGone, DeliverPolicy: jetstream.DeliverAllPolicy,
		}
		if x.seen > 0 {
			cfg.DeliverPolicy, cfg.OptStartSeq = jetstream.DeliverByStartSequencePolicy, x.seen+1
		}
		ask, cancel := context.WithTimeout(ctx, replicaAsk)
		cons, err := x.js.CreateConsumer(ask, x.stream, cfg)
		if err != nil {
			cancel()
			return nil, err
		}
		info := cons.CachedInfo()
		if info.Cluster == nil || info.Cluster.Leader == want {
			cancel()
			return cons, nil
		}
		err = x.js.DeleteConsumer(ask, x.stream, info.Name)
		cancel()
		if err != nil {
			return nil, err
		}
	}
	return nil, errElsewhere
}
