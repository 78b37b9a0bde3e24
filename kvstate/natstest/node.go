package natstest

import (
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// Bounds of everything that is waited for.
const (
	startTimeout = 30 * time.Second
	pollInterval = 5 * time.Millisecond
)

// MaxPayload is the servers' max_payload, as in production: 8 MiB.
const MaxPayload = 8 << 20

// Option changes the servers of a test.
type Option func(*config)

type config struct {
	dir       string
	inProcess bool
	syncAll   bool
	split     bool
	tweak     func(*server.Options)
}

// Dir keeps the data in a directory of the caller's (default: a temporary one).
// A cluster uses one subdirectory a node.
func Dir(dir string) Option { return func(c *config) { c.dir = dir } }

// InProcess opens no socket at all: Conn talks through a pipe. One server only.
func InProcess() Option { return func(c *config) { c.inProcess = true } }

// SyncAlways makes every write reach the disk before it is acknowledged.
func SyncAlways() Option { return func(c *config) { c.syncAll = true } }

// Splittable lets the servers of a cluster talk through lines, so that Split can
// cut them off from each other.
func Splittable() Option { return func(c *config) { c.split = true } }

// Tweak changes the server's options before each start, for example to add accounts.
func Tweak(f func(*server.Options)) Option { return func(c *config) { c.tweak = f } }

// Node is one server. Its methods may be called from any goroutine.
type Node struct {
	tb   testing.TB
	name string
	opts *server.Options

	mu  sync.Mutex
	srv *server.Server // nil while stopped
	url string         // "" until the first start, then fixed
}

// Server starts one server with JetStream.
func Server(tb testing.TB, options ...Option) *Node {
	tb.Helper()
	c := configured(options)
	n := newNode(tb, c, "n1", c.storeDir(tb))
	tb.Cleanup(n.Stop)
	n.Start()
	return n
}

func configured(options []Option) *config {
	c := new(config)
	for _, o := range options {
		o(c)
	}
	return c
}

func (c *config) storeDir(tb testing.TB) string {
	if c.dir != "" {
		return c.dir
	}
	return tb.TempDir()
}

func newNode(tb testing.TB, c *config, name, dir string) *Node {
	port := 0
	if !c.inProcess {
		port = freePorts(tb, 1)[0]
	}
	o := &server.Options{
		ServerName:         unique(name), // known to its peers by it
		Host:               "127.0.0.1",
		Port:               port,
		DontListen:         c.inProcess,
		NoLog:              true,
		NoSigs:             true,
		MaxPayload:         MaxPayload,
		MaxControlLine:     4096,
		JetStream:          true,
		StoreDir:           dir,
		JetStreamMaxMemory: 1 << 30,
		JetStreamMaxStore:  8 << 30,
		SyncAlways:         c.syncAll,
	}
	if c.tweak != nil {
		c.tweak(o)
	}
	return &Node{tb: tb, name: name, opts: o}
}

// Name is the server's name, n1 to n<size>.
func (n *Node) Name() string { return n.name }

// Start starts a stopped server on its old port and waits until it accepts
// clients. A node of a cluster may still be catching up: see Nodes.WaitReady.
func (n *Node) Start() {
	n.tb.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.srv != nil {
		return
	}
	// The old socket may linger for a moment; another process may even have
	// taken the port meanwhile, which is the caller's bad luck.
	deadline := time.Now().Add(startTimeout)
	for {
		err := n.start()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			n.tb.Fatalf("natstest: start %s: %v", n.name, err)
		}
		wait(pollInterval)
	}
}

func (n *Node) start() error {
	s, err := server.NewServer(n.opts.Clone())
	if err != nil {
		return err
	}
	s.Start()
	if !s.ReadyForConnections(startTimeout) {
		s.Shutdown()
		s.WaitForShutdown()
		return fmt.Errorf("not ready for connections after %s", startTimeout)
	}
	n.srv = s
	if !n.opts.DontListen {
		n.url = s.ClientURL()
	}
	return nil
}

// Stop shuts the server down and waits for it. Data stays. It may be called twice.
func (n *Node) Stop() {
	n.mu.Lock()
	s := n.srv
	n.srv = nil
	n.mu.Unlock()
	if s != nil {
		s.Shutdown()
		s.WaitForShutdown()
	}
}

// Kill is Stop under the name that fault tests look for; see the package's
// documentation for what it is not.
func (n *Node) Kill() { n.Stop() }

// Restart is Stop, then Start.
func (n *Node) Restart() {
	n.tb.Helper()
	n.Stop()
	n.Start()
}

// Running is the server, nil while it is stopped.
func (n *Node) Running() *server.Server {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.srv
}

// URL is where clients connect, the same for the node's whole life; "" with InProcess.
func (n *Node) URL() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.url
}

// InProcessConn implements nats.InProcessConnProvider over restarts.
func (n *Node) InProcessConn() (net.Conn, error) {
	s := n.Running()
	if s == nil {
		return nil, fmt.Errorf("natstest: %s is stopped", n.name)
	}
	return s.InProcessConn()
}

// Conn connects a client to this server. It reconnects for ever, quickly, and is
// closed when tb ends.
func (n *Node) Conn(tb testing.TB, options ...nats.Option) *nats.Conn {
	tb.Helper()
	if n.opts.DontListen {
		options = append([]nats.Option{nats.InProcessServer(n)}, options...)
	}
	return connect(tb, n.URL(), options)
}

func connect(tb testing.TB, urls string, options []nats.Option) *nats.Conn {
	tb.Helper()
	base := []nats.Option{
		nats.Name(tb.Name()),
		nats.MaxReconnects(-1),
		nats.ReconnectWait(20 * time.Millisecond),
		nats.ReconnectJitter(10*time.Millisecond, 10*time.Millisecond),
		nats.Timeout(startTimeout),
		nats.RetryOnFailedConnect(false),
		nats.IgnoreAuthErrorAbort(),
	}
	nc, err := nats.Connect(urls, append(base, options...)...)
	if err != nil {
		tb.Fatalf("natstest: connect to %s: %v", urls, err)
	}
	tb.Cleanup(nc.Close)
	return nc
}

// wait passes time without time.Sleep, so that tests can be searched for that.
func wait(d time.Duration) {
	t := time.NewTimer(d)
	<-t.C
}

// Eventually polls cond until it holds, or fails the test after within with what
// was awaited.
func Eventually(tb testing.TB, within time.Duration, what string, cond func() bool) {
	tb.Helper()
	EventuallyOr(tb, within, cond, func() string { return what })
}

// EventuallyOr is Eventually with a text that is made when it is needed.
func EventuallyOr(tb testing.TB, within time.Duration, cond func() bool, what func() string) {
	tb.Helper()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	deadline := time.NewTimer(within)
	defer deadline.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-deadline.C:
			if !cond() {
				tb.Fatalf("after %s still not: %s", within, what())
			}
			return
		}
	}
}

func joinURLs(nodes []*Node) string {
	urls := make([]string, len(nodes))
	for i, n := range nodes {
		urls[i] = n.URL()
	}
	return strings.Join(urls, ",")
}
