package client

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// Bounds of reading.
const (
	maxHeldBytes = 64 << 20         // bodies fetched and not handed out
	maxHanded    = 4096             // answers handed out and not received: beyond it the oldest are not offered again
	keepEvery    = 20 * time.Second // a third of the durable's AckWait
	recheckAfter = time.Second      // an answer held longer is looked up before it is handed out
)

// item is one answer on its way to user code:
//
//	fetched -> queued -> handed -> received (gone)
//
// It is the inbox's until handed out, then the user's until Done.
type item struct {
	reg  kvstate.Registered // Body is dropped when decoded
	ack  string             // reply subject of its delivery, "" when it was read from the register
	at   time.Time          // of its delivery
	lost *LostError         // instead of an answer
}

// inbox is what the reader's durable delivered. One goroutine (pump) fills it.
type inbox struct {
	c *Client

	mu      sync.Mutex
	queue   []*item          // fetched, for whoever asks next
	bytes   int              // of their bodies
	handed  map[string]*item // by id
	order   []string         // ids handed out, oldest first; some are received already
	waiters map[string][]chan *item
	wake    chan struct{} // closed and made anew when the queue grows
	room    chan struct{} // one token when the queue shrinks
	warned  bool
	reading bool // pump runs
	keeper  sync.Once
	fatal   error // why it ended; the next need starts it again
}

func newInbox(c *Client) *inbox {
	return &inbox{c: c, handed: map[string]*item{}, waiters: map[string][]chan *item{}, wake: make(chan struct{}), room: make(chan struct{}, 1)}
}

// start begins reading at the first need: a process that only submits takes
// nothing away from those that read.
func (c *Client) start() {
	b := c.inbox
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.reading || c.ctx.Err() != nil {
		return
	}
	b.reading, b.fatal = true, nil
	c.wg.Go(b.pump)
	b.keeper.Do(func() { c.wg.Go(b.keep) })
}

// noStreamTries is how often the stream may be missing before reading fails: a
// server that starts may not know it yet.
const noStreamTries = 3

// pump reads the durable until Close, or the end of the connection. A consumer that went away or fell silent
// (scenario B4) is made anew; a stream that was never there ends it.
func (b *inbox) pump() {
	c := b.c
	pause, missing, found := 50*time.Millisecond, 0, false
	for c.connected(c.ctx) == nil {
		cons, err := b.consumer()
		if err == nil {
			pause, found = 50*time.Millisecond, true
			err = b.read(cons.CachedInfo().Name)
		}
		if errors.Is(err, jetstream.ErrStreamNotFound) && !found {
			if missing++; missing >= noStreamTries {
				b.fail(fmt.Errorf("%w: %s: %w: is the name right, and was the pool made? `rollbus pool init`", ErrNoPool, c.pool, err))
				return
			}
		}
		if c.ctx.Err() != nil {
			return
		}
		c.opt.log.Debug("reading answers starts over", "job", c.job, "reader", c.opt.reader, "err", err)
		_ = c.sleep(c.ctx, jitter(pause))
		pause = min(2*pause, 5*time.Second)
	}
	if c.ctx.Err() == nil {
		b.fail(fmt.Errorf("%w: the connection was closed", ErrUnavailable))
	}
}

func (b *inbox) consumer() (jetstream.Consumer, error) {
	c := b.c
	ctx, done := c.attempt(c.ctx, publishTimeout)
	defer done()
	stream, config := c.pool.Results(), c.pool.TrainerConsumer(c.job, c.opt.reader)
	cons, err := c.js.CreateConsumer(ctx, stream, config)
	if err == nil || errors.Is(err, jetstream.ErrStreamNotFound) || ctx.Err() != nil {
		return cons, err
	}
	// One made by another version: created, never updated.
	if cons, found := c.js.Consumer(ctx, stream, config.Durable); found == nil {
		return cons, nil
	}
	return nil, err
}

// wait returns how many answers there is room for, at least one.
func (b *inbox) wait() (int, error) {
	for {
		b.mu.Lock()
		n := b.c.opt.maxHeld - len(b.queue)
		if b.bytes >= maxHeldBytes {
			n = 0
		}
		b.mu.Unlock()
		if n > 0 {
			return n, nil
		}
		select {
		case <-b.room:
		case <-b.c.ctx.Done():
			return 0, ErrClosed
		}
	}
}

// take files one delivery.
func (b *inbox) take(m *nats.Msg) {
	c := b.c
	job, reader, id, ok := c.pool.ParseResultSubject(m.Subject)
	meta, err := m.Metadata()
	if !ok || err != nil {
		c.tell(m.Reply, ackWord)
		return
	}
	a, err := subjects.AnswerFromHeader(job, reader, id, m.Header)
	if err == nil && a.Status == "" && len(m.Data) == 0 {
		// Received: by this very client, or by a process of the same name.
		b.received(id)
		c.ledger.answered(id)
		c.tell(m.Reply, ackWord)
		return
	}
	a.Job, a.Reader, a.ID = job, reader, id
	it := &item{
		reg: kvstate.Registered{Answer: a, Revision: meta.Sequence.Stream, Stored: meta.Timestamp, Body: m.Data},
		ack: m.Reply, at: time.Now(),
	}
	b.put(it)
}

