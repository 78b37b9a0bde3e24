package dispatcher

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// inbox is where a queue's consumer delivers: one subscription for all pulls of
// the queue. A message carries the subject it was submitted on, so that only the
// subscription tells whose it is; what arrives when no pull wants it (the pull
// has ended, or was cut short) goes back at once instead of after AckWait.
type inbox struct {
	hand    *hand
	subject string
	sub     *nats.Subscription

	mu    sync.Mutex
	pulls []*puller
	last  uint64
}

// puller is one pull that is out. Statuses are addressed to it by its name.
type puller struct {
	name string
	in   chan *nats.Msg
}

func openInbox(nc *nats.Conn, h *hand) (*inbox, error) {
	x := &inbox{hand: h, subject: nc.NewInbox()}
	sub, err := nc.Subscribe(x.subject+".*", x.route)
	if err != nil {
		return nil, fmt.Errorf("open an inbox: %w", err)
	}
	x.sub = sub
	// Pulls ask for no more than the hand has room for; the subscription itself
	// must not be what drops messages.
	return x, sub.SetPendingLimits(-1, -1)
}

func (x *inbox) shut() { _ = x.sub.Unsubscribe() }

// drain ends the subscription; what came before the server heard of it is routed
// still. The channel is closed when that is done.
func (x *inbox) drain() <-chan struct{} {
	done := make(chan struct{})
	x.sub.SetClosedHandler(func(string) { close(done) })
	if x.sub.Drain() != nil {
		return nil // the connection is closed, or the subscription was
	}
	return done
}

// begin registers a pull for at most n messages.
func (x *inbox) begin(n int) *puller {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.last++
	p := &puller{
		name: x.subject + "." + strconv.FormatUint(x.last, 10),
		in:   make(chan *nats.Msg, n+16), // and some statuses
	}
	x.pulls = append(x.pulls, p)
	return p
}

// end takes the pull away. What it was given and nobody read goes back.
func (x *inbox) end(p *puller) {
	x.mu.Lock()
	x.pulls = slices.DeleteFunc(x.pulls, func(o *puller) bool { return o == p })
	x.mu.Unlock()
	for {
		select {
		case m := <-p.in:
			if m.Reply != "" {
				x.hand.refuse(m, 0)
			}
		default:
			return
		}
	}
}

// route never waits. Only a status comes without a reply subject: a submit that
// carries a Status header of its own is a message.
func (x *inbox) route(m *nats.Msg) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, p := range x.pulls {
		if m.Reply == "" && m.Subject != p.name {
			continue
		}
		select {
		case p.in <- m:
			return
		default: // more than was asked for
		}
	}
	if m.Reply != "" {
		x.hand.refuse(m, 0)
	}
}

// pullRequest is the body of CONSUMER.MSG.NEXT. With both no_wait and expires
// the server waits for the first message and then sends only what is there.
type pullRequest struct {
	Batch    int           `json:"batch"`
	MaxBytes int64         `json:"max_bytes,omitempty"`
	NoWait   bool          `json:"no_wait"`
	Expires  time.Duration `json:"expires,omitempty"`
	Beat     time.Duration `json:"idle_heartbeat,omitempty"`
}

var (
	errSilent  = errors.New("the consumer does not answer")
	errHand    = errors.New("the hand is full")
	errNoPulls = errors.New("too many pulls at once")
)

// statusError is an answer of a consumer that is not a message.
type statusError struct {
	code, text string
	unsent     int // of the messages asked for; -1 = not said
}

func (e *statusError) Error() string { return "consumer: " + e.code + " " + e.text }

// lost tells whether the consumer may not be there any more.
func (e *statusError) lost() bool {
	return e.code == "503" || e.code == "409" && (strings.Contains(e.text, "Deleted") ||
		strings.Contains(e.text, "Leadership") || strings.Contains(e.text, "Shutdown"))
}

// tooLarge: the next message does not fit the bytes asked for.
func (e *statusError) tooLarge() bool {
	return e.code == "409" && strings.Contains(e.text, "MaxBytes")
}

// largest is the size of the largest message that the server can deliver.
func (d *Dispatcher) largest() int64 { return d.nc.MaxPayload() + 128<<10 }

// fetch carries out one Fetch. FetchDone always comes, and after every Fetched
// of it.
func (d *Dispatcher) fetch(ctx context.Context, f core.Fetch) {
	done := core.FetchDone{Queue: f.Queue, Asked: f.N}
	err := d.pull(ctx, f, func(m *nats.Msg) {
		done.Delivered++
		d.fetched(m, f.Queue)
	})
	if err != nil && ctx.Err() == nil {
		done.Err = err.Error()
		d.metrics.pullErrors.WithLabelValues(pullErrorKind(err)).Inc()
		d.log.Debug("pull failed", "job", f.Queue.Job, "lane", f.Queue.Lane, "retry", f.Queue.Retry, "err", err)
	}
	d.send(d.workCtx, done)
}

func pullErrorKind(err error) string {
	switch {
	case errors.Is(err, errSilent):
		return "silent"
	case errors.Is(err, errHand):
		return "hand_full"
	case errors.Is(err, errNoPulls):
		return "too_many"
	}
	if s, ok := errors.AsType[*statusError](err); ok {
		return "status_" + s.code
	}
	return "ensure"
}

