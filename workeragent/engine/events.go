package engine

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/rollbus/rollbus/workeragent/kvevents"
	"github.com/rollbus/rollbus/workeragent/kvevents/zmq"
)

// EventsConfig is where an engine publishes its cache events, for servers that
// do not tell, and what no server tells (SGLang's replay endpoint).
type EventsConfig struct {
	// Endpoint of rank 0, tcp://host:port; rank r is at port + r. A wildcard
	// host is the engine's own. Empty = only what the server tells.
	Endpoint string
	// Replay endpoint of rank 0, likewise. Empty = none but what is told.
	Replay string
	// Topic prefix. Empty = everything.
	Topic string
	// Bind: the publishers dial; wait for them at Endpoint.
	Bind bool
}

// withEvents makes the adapter that those of servers with cache events build on.
func withEvents(cfg OpenAIConfig, events EventsConfig) (*OpenAI, error) {
	if err := events.Validate(); err != nil {
		return nil, err
	}
	return NewOpenAI(cfg)
}

// Validate checks the endpoints.
func (c EventsConfig) Validate() error {
	for _, e := range [...]string{c.Endpoint, c.Replay} {
		if e == "" {
			continue
		}
		if _, err := shift(e, 0); err != nil {
			return err
		}
	}
	return nil
}

// EventSourcer is what adapters of servers with cache events implement too.
type EventSourcer interface {
	// EventSources asks where each rank publishes; none = no events.
	EventSources(ctx context.Context) ([]kvevents.Source, error)
	// Identity tells one process of the engine from the next, "" = it cannot.
	Identity(ctx context.Context) (string, error)
}

// sources spells the configured endpoints out for every rank.
func (c EventsConfig) sources(base string, ranks int) ([]kvevents.Source, error) {
	if c.Endpoint == "" {
		return nil, nil
	}
	u, err := url.Parse(base)
	if err != nil {
		return nil, err
	}
	out := make([]kvevents.Source, ranks)
	for r := range out {
		s := kvevents.Source{Rank: r, Topic: c.Topic, Bind: c.Bind}
		if s.Endpoint, err = shift(c.Endpoint, r); err != nil {
			return nil, err
		}
		if !c.Bind {
			s.Endpoint = zmq.Resolve(s.Endpoint, u)
		}
		if s.Replay, err = c.replay(u, r); err != nil {
			return nil, err
		}
		out[r] = s
	}
	return out, nil
}

func (c EventsConfig) replay(u *url.URL, rank int) (string, error) {
	if c.Replay == "" {
		return "", nil
	}
	e, err := shift(c.Replay, rank)
	return zmq.Resolve(e, u), err
}

// shift adds n to an endpoint's port.
func shift(endpoint string, n int) (string, error) {
	addr, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		if strings.HasPrefix(endpoint, "ipc://") && n == 0 {
			return endpoint, nil
		}
		return "", fmt.Errorf("events endpoint %q: give tcp://host:port", endpoint)
	}
	host, port, err := net.SplitHostPort(addr)
	p, perr := strconv.Atoi(port)
	if err != nil || perr != nil || p < 1 || p+n > 65535 {
		return "", fmt.Errorf("events endpoint %q: give tcp://host:port with a port of 1 to 65535", endpoint)
	}
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(p+n)), nil
}

// Identity is the process start of the exposition.
func (a *OpenAI) Identity(ctx context.Context) (string, error) {
	b, ok := a.optional(ctx, "/metrics")
	if !ok {
		return "", nil
	}
	var c Capabilities
	fromMetrics(b, &c)
	if c.StartedAt == nil {
		return "", nil
	}
	return strconv.FormatFloat(*c.StartedAt, 'f', -1, 64), nil
}