// put hands an item to whoever waits for it, or queues it.
func (b *inbox) put(it *item) {
	b.mu.Lock()
	defer b.mu.Unlock()
	id := it.reg.ID
	if old := b.handed[id]; old != nil && it.lost == nil {
		// Delivered again while user code has it.
		old.ack, old.reg.Revision = it.ack, it.reg.Revision
		return
	}
	if w := b.waiters[id]; len(w) > 0 {
		b.hand(it)
		for _, ch := range w {
			same := *it
			ch <- &same // has room for one
		}
		delete(b.waiters, id)
		return
	}
	for i, q := range b.queue {
		if q.reg.ID == id {
			b.bytes += len(it.reg.Body) - len(q.reg.Body)
			b.queue[i] = it
			return
		}
	}
	b.queue = append(b.queue, it)
	b.bytes += len(it.reg.Body)
	close(b.wake)
	b.wake = make(chan struct{})
}

// hand notes that user code has an item. Under mu.
func (b *inbox) hand(it *item) {
	if it.lost != nil {
		return
	}
	kept := *it
	kept.reg.Body = nil // the user's copy has it
	b.handed[it.reg.ID] = &kept
	b.order = append(b.order, it.reg.ID)
	for len(b.handed) > maxHanded && len(b.order) > 0 {
		old := b.handed[b.order[0]]
		if old != nil {
			if !b.warned {
				b.warned = true
				b.c.opt.log.Warn("answers are handed out and not received: call Done", "job", b.c.job, "reader", b.c.opt.reader, "handed", len(b.handed))
			}
			b.c.tell(old.ack, ackWord)
			delete(b.handed, b.order[0])
		}
		b.order = b.order[1:]
	}
	if len(b.order) > 2*maxHanded {
		live := b.order[:0]
		for _, id := range b.order {
			if b.handed[id] != nil {
				live = append(live, id)
			}
		}
		b.order = live
	}
}

// next takes the oldest queued item, or says what to wait for.
func (b *inbox) next() (*item, <-chan struct{}, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.queue) == 0 {
		return nil, b.wake, b.fatal
	}
	it := b.queue[0]
	b.queue[0] = nil
	b.queue = b.queue[1:]
	b.taken(it)
	return it, nil, nil
}

func (b *inbox) taken(it *item) {
	b.bytes -= len(it.reg.Body)
	b.hand(it)
	select {
	case b.room <- struct{}{}:
	default:
	}
}

// claim takes the item of an id, or leaves a channel on which it will come.
func (b *inbox) claim(id string) (*item, chan *item) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, it := range b.queue {
		if it.reg.ID == id {
			b.queue = append(b.queue[:i], b.queue[i+1:]...)
			b.taken(it)
			return it, nil
		}
	}
	ch := make(chan *item, 1)
	b.waiters[id] = append(b.waiters[id], ch)
	return nil, ch
}

// leave takes a waiter's channel back. What came on it meanwhile is queued
// again, unless the waiter has the answer from elsewhere.
func (b *inbox) leave(id string, ch chan *item, answered bool) {
	b.mu.Lock()
	w := slices.DeleteFunc(b.waiters[id], func(other chan *item) bool { return other == ch })
	if len(w) == 0 {
		delete(b.waiters, id)
	} else {
		b.waiters[id] = w
	}
	var again *item
	select {
	case again = <-ch:
	default:
	}
	if answered || again == nil {
		b.mu.Unlock()
		return
	}
	delete(b.handed, id)
	b.mu.Unlock()
	b.put(again)
}

// received forgets an item that nobody may be handed any more.
func (b *inbox) received(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.handed, id)
	for i, it := range b.queue {
		if it.reg.ID == id && it.lost == nil {
			b.bytes -= len(it.reg.Body)
			b.queue = append(b.queue[:i], b.queue[i+1:]...)
			break
		}
	}
	for _, ch := range b.waiters[id] {
		ch <- nil // ErrReceived
	}
	delete(b.waiters, id)
}

// find is the item that user code has.
func (b *inbox) find(id string) *item {
	b.mu.Lock()
	defer b.mu.Unlock()
	if it := b.handed[id]; it != nil {
		same := *it
		return &same
	}
	return nil
}

func (b *inbox) fail(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fatal, b.reading = err, false
	close(b.wake)
	b.wake = make(chan struct{})
	for id, w := range b.waiters {
		for _, ch := range w {
			close(ch)
		}
		delete(b.waiters, id)
	}
}

func (b *inbox) ended() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.fatal
}

// Words of the acknowledgement protocol.
const (
	ackWord  = "+ACK"
	nakWord  = "-NAK"
	workWord = "+WPI"
)

// tell answers a delivery. It is not waited for: what is lost is delivered again
// and recognised.
func (c *Client) tell(reply, word string) {
	if reply != "" {
		_ = c.nc.PublishMsg(&nats.Msg{Subject: reply, Data: []byte(word)})
	}
}

// keep tells NATS that what is queued or handed out is being worked on.
func (b *inbox) keep() {
	t := time.NewTicker(keepEvery)
	defer t.Stop()
	for {
		select {
		case <-b.c.ctx.Done():
			return
		case <-t.C:
		}
		b.mu.Lock()
		acks := make([]string, 0, len(b.queue)+len(b.handed))
		for _, it := range b.queue {
			acks = append(acks, it.ack)
		}
		for _, it := range b.handed {
			acks = append(acks, it.ack)
		}
		b.mu.Unlock()
		for _, reply := range acks {
			b.c.tell(reply, workWord)
		}
	}
}

// giveBack offers what was fetched and not received to the next reader at once.
func (b *inbox) giveBack() (some bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	some = len(b.queue)+len(b.handed) > 0
	for _, it := range b.queue {
		b.c.tell(it.ack, nakWord)
	}
	for _, it := range b.handed {
		b.c.tell(it.ack, nakWord)
	}
	b.queue, b.bytes = nil, 0
	clear(b.handed)
	b.order = nil
	return some
}
