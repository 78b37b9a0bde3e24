package kvstate

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/subjects"
)

// Bounds of what is asked for at once, and so of what waits in this process.
const (
	pullHeaders = 1024 // messages without bodies
	pullBodies  = 64   // messages with bodies, and at most pullBytes
	pullBytes   = 2 * subjects.MaxPayload
	pullSpare   = 2 * expires // room for heartbeats that arrive while a handler runs
)

// puller fetches from one consumer, one request at a time.
type puller struct {
	s       *Store
	subject string
	inbox   string
	sub     *nats.Subscription
	ch      chan *nats.Msg
	batch   int
	bytes   int // 0 = no limit

	n    int // the request that is out
	got  int // its messages
	done func()
}

func newPuller(s *Store, stream, name string, headersOnly bool) (*puller, error) {
	p := &puller{
		s: s, subject: "$JS.API.CONSUMER.MSG.NEXT." + stream + "." + name, inbox: s.nc.NewInbox(),
		batch: pullHeaders, done: func() {},
	}
	if !headersOnly {
		p.batch, p.bytes = pullBodies, pullBytes
	}
	p.ch = make(chan *nats.Msg, p.batch+pullSpare)
	sub, err := s.nc.ChanSubscribe(p.inbox+".*", p.ch)
	if err != nil {
		return nil, fmt.Errorf("subscribe to an inbox: %w", err)
	}
	p.sub = sub
	return p, nil
}

func (p *puller) close() {
	_ = p.sub.Unsubscribe() // of a connection that is closed: nothing to do
	p.done()
}

// next asks for more. The first request hurries the heartbeat that says that
// there is nothing (more) to deliver.
func (p *puller) next() error {
	p.n, p.got = p.n+1, 0
	hb := p.s.opt.heartbeat
	if p.n == 1 {
		hb /= 10
	}
	req := struct {
		Batch     int           `json:"batch"`
		MaxBytes  int           `json:"max_bytes,omitempty"`
		Expires   time.Duration `json:"expires"`
		Heartbeat time.Duration `json:"idle_heartbeat"`
	}{p.batch, p.bytes, expires * hb, hb}
	body, err := json.Marshal(req)
	if err != nil {
		return err
	}
	if err := p.s.nc.PublishRequest(p.subject, p.inbox+"."+strconv.Itoa(p.n), body); err != nil {
		return fmt.Errorf("ask the consumer for messages: %w", err)
	}
	return nil
}

// count counts a message of the request that is out.
func (p *puller) count() error {
	if p.got++; p.got >= p.batch {
		return p.next()
	}
	return nil
}

// ended handles the end of a request. That of an earlier one says nothing.
func (p *puller) ended(m *nats.Msg) error {
	text := m.Header.Get("Description")
	for _, over := range [...]string{"Consumer Deleted", "Leadership Change", "Server Shutdown", "Consumer is push based"} {
		if strings.EqualFold(text, over) {
			return fmt.Errorf("its consumer answers %q", text)
		}
	}
	if m.Subject != p.inbox+"."+strconv.Itoa(p.n) {
		return nil
	}
	return p.next()
}

func headerNumber(m *nats.Msg, name string) (uint64, bool) {
	n, err := strconv.ParseUint(m.Header.Get(name), 10, 64)
	return n, err == nil
}
