package workeragent

import (
	"context"
	"strconv"
	"sync"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// cancels is the view of what is to be given up.
type cancels struct {
	mu       sync.Mutex
	byKey    map[string]kvstate.Value[subjects.Cancel]
	versions int // how many of them are by weight version
}

func (c *cancels) swap(all []kvstate.Value[subjects.Cancel]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.byKey, c.versions = make(map[string]kvstate.Value[subjects.Cancel], len(all)), 0
	for _, v := range all {
		c.putLocked(v)
	}
}

func (c *cancels) put(v kvstate.Value[subjects.Cancel]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.putLocked(v)
}

func (c *cancels) putLocked(v kvstate.Value[subjects.Cancel]) {
	if c.byKey == nil {
		c.byKey = map[string]kvstate.Value[subjects.Cancel]{}
	}
	if _, there := c.byKey[v.Key]; !there && v.V.Kind == subjects.CancelVersion {
		c.versions++
	}
	c.byKey[v.Key] = v
}

func (c *cancels) gone(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if v, there := c.byKey[key]; there && v.V.Kind == subjects.CancelVersion {
		c.versions--
	}
	delete(c.byKey, key)
}

// hit tells whether a reservation is given up, and why. A cancel counts for what
// was accepted before it; both times are the NATS server's.
func (c *cancels) hit(res *kvstate.Reservation, weight *int64) (reason string, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.byKey) == 0 {
		return "", false
	}
	accepted := res.Accepted
	if accepted == 0 {
		accepted = res.Stored.UnixNano()
	}
	for _, x := range [...]subjects.Cancel{
		{Kind: subjects.CancelID, Job: res.Job, Value: res.ID},
		{Kind: subjects.CancelGroup, Job: res.Job, Value: res.Group},
		{Kind: subjects.CancelTrajectory, Job: res.Job, Value: res.Trajectory},
		{Kind: subjects.CancelJob, Job: res.Job},
	} {
		if x.Value == "" && x.Kind != subjects.CancelJob {
			continue
		}
		if v, there := c.byKey[x.Key()]; there && accepted <= v.Stored.UnixNano() {
			return v.V.Reason, true
		}
	}
	if c.versions == 0 || weight == nil {
		return "", false
	}
	for _, v := range c.byKey {
		if v.V.Kind != subjects.CancelVersion || v.V.Job != res.Job || accepted > v.Stored.UnixNano() {
			continue
		}
		if below, err := strconv.ParseInt(v.V.Value, 10, 64); err == nil && *weight < below {
			return or(v.V.Reason, "its weight version is below "+v.V.Value), true
		}
	}
	return "", false
}

// followCancels ends what is given up, at the engine that runs it (scenario R4).
func (a *Agent) followCancels(ctx context.Context) {
	a.followShared(ctx, "cancels", func(ctx context.Context, engine string) error {
		return a.store.FollowCancels(ctx, kvstate.FollowConfig{Name: engine, Agent: true},
			kvstate.Handler[kvstate.Value[subjects.Cancel], kvstate.Value[struct{}]]{
				Swap: func(all []kvstate.Value[subjects.Cancel], _ []kvstate.Value[struct{}]) {
					a.cancels.swap(all)
					a.applyCancels()
				},
				Put: func(v kvstate.Value[subjects.Cancel]) {
					a.cancels.put(v)
					a.applyCancels()
				},
				Gone:  func(v kvstate.Value[struct{}]) { a.cancels.gone(v.Key) },
				Alive: a.alive,
			})
	})
}

func (a *Agent) applyCancels() {
	for _, u := range a.units {
		u.mu.Lock()
		for _, r := range u.runs {
			if reason, ok := a.cancels.hit(&r.res, r.weight); ok && r.phase != settling {
				r.cancel(&cancelledError{reason})
			}
		}
		u.mu.Unlock()
	}
}
