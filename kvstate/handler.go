package kvstate

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/subjects"
)

// FollowConfig says who follows and what.
type FollowConfig struct {
	// Name of the follower, a token: a dispatcher's name. It is part of the
	// names of its consumers, f-<name>-<what>-<n>.
	Name string
	// Filter is a key filter with NATS wildcards, "" = all.
	Filter string
	// Values asks for bodies where they are left out by default.
	Values bool
	// Agent makes it a follower of the agent of the engine Name: under the only
	// consumer name that such a credential allows (subjects.AgentPermissions).
	// Two followers of one name take the consumer from each other, as those of
	// FollowOwn do.
	Agent bool
}

// Handler is told what a follower sees. Its functions are called one at a time
// from the follower's goroutine and hold it up while they run: nothing is
// fetched meanwhile, nothing is lost. Those that are nil are not called.
type Handler[P, G any] struct {
	// Swap is the complete view, in stream order, the markers that still stand
	// in it too. It replaces everything that was said before. The follower keeps
	// neither slice.
	Swap func([]P, []G)
	// Put and Gone are the changes after a Swap, in stream order.
	Put  func(P)
	Gone func(G)
	// Alive is proof of contact: up to a moment ago the view was what the
	// stream's leader has. It is called for every message and at least once a
	// heartbeat, never while the leader does not answer.
	Alive func()
	// Bad is told of an entry that does not decode, beside the Gone, Put or
	// nothing that it amounts to.
	Bad func(Undecodable)
}

// Undecodable is an entry that somebody wrote and nobody can read.
type Undecodable struct {
	Subject  string
	Revision uint64
	Stored   time.Time
	Err      error
}

// delivery is one message of a stream.
type delivery struct {
	subject string
	header  nats.Header
	data    []byte
	seq     uint64
	stored  time.Time
}

// kind is what a message amounts to in a view.
type kind int

const (
	kindNone kind = iota
	kindPut
	kindGone
)

// followSpec is what a follower follows.
type followSpec struct {
	stream    string
	config    jetstream.ConsumerConfig // the name is set for each new consumer unless fixedName
	prefix    string                   // of the consumers' names
	what      string                   // for logs
	fixedName bool                     // an agent's: its credential allows no other name
	unproved  bool                     // an agent's own keys: its credential allows no question to their leader

	headersOnly bool
}

// spec checks a FollowConfig. base is what stands before a key in a subject.
func (s *Store) spec(f FollowConfig, what, stream, base string) (followSpec, error) {
	var errs []error
	if err := subjects.CheckToken("follower", f.Name); err != nil {
		errs = append(errs, err)
	}
	filter := f.Filter
	if filter == "" {
		filter = ">"
	}
	if !validFilter(filter) {
		errs = append(errs, fmt.Errorf("filter %q is no key filter: give tokens with dots between, * for one, > at the end for the rest", f.Filter))
	}
	if err := errors.Join(errs...); err != nil {
		return followSpec{}, fmt.Errorf("%w: follow %s: %w", ErrBadOption, what, err)
	}
	name := ""
	if f.Agent {
		name = s.pool.ConsumerAgentFollower(f.Name)
	}
	return followSpec{
		stream: stream, what: what, prefix: "f-" + f.Name + "-" + what + "-",
		config: subjects.FollowerConsumer(name, base+filter, false), fixedName: f.Agent,
	}, nil
}

func validFilter(filter string) bool {
	rest := filter
	for rest != "" {
		tok, more, dot := strings.Cut(rest, ".")
		switch {
		case tok == "" || dot && more == "" || tok == ">" && dot:
			return false
		case tok != "*" && tok != ">" && strings.ContainsAny(tok, "*> \t\r\n"):
			return false
		}
		rest = more
	}
	return true
}

// consumer is the configuration of the n-th consumer of a follower.
func (sp followSpec) consumer(n string) jetstream.ConsumerConfig {
	c := sp.config
	c.HeadersOnly = sp.headersOnly
	if !sp.fixedName {
		c.Name = sp.prefix + n
	}
	return c
}

// counter makes names that no other process of the same name makes: a consumer
// that exists already delivers nothing from the start.
type counter struct {
	life string
	n    *atomic.Uint64
}

func newCounter() counter {
	return counter{life: strconv.FormatUint(rand.Uint64()>>24, 36), n: new(atomic.Uint64)}
}

func (c counter) next() string { return c.life + "-" + strconv.FormatUint(c.n.Add(1), 10) }
