package workeragent

import (
	"errors"
	"net"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// line is a connection to NATS that a test can cut at a chosen message: what
// trips it is not sent, or is sent and never answered.
type line struct {
	mu      sync.Mutex
	trip    func(b []byte) bool
	after   bool // cut after the message was sent
	cut     bool // no connection until mended
	conns   []net.Conn
	tripped chan struct{}
}

// conn is a connection over the line.
func (l *line) conn(r *rig) *nats.Conn {
	r.t.Helper()
	return r.node.Conn(r.t, nats.ReconnectBufSize(-1), nats.SetCustomDialer(l))
}

func (l *line) Dial(network, address string) (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		return nil, errors.New("the line is cut")
	}
	c, err := net.DialTimeout(network, address, time.Second)
	if err != nil {
		return nil, err
	}
	l.conns = append(l.conns, c)
	return &wire{Conn: c, l: l}, nil
}

// cutAt cuts the line at the first write that trip knows.
func (l *line) cutAt(after bool, trip func([]byte) bool) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.trip, l.after, l.tripped = trip, after, make(chan struct{})
	return l.tripped
}

func (l *line) mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = false
}

func (l *line) sever() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.severLocked()
}

func (l *line) severLocked() {
	l.cut = true
	for _, c := range l.conns {
		c.Close()
	}
	l.conns = nil
}

type wire struct {
	net.Conn
	l *line
}

func (w *wire) Write(b []byte) (int, error) {
	w.l.mu.Lock()
	defer w.l.mu.Unlock()
	if w.l.cut {
		return 0, net.ErrClosed
	}
	if w.l.trip == nil || !w.l.trip(b) {
		return w.Conn.Write(b)
	}
	w.l.trip = nil
	close(w.l.tripped)
	if w.l.after {
		// What is written arrives; what is answered is not read any more.
		w.l.cut = true
		return w.Conn.Write(b)
	}
	w.l.severLocked()
	return 0, net.ErrClosed
}

func (w *wire) Read(b []byte) (int, error) {
	n, err := w.Conn.Read(b)
	w.l.mu.Lock()
	defer w.l.mu.Unlock()
	if w.l.cut {
		return 0, net.ErrClosed
	}
	return n, err
}
