package dispatcher

import (
	"context"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// held is a fetched message: the core has its handle, the shell its body.
type held struct {
	handle core.Handle
	msg    *nats.Msg
	queue  core.Queue
	stored int64 // server time, unix ns
}

func (h *held) size() int64 { return int64(h.msg.Size()) }

// hand keeps what was fetched until it is acked or given back. A message leaves
// the hand when its ack is asked for; whoever still needs its body took it before.
type hand struct {
	nc      *nats.Conn
	metrics *metrics
	most    int64 // bytes, of what is held and what is asked for

	mu    sync.Mutex
	held  map[core.Handle]*held
	last  core.Handle
	bytes int64 // of what is held
	asked int64 // reserved by pulls that are out

	out *mailbox[ack] // at most one a message that was in hand
}

// ack is one answer to a consumer, or a wish to know when those before it are out.
type ack struct {
	reply string
	body  []byte
	kind  string
	after chan<- struct{}
}

var ackOK = []byte("+ACK")

// nakBody asks for the message again after delay (0 = at once).
func nakBody(delay time.Duration) []byte {
	if delay <= 0 {
		return []byte("-NAK")
	}
	return append(strconv.AppendInt([]byte(`-NAK {"delay": `), delay.Nanoseconds(), 10), '}')
}

func newHand(nc *nats.Conn, most int64, m *metrics) *hand {
	return &hand{nc: nc, metrics: m, most: most, held: map[core.Handle]*held{}, out: newMailbox[ack]()}
}

// put takes a message and names it. Handles are never reused.
func (h *hand) put(msg *nats.Msg, q core.Queue, stored int64) *held {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last++
	m := &held{handle: h.last, msg: msg, queue: q, stored: stored}
	h.held[m.handle] = m
	h.bytes += m.size()
	h.metrics.inHand.Set(float64(len(h.held)))
	h.metrics.inHandBytes.Set(float64(h.bytes))
	return m
}

// name draws a handle for what is no message.
func (h *hand) name() core.Handle {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last++
	return h.last
}

// get is nil when the message is not in hand any more.
func (h *hand) get(handle core.Handle) *held {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.held[handle]
}

// reserve sets bytes aside for a pull: as many as wanted, or what is left; 0
// when nothing is. An empty hand has room for the largest message whatever its
// bound, so that every message gets through, if need be alone.
func (h *hand) reserve(want, largest int64) int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	room := h.most - h.bytes - h.asked
	if h.bytes+h.asked == 0 {
		room = max(room, largest)
	}
	want = min(want, room)
	if want <= 0 {
		return 0
	}
	h.asked += want
	return want
}

func (h *hand) unreserve(n int64) {
	h.mu.Lock()
	h.asked -= n
	h.mu.Unlock()
}

func (h *hand) leave(handle core.Handle) *held {
	h.mu.Lock()
	defer h.mu.Unlock()
	m := h.held[handle]
	if m != nil {
		delete(h.held, handle)
		h.bytes -= m.size()
		h.metrics.inHand.Set(float64(len(h.held)))
		h.metrics.inHandBytes.Set(float64(h.bytes))
	}
	return m
}

// ack gives up a message whose next place is written.
func (h *hand) ack(handle core.Handle) {
	if m := h.leave(handle); m != nil {
		h.out.put(ack{reply: m.msg.Reply, body: ackOK, kind: "ack"})
	}
}

// giveBack returns a message to its queue. Scenario B3: never without a delay
// of its own choosing by the core; at once only when this dispatcher stops.
func (h *hand) giveBack(handle core.Handle, delay time.Duration) {
	if m := h.leave(handle); m != nil {
		h.refuse(m.msg, delay)
	}
}

// refuse returns a message that was never in hand.
func (h *hand) refuse(msg *nats.Msg, delay time.Duration) {
	h.out.put(ack{reply: msg.Reply, body: nakBody(delay), kind: "nak"})
}

// run sends acks and naks in the order they were asked for. A publish may wait
// for the socket, which the core's owner must not.
func (h *hand) run(ctx context.Context) error {
	for {
		a, ok := h.out.take(ctx)
		if !ok {
			return nil
		}
		if a.after != nil {
			close(a.after)
			continue
		}
		if err := h.nc.Publish(a.reply, a.body); err != nil {
			a.kind += "_error" // it comes back after AckWait
		}
		h.metrics.acks.WithLabelValues(a.kind).Inc()
	}
}

// drain waits until every ack asked for so far has reached the server.
func (h *hand) drain(ctx context.Context) bool {
	after := make(chan struct{})
	h.out.put(ack{after: after})
	select {
	case <-after:
		return h.nc.FlushWithContext(ctx) == nil
	case <-ctx.Done():
		return false
	}
}
