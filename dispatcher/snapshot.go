package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/workeragent/kvevents"
)

// maxSnapshotParts bounds one snapshot: 512 KiB each.
const maxSnapshotParts = 4096

var (
	errSnapshotIdle  = errors.New("no part came in time")
	errSnapshotParts = errors.New("a part is missing or out of order")
	errSnapshotOther = errors.New("the parts belong to different snapshots")
	errSnapshotAgain = errors.New("asked for again")
)

// snapshots are those under way, one an engine: asking again ends the older.
type snapshots struct {
	mu  sync.Mutex
	end map[string]context.CancelCauseFunc
	n   map[string]uint64
}

func newSnapshots() *snapshots {
	return &snapshots{end: map[string]context.CancelCauseFunc{}, n: map[string]uint64{}}
}

func (s *snapshots) begin(ctx context.Context, engine string) (context.Context, func()) {
	ctx, end := context.WithCancelCause(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.end[engine]; old != nil {
		old(errSnapshotAgain)
	}
	s.n[engine]++
	mine := s.n[engine]
	s.end[engine] = end
	return ctx, func() {
		end(nil)
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.n[engine] == mine {
			delete(s.end, engine)
			delete(s.n, engine)
		}
	}
}

// snapshot asks an engine's agent for its whole block set. The core gets begin,
// parts and end, or failed at any point; only a snapshot that ended counts.
func (d *Dispatcher) snapshot(ctx context.Context, e core.AskSnapshot) {
	ctx, over := d.snapshots.begin(ctx, e.Engine)
	defer over()
	err := d.receiveSnapshot(ctx, e)
	if err == nil {
		d.metrics.snapshots.WithLabelValues("complete").Inc()
		return
	}
	d.metrics.snapshots.WithLabelValues("failed").Inc()
	d.log.Debug("snapshot failed", "engine", e.Engine, "err", err)
	if !errors.Is(err, errSnapshotAgain) {
		d.send(d.workCtx, core.Snapshot{Engine: e.Engine, Epoch: e.Epoch, Phase: "failed"})
	}
}

func (d *Dispatcher) receiveSnapshot(ctx context.Context, e core.AskSnapshot) error {
	inbox := d.nc.NewInbox()
	sub, err := d.nc.SubscribeSync(inbox)
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := sub.SetPendingLimits(-1, maxBurstBytes); err != nil {
		return err
	}
	if err := d.nc.PublishRequest(d.pool.Snapshot(e.Engine), inbox, nil); err != nil {
		return err
	}
	var first kvevents.Part
	for n := range maxSnapshotParts {
		wait, cancel := context.WithTimeoutCause(ctx, d.cfg.Timings.SnapshotIdle, errSnapshotIdle)
		m, err := sub.NextMsgWithContext(wait)
		idle := errors.Is(context.Cause(wait), errSnapshotIdle)
		cancel()
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case idle:
			return errSnapshotIdle
		case err != nil:
			return err // no responders, or more than is buffered
		}
		p, err := kvevents.DecodePart(m.Data, nil)
		switch {
		case err != nil:
			d.metrics.malformed.WithLabelValues("snapshot").Inc()
			return err
		case n == 0:
			first = p
		case p.AsOf != first.AsOf || p.Epoch != first.Epoch:
			return errSnapshotOther
		}
		if int(p.Number) != n {
			return errSnapshotParts
		}
		if p.Epoch != e.Epoch {
			return fmt.Errorf("%w: epoch %.64q, asked for %.64q", errSnapshotOther, p.Epoch, e.Epoch)
		}
		say := func(phase, tier string, blocks []uint64) bool {
			return d.send(ctx, core.Snapshot{
				Engine: e.Engine, Epoch: p.Epoch, AsOf: p.AsOf, Phase: phase, Tier: tier, Blocks: blocks,
			})
		}
		ok := n > 0 || say("begin", "", nil)
		if len(p.Blocks) > 0 {
			ok = ok && say("part", p.Tier.String(), p.Blocks)
		}
		if p.Last {
			ok = ok && say("end", "", nil)
		}
		switch {
		case !ok:
			return context.Cause(ctx)
		case p.Last:
			return nil
		}
	}
	return fmt.Errorf("%w: more than %d", errSnapshotParts, maxSnapshotParts)
}
