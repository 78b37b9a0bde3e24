package dispatcher

import (
	"context"
	"encoding/json"
	"maps"
	"slices"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// line is what is published of a decision: for consoles and RECORD.
type line struct {
	core.Decision
	Dispatcher string `json:"dispatcher"`
	AtNS       int64  `json:"at_ns,omitempty"` // server time, unix ns

	transition *core.Transition // instead of a decision
}

func (x line) encode() ([]byte, error) {
	if x.transition != nil {
		return json.Marshal(transitionLine{*x.transition, x.Dispatcher, x.AtNS})
	}
	return json.Marshal(x)
}

// maxLineBytes bounds a line; one that is longer goes without its candidates.
const maxLineBytes = 64 << 10

// lines publishes decisions behind the core's back: when it cannot follow, new
// ones are dropped and counted.
type lines struct {
	nc      *nats.Conn
	subject string
	in      chan line
	metrics *metrics
}

func newLines(nc *nats.Conn, subject string, most int, m *metrics) *lines {
	return &lines{nc: nc, subject: subject, in: make(chan line, most), metrics: m}
}

func (l *lines) put(x line) {
	select {
	case l.in <- x:
	default:
		l.metrics.dropped.WithLabelValues("decision").Inc()
	}
}

func (l *lines) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case x := <-l.in:
			if !l.nc.IsConnected() {
				l.metrics.dropped.WithLabelValues("decision").Inc()
				continue // a reconnect buffer is for writes that matter
			}
			b, err := x.encode()
			if err == nil && len(b) > maxLineBytes {
				x.Candidates = nil
				b, err = x.encode()
			}
			if err != nil || l.nc.Publish(l.subject, b) != nil {
				l.metrics.dropped.WithLabelValues("decision").Inc()
			}
		}
	}
}

// copyDecision keeps a record beyond the call that brought it.
func copyDecision(d core.Decision) core.Decision {
	d.Candidates = slices.Clone(d.Candidates)
	for i := range d.Candidates {
		d.Candidates[i].Parts = maps.Clone(d.Candidates[i].Parts)
	}
	d.Filtered = maps.Clone(d.Filtered)
	return d
}
