package sim

import (
	"slices"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// fifo is one durable consumer's part of a work queue: what was never delivered,
// in order, and what was delivered and not acked, in order of delivery.
type fifo struct {
	fresh []*message
	head  int
	out   []*message
	pulls []*pull // that wait for a message, longest first
}

// pull is a fetch that found nothing yet.
type pull struct {
	again func()
	over  bool
}

func (f *fifo) len() int { return len(f.fresh) - f.head + len(f.out) }

// take delivers up to n messages: those to be delivered again first, as a
// server does.
func (f *fifo) take(n int, ready func(*message) bool) (got []*message) {
	for i := 0; i < len(f.out) && len(got) < n; i++ {
		if ready(f.out[i]) {
			got = append(got, f.out[i])
		}
	}
	for len(got) < n && f.head < len(f.fresh) {
		m := f.fresh[f.head]
		f.fresh[f.head] = nil
		f.head++
		f.out = append(f.out, m)
		got = append(got, m)
	}
	if f.head > 1024 && 2*f.head > len(f.fresh) {
		f.fresh = append(f.fresh[:0], f.fresh[f.head:]...)
		f.head = 0
	}
	return got
}

func (f *fifo) ack(m *message) bool {
	i := slices.Index(f.out, m)
	if i < 0 {
		return false
	}
	f.out = slices.Delete(f.out, i, i+1)
	return true
}

// store puts a message at the end of its queue.
func (b *Bus) store(m *message) {
	f := b.queues[m.queue]
	if f == nil {
		f = &fifo{}
		b.queues[m.queue] = f
		b.order = append(b.order, m.queue)
	}
	f.fresh = append(f.fresh, m)
	b.queued++
	b.wakeIn(0, m.queue)
}

// park tries a fetch again when a message may be there, at the latest at until.
func (b *Bus) park(q core.Queue, until time.Duration, again func()) {
	f := b.queues[q]
	if f == nil {
		f = &fifo{}
		b.queues[q] = f
		b.order = append(b.order, q)
	}
	p := &pull{again: again}
	f.pulls = append(f.pulls, p)
	b.w.at(until, func() { b.wake(f, p) })
}

func (b *Bus) wake(f *fifo, p *pull) {
	if p.over {
		return
	}
	p.over = true
	f.pulls = slices.DeleteFunc(f.pulls, func(x *pull) bool { return x == p })
	p.again()
}

// wakeIn lets the pull that waits longest look again after d.
func (b *Bus) wakeIn(d time.Duration, q core.Queue) {
	b.w.after(d, func() {
		if f := b.queues[q]; len(f.pulls) > 0 {
			b.wake(f, f.pulls[0])
		}
	})
}

// waiting yields every message of ROLLOUTS and RETRY, queue by queue in order
// of their first message.
func (b *Bus) waiting(yield func(*message) bool) {
	for _, q := range b.order {
		f := b.queues[q]
		for _, m := range slices.Concat(f.out, f.fresh[f.head:]) {
			if !yield(m) {
				return
			}
		}
	}
}

// fetch takes up to n messages that are ready, and tells how many were never
// delivered.
func (b *Bus) fetch(q core.Queue, n int, who string) (out []*message, pending uint64) {
	f := b.queues[q]
	if f == nil {
		return nil, 0
	}
	out = f.take(n, func(m *message) bool { return m.ready <= b.w.Now && (m.holder == "" || m.until <= b.w.Now) })
	for _, m := range out {
		m.holder, m.until = who, b.w.Now+ackWait
		m.copies++
		b.wakeIn(ackWait, q)
	}
	return out, uint64(len(f.fresh) - f.head)
}

func (b *Bus) ack(m *message) {
	if m != nil && b.queues[m.queue].ack(m) {
		b.queued--
	}
}

func (b *Bus) census() core.Jobs {
	var j core.Jobs
	for _, q := range b.order {
		if n := b.queues[q].len(); n > 0 {
			j.Queues = append(j.Queues, core.QueueDepth{Queue: q, Messages: uint64(n)})
		}
	}
	return j
}
