package natstest

import (
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"
)

// Line is a TCP connection to a server that a test can hold, deafen or cut. Use
// it to make outcomes unknown, partitions and stopped processes.
//
//	                 requests          replies         new connections
//	Heal             pass              pass            pass
//	Hold             wait              wait            wait
//	LoseReplies      pass              are lost        pass
//	LoseRequests     are lost          pass            pass
//	Cut              are lost          are lost        are closed at once
//
// What waited under Hold is delivered at the next Heal. What was lost leaves a
// stream of bytes with a hole in it, so that leaving LoseReplies, LoseRequests or
// Cut closes all connections, and clients connect anew.
type Line struct {
	to func() string // address
	l  net.Listener
	wg sync.WaitGroup

	mu    sync.Mutex
	cond  *sync.Cond
	mode  mode
	conns map[net.Conn]struct{}
	shut  bool
}

type mode int

const (
	pass mode = iota
	hold
	loseReplies
	loseRequests
	cut
)

// Link starts a line to a server; it follows it over restarts.
func Link(tb testing.TB, n *Node) *Line {
	tb.Helper()
	return newLine(tb, n.name, func() string { return strings.TrimPrefix(n.URL(), "nats://") })
}

func newLine(tb testing.TB, name string, to func() string) *Line {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatalf("natstest: listen for a line to %s: %v", name, err)
	}
	x := &Line{to: to, l: l, conns: map[net.Conn]struct{}{}}
	x.cond = sync.NewCond(&x.mu)
	x.wg.Go(x.accept)
	tb.Cleanup(x.close)
	return x
}

// Conn connects a client through the line, and through nothing else.
func (x *Line) Conn(tb testing.TB, options ...nats.Option) *nats.Conn {
	tb.Helper()
	return connect(tb, "nats://"+x.l.Addr().String(), append([]nats.Option{nats.IgnoreDiscoveredServers()}, options...))
}

// URL is where clients connect to the line.
func (x *Line) URL() string { return "nats://" + x.l.Addr().String() }

// Heal lets everything pass.
func (x *Line) Heal() { x.set(pass) }

// Hold stops all traffic, as if one side's process were stopped.
func (x *Line) Hold() { x.set(hold) }

// LoseReplies delivers what the client sends and loses what the server says.
func (x *Line) LoseReplies() { x.set(loseReplies) }

// LoseRequests loses what the client sends.
func (x *Line) LoseRequests() { x.set(loseRequests) }

// Cut closes all connections and every new one.
func (x *Line) Cut() { x.set(cut) }

func (x *Line) set(m mode) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.mode == loseReplies || x.mode == loseRequests || m == cut {
		x.closeAll()
	}
	x.mode = m
	x.cond.Broadcast()
}

func (x *Line) closeAll() {
	for c := range x.conns {
		c.Close()
	}
	clear(x.conns)
}

func (x *Line) close() {
	x.mu.Lock()
	x.shut = true
	x.closeAll()
	x.cond.Broadcast()
	x.mu.Unlock()
	x.l.Close()
	x.wg.Wait()
}

func (x *Line) accept() {
	for {
		c, err := x.l.Accept()
		if err != nil {
			return
		}
		x.wg.Go(func() { x.serve(c) })
	}
}

func (x *Line) serve(client net.Conn) {
	defer client.Close()
	if x.await() == cut {
		return
	}
	server, err := net.Dial("tcp", x.to())
	if err != nil {
		return
	}
	defer server.Close()
	x.mu.Lock()
	if x.shut || x.mode == cut {
		x.mu.Unlock()
		return
	}
	x.conns[client], x.conns[server] = struct{}{}, struct{}{}
	x.mu.Unlock()
	var wg sync.WaitGroup
	wg.Go(func() { x.copy(server, client, loseRequests) })
	wg.Go(func() { x.copy(client, server, loseReplies) })
	wg.Wait()
	x.mu.Lock()
	delete(x.conns, client)
	delete(x.conns, server)
	x.mu.Unlock()
}

// await waits while the line is held.
func (x *Line) await() mode {
	x.mu.Lock()
	defer x.mu.Unlock()
	for x.mode == hold && !x.shut {
		x.cond.Wait()
	}
	if x.shut {
		return cut
	}
	return x.mode
}

// copy moves bytes until either side ends; in mode lost they are dropped.
func (x *Line) copy(to, from net.Conn, lost mode) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		switch m := x.await(); m {
		case cut:
			return
		case lost:
			continue
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}
