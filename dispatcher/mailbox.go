package dispatcher

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"
)

// mailbox is a queue whose put never waits. Its length is bounded by whoever
// puts: see where each is made.
type mailbox[T any] struct {
	mu    sync.Mutex
	items []T
	head  int
	some  chan struct{} // has one token while the queue may not be empty
}

func newMailbox[T any]() *mailbox[T] { return &mailbox[T]{some: make(chan struct{}, 1)} }

func (m *mailbox[T]) put(v T) {
	m.mu.Lock()
	m.items = append(m.items, v)
	m.mu.Unlock()
	m.signal()
}

func (m *mailbox[T]) signal() {
	select {
	case m.some <- struct{}{}:
	default:
	}
}

// take waits for an item; false when ctx ends.
func (m *mailbox[T]) take(ctx context.Context) (v T, ok bool) {
	for {
		if v, ok = m.pop(); ok {
			return v, true
		}
		select {
		case <-m.some:
		case <-ctx.Done():
			return v, false
		}
	}
}

func (m *mailbox[T]) pop() (v T, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.head == len(m.items) {
		return v, false
	}
	var zero T
	v, m.items[m.head] = m.items[m.head], zero
	m.head++
	switch {
	case m.head == len(m.items):
		m.items, m.head = m.items[:0], 0
		if cap(m.items) > 4096 {
			m.items = nil // a flood is over: give its memory back
		}
	default:
		m.signal() // another taker may have missed its token
		if m.head > 1024 && 2*m.head > len(m.items) {
			n := copy(m.items, m.items[m.head:])
			clear(m.items[n:])
			m.items, m.head = m.items[:n], 0
		}
	}
	return v, true
}

func (m *mailbox[T]) len() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.items) - m.head
}

// inflight counts effects that are still to be answered. Only the owner of the
// core adds; an answer is sent before it is taken off.
type inflight struct {
	mu    sync.Mutex
	count int
	less  chan struct{} // closed and made anew whenever one ends
}

func (f *inflight) add() {
	f.mu.Lock()
	f.count++
	f.mu.Unlock()
}

func (f *inflight) done() {
	f.mu.Lock()
	f.count--
	if f.less != nil {
		close(f.less)
		f.less = nil
	}
	f.mu.Unlock()
}

func (f *inflight) n() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.count
}

// wait returns when one has ended, at once when none is left; false when ctx ends.
func (f *inflight) wait(ctx context.Context) bool {
	f.mu.Lock()
	if f.count == 0 {
		f.mu.Unlock()
		return ctx.Err() == nil
	}
	if f.less == nil {
		f.less = make(chan struct{})
	}
	less := f.less
	f.mu.Unlock()
	select {
	case <-less:
		return true
	case <-ctx.Done():
		return false
	}
}

// pause is a doubling, jittered wait.
type pause struct{ next, least, most time.Duration }

func newPause(least, most time.Duration) *pause { return &pause{least, least, most} }

// wait sleeps 50 to 100 % of the next length; false when ctx ends.
func (p *pause) wait(ctx context.Context) bool {
	t := time.NewTimer(p.next/2 + rand.N(p.next/2+1))
	defer t.Stop()
	p.next = min(2*p.next, p.most)
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func (p *pause) reset() { p.next = p.least }
