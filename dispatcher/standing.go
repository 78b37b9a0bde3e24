package dispatcher

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate"
)

// standingWait bounds how long a page waits for the owner of the core.
const standingWait = time.Second

// whyNotCounted says what a state of an engine means for placement.
var whyNotCounted = map[string]string{
	"suspect":  "its registration was not renewed for a while: nothing new is bound to it",
	"paused":   "its agent says that it is paused",
	"draining": "its agent is stopping and takes nothing new",
	"stale":    "its weights are not accepted yet",
	"down":     "its agent says that it does not answer, or its registration has run out",
}

// NotCounted names the engines that are registered, or were until lately, and
// are no candidates of any decision, with the reason. They do not keep the
// dispatcher from serving.
func (d *Dispatcher) NotCounted(ctx context.Context) []Missing {
	ctx, cancel := context.WithTimeout(ctx, standingWait)
	defer cancel()
	seen := make(chan []Missing, 1)
	err := d.Inspect(ctx, func(c *core.Core) {
		var out []Missing
		for e := range c.Engines() {
			if why, ok := whyNotCounted[e.State]; ok && !e.External {
				out = append(out, Missing{"engine " + e.Name, e.State + ": " + why})
			}
		}
		seen <- out
	})
	var out []Missing
	if err == nil { // without an answer in time nothing is said: readiness tells why
		out = <-seen
	}
	return append(out, d.unread.list()...)
}

// unread are registrations that nobody can read, by key: they expire as
// registrations do.
type unread struct {
	keep time.Duration

	mu  sync.Mutex
	by  map[string]error
	old map[string]time.Time
}

// maxUnread bounds what is remembered.
const maxUnread = 64

func newUnread(keep time.Duration) *unread {
	return &unread{keep: keep, by: map[string]error{}, old: map[string]time.Time{}}
}

func (u *unread) put(key string, x kvstate.Undecodable) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if _, known := u.by[key]; !known && len(u.by) >= maxUnread {
		return
	}
	u.by[key], u.old[key] = x.Err, time.Now()
}

func (u *unread) gone(key string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.by, key)
	delete(u.old, key)
}

func (u *unread) list() []Missing {
	u.mu.Lock()
	defer u.mu.Unlock()
	var out []Missing
	for key, err := range u.by {
		if time.Since(u.old[key]) > u.keep {
			delete(u.by, key)
			delete(u.old, key)
			continue
		}
		out = append(out, Missing{"engine " + key, "its registration cannot be read: " + err.Error()})
	}
	slices.SortFunc(out, func(a, b Missing) int {
		if a.What < b.What {
			return -1
		}
		return 1
	})
	return out
}