// pull asks until messages came, Wait is over, or an error says why not.
func (d *Dispatcher) pull(ctx context.Context, f core.Fetch, got func(*nats.Msg)) error {
	if n := d.queues.pulling.Add(1); n > int64(d.cfg.Limits.Pulls) {
		d.queues.pulling.Add(-1)
		return errNoPulls
	}
	defer d.queues.pulling.Add(-1)
	q := d.queues.get(f.Queue)
	end := time.Now().Add(f.Wait)
	again := newPause(d.cfg.Timings.RepeatMin, d.cfg.Timings.RepeatMax)
	for came := 0; came < max(1, f.N); {
		if err := q.ensure(ctx); err != nil {
			return err
		}
		wait := time.Until(end)
		if came > 0 {
			wait = 0
		}
		n, err := d.pullOnce(ctx, q, max(1, f.N)-came, wait, got)
		came += n
		if n > 0 {
			q.answered()
		}
		status, isStatus := errors.AsType[*statusError](err)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case isStatus && status.tooLarge():
			// The next message needs more room than was reserved for it.
			if n == 0 && q.size.Swap(d.largest()) >= d.largest() {
				return whenNone(came, errHand)
			}
			continue
		case errors.Is(err, errSilent) && came == 0:
			q.fellSilent(ctx)
			return err
		case came > 0:
			return nil
		case isStatus && status.lost():
			q.forget() // look whether it is there before the next pull
			if time.Until(end) <= 0 {
				return err
			}
		case err != nil:
			return err
		default:
			q.answered()
			if time.Until(end) <= d.cfg.Timings.RepeatMin {
				return nil
			}
		}
		// Others' pulls took what there was, or the consumer moved: not in a spin.
		if !again.wait(ctx) {
			return context.Cause(ctx)
		}
	}
	return nil
}

// whenNone is the error of a pull that brought nothing; one that did has none.
func whenNone(came int, err error) error {
	if came > 0 {
		return nil
	}
	return err
}

// pullOnce sends one request and passes on what it brings.
func (d *Dispatcher) pullOnce(ctx context.Context, q *queue, batch int, wait time.Duration, got func(*nats.Msg)) (n int, err error) {
	req := pullRequest{Batch: batch, NoWait: true}
	if req.MaxBytes = d.hand.reserve(int64(req.Batch)*q.size.Load(), d.largest()); req.MaxBytes == 0 {
		return 0, errHand
	}
	defer d.hand.unreserve(req.MaxBytes)
	silence := d.cfg.Timings.PullGrace
	if wait > 0 {
		req.Expires = wait
		if req.Beat = d.cfg.Timings.PullBeat; 2*req.Beat > wait {
			req.Beat = 0
			silence += wait
		} else {
			silence = 2*req.Beat + d.cfg.Timings.PullGrace/2
		}
	}
	body, err := json.Marshal(req)
	if err != nil {
		return 0, err
	}
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	box, err := q.open()
	if err != nil {
		return 0, err
	}
	p := box.begin(req.Batch)
	defer box.end(p)
	stream, durable := d.names(q.q)
	if err := d.nc.PublishRequest(d.api.subject("CONSUMER.MSG.NEXT", stream, durable), p.name, body); err != nil {
		return 0, fmt.Errorf("ask consumer %s: %w", durable, err)
	}
	watchdog := time.NewTimer(silence)
	defer watchdog.Stop()
	var over *statusError // the pull has ended, and want messages of it are on their way
	want := batch
	for n < want {
		select {
		case <-ctx.Done():
			return n, context.Cause(ctx)
		case <-watchdog.C:
			if over != nil {
				return n, over.failure()
			}
			return n, fmt.Errorf("%w: nothing from %s for %v", errSilent, durable, silence)
		case m := <-p.in:
			watchdog.Reset(silence)
			if m.Reply != "" {
				q.sized(int64(m.Size()))
				got(m)
				n++
				continue
			}
			if s := statusOf(m); s.code != "100" { // a heartbeat
				// A replicated consumer delivers when its quorum has it noted; a
				// status may overtake the messages before it, and says how many
				// of those asked for it did not send.
				over, want = s, s.sent(batch, n)
			}
		}
	}
	if over != nil {
		return n, over.failure()
	}
	return n, nil
}

func statusOf(m *nats.Msg) *statusError {
	s := &statusError{code: m.Header.Get("Status"), text: m.Header.Get("Description"), unsent: -1}
	if k, err := strconv.Atoi(m.Header.Get("Nats-Pending-Messages")); err == nil {
		s.unsent = k
	}
	return s
}

// sent is how many messages the pull brings in all; n have come.
func (e *statusError) sent(batch, n int) int {
	if e.unsent < 0 || e.unsent > batch {
		return n
	}
	return max(n, batch-e.unsent)
}

// failure is nil for an end in order: nothing there, or all that was asked for.
func (e *statusError) failure() error {
	if e.code == "404" || e.code == "408" || e.code == "409" && strings.Contains(e.text, "Batch Completed") {
		return nil
	}
	return e
}

// fetched takes a message in hand and shows the core what it says.
func (d *Dispatcher) fetched(m *nats.Msg, q core.Queue) {
	meta, err := m.Metadata()
	if err != nil {
		d.metrics.malformed.WithLabelValues("delivery").Inc()
		d.hand.refuse(m, d.cfg.Timings.Core.NakMax)
		return
	}
	facts, bad := d.decode(m.Header, m.Data, q)
	h := d.hand.put(m, q, meta.Timestamp.UnixNano())
	ev := core.Fetched{
		Handle: h.handle, Queue: q, Facts: facts, Seq: meta.Sequence.Stream,
		Stored: h.stored, Pending: meta.NumPending, Bytes: len(m.Data), Bad: bad,
	}
	if bad != nil {
		d.metrics.malformed.WithLabelValues("submit").Inc()
	}
	if !d.send(d.workCtx, ev) {
		d.hand.giveBack(h.handle, 0)
	}
}
