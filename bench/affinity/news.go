package affinity

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/subjects"
)

// news is what the pool publishes while the run goes on: decisions of its
// rollouts, and which engines have told that they are idle.
type news struct {
	subs []*nats.Subscription

	mu   sync.Mutex
	seen map[string][]*Decision
	idle map[string]bool // by their last report
}

// maxDecisions bounds those kept of one rollout.
const maxDecisions = 64

func listen(nc *nats.Conn, pool subjects.Pool, prefix string) (*news, error) {
	n := &news{seen: map[string][]*Decision{}, idle: map[string]bool{}}
	on := func(what, subject string, f func(*nats.Msg)) error {
		sub, err := nc.Subscribe(subject, f)
		if err != nil {
			return fmt.Errorf("listen to %s: %w", what, err)
		}
		n.subs = append(n.subs, sub)
		return nil
	}
	err := on("decisions", pool.Decision(), func(m *nats.Msg) {
		x, ok := readDecision(m.Data)
		if !ok || !strings.HasPrefix(x.Rollout, prefix) {
			return
		}
		n.mu.Lock()
		defer n.mu.Unlock()
		if len(n.seen[x.Rollout]) < maxDecisions {
			n.seen[x.Rollout] = append(n.seen[x.Rollout], x)
		}
	})
	if err == nil {
		at := strings.TrimSuffix(pool.Load("x"), "x")
		err = on("loads", pool.Load("*"), func(m *nats.Msg) {
			var l subjects.Load
			if json.Unmarshal(m.Data, &l) != nil {
				return
			}
			n.mu.Lock()
			defer n.mu.Unlock()
			n.idle[strings.TrimPrefix(m.Subject, at)] = !slices.ContainsFunc(l.Ranks, func(r subjects.RankLoad) bool {
				return r.Running == nil || r.Waiting == nil || *r.Running+*r.Waiting > 0
			})
		})
	}
	if err != nil {
		n.close()
		return nil, err
	}
	return n, nil
}

func (n *news) close() {
	for _, s := range n.subs {
		_ = s.Unsubscribe() // the connection is going
	}
}

const (
	decisionWithin = 5 * time.Second
	idleWithin     = 3 * time.Second
	newsEvery      = 10 * time.Millisecond
)

// decision waits for the one that placed a rollout on an engine, and forgets the
// rollout. It is published behind the core's back, so that it may come after the
// answer.
func (n *news) decision(ctx context.Context, rollout, engine string) (*Decision, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, decisionWithin, fmt.Errorf("the decision that placed %s on %s was not published within %v", rollout, engine, decisionWithin))
	defer cancel()
	for {
		if d := n.take(rollout, engine); d != nil {
			return d, nil
		}
		if err := pause(ctx, newsEvery); err != nil {
			return nil, err
		}
	}
}

func (n *news) take(rollout, engine string) *Decision {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, x := range n.seen[rollout] {
		if x.Engine == engine {
			delete(n.seen, rollout)
			return x
		}
	}
	return nil
}

// allIdle waits until every engine has told anew that it is idle: then dispatchers
// have that picture too. One that is silent or busy with something else is not
// waited for longer than idleWithin; what comes of it shows in the decisions.
func (n *news) allIdle(ctx context.Context, engines []Engine) error {
	late, cancel := context.WithTimeout(ctx, idleWithin)
	defer cancel()
	n.mu.Lock()
	clear(n.idle)
	n.mu.Unlock()
	for {
		n.mu.Lock()
		idle := !slices.ContainsFunc(engines, func(e Engine) bool { return !n.idle[e.Name] })
		n.mu.Unlock()
		if idle || pause(late, newsEvery) != nil {
			return context.Cause(ctx)
		}
	}
}
