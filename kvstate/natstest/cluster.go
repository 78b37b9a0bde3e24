package natstest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// Nodes are the servers of one cluster.
type Nodes struct {
	tb    testing.TB
	List  []*Node
	lines map[pair]*Line // with Splittable: from which node to which
}

type pair struct{ from, to int }

// Cluster starts a cluster of that many servers (3, as a rule) and waits until
// its JetStream has a leader and every server is current.
func Cluster(tb testing.TB, size int, options ...Option) *Nodes {
	tb.Helper()
	c := configured(options)
	if c.inProcess {
		tb.Fatal("natstest: a cluster needs sockets: leave InProcess out")
	}
	dir := c.storeDir(tb)
	cluster := unique("natstest") // never two clusters that take each other for their own
	ports := freePorts(tb, size)
	routes := make([]string, size)
	for i, p := range ports {
		routes[i] = fmt.Sprintf("nats-route://127.0.0.1:%d", p)
	}
	all := &Nodes{tb: tb, lines: map[pair]*Line{}}
	for i, p := range ports {
		name := fmt.Sprintf("n%d", i+1)
		n := newNode(tb, c, name, filepath.Join(dir, name))
		n.opts.Cluster = server.ClusterOpts{Name: cluster, Host: "127.0.0.1", Port: p}
		mine := routes
		if c.split {
			// Servers tell each other where a new one listens. Say what leads
			// nowhere: nobody may find a way around a line.
			n.opts.Cluster.Advertise = "127.0.0.1:1"
			mine = nil
			for j := range ports {
				if j != i {
					x := newLine(tb, fmt.Sprintf("n%d", j+1), func() string { return fmt.Sprintf("127.0.0.1:%d", ports[j]) })
					all.lines[pair{i, j}] = x
					mine = append(mine, "nats-route://"+x.l.Addr().String())
				}
			}
		}
		n.opts.Routes = server.RoutesFromStr(strings.Join(mine, ","))
		all.List = append(all.List, n)
	}
	tb.Cleanup(all.StopAll)
	all.StartAll()
	return all
}

// StartAll starts whatever is stopped and waits as Cluster does.
func (c *Nodes) StartAll() {
	c.tb.Helper()
	var wg sync.WaitGroup
	for _, n := range c.List {
		wg.Go(n.Start)
	}
	wg.Wait()
	c.WaitReady()
}

// StopAll stops every server, all at once.
func (c *Nodes) StopAll() {
	var wg sync.WaitGroup
	for _, n := range c.List {
		wg.Go(n.Stop)
	}
	wg.Wait()
}

// WaitReady waits until the running servers have a JetStream leader, know each
// other and are current.
func (c *Nodes) WaitReady() {
	c.tb.Helper()
	Eventually(c.tb, startTimeout, "a cluster with a JetStream leader and current servers", func() bool {
		running, leader := 0, 0
		for _, n := range c.List {
			s := n.Running()
			if s == nil {
				continue
			}
			running++
			if s.JetStreamIsLeader() {
				leader++
				if len(s.JetStreamClusterPeers()) < len(c.List) {
					return false
				}
			} else if !s.JetStreamIsCurrent() {
				return false
			}
		}
		return leader == 1 && running*2 > len(c.List)
	})
	for _, n := range c.List {
		if n.Running() != nil {
			c.waitAPI(n)
		}
	}
}

// waitAPI waits until a client of that server gets answers from the JetStream
// API: a request sent before the leader's interest has reached a server's routes
// is lost without a word.
func (c *Nodes) waitAPI(n *Node) {
	c.tb.Helper()
	nc, err := nats.Connect(n.URL(), nats.Timeout(startTimeout))
	if err != nil {
		c.tb.Fatalf("natstest: connect to %s: %v", n.Name(), err)
	}
	defer nc.Close()
	Eventually(c.tb, startTimeout, "an answer of the JetStream API through "+n.Name(), func() bool {
		msg, err := nc.Request("$JS.API.INFO", nil, 250*time.Millisecond)
		return err == nil && !bytes.Contains(msg.Data, []byte(`"error"`))
	})
}

// WaitStream waits until every running server holds the stream and is current with it.
func (c *Nodes) WaitStream(stream string) {
	c.tb.Helper()
	Eventually(c.tb, startTimeout, "stream "+stream+" led and current everywhere", func() bool {
		if c.Leader(stream) == nil {
			return false
		}
		for _, n := range c.List {
			if s := n.Running(); s != nil && !s.JetStreamIsStreamLeader(server.DEFAULT_GLOBAL_ACCOUNT, stream) &&
				!s.JetStreamIsStreamCurrent(server.DEFAULT_GLOBAL_ACCOUNT, stream) {
				return false
			}
		}
		return true
	})
}

// URL lists every server.
func (c *Nodes) URL() string { return joinURLs(c.List) }

// Conn connects a client that knows every server; see Node.Conn.
func (c *Nodes) Conn(tb testing.TB, options ...nats.Option) *nats.Conn {
	tb.Helper()
	return connect(tb, c.URL(), options)
}

// Leader is the server that leads the stream (of the default account), nil while none does.
func (c *Nodes) Leader(stream string) *Node {
	for _, n := range c.List {
		if s := n.Running(); s != nil && s.JetStreamIsStreamLeader(server.DEFAULT_GLOBAL_ACCOUNT, stream) {
			return n
		}
	}
	return nil
}

// MetaLeader is the server that leads JetStream itself, nil while none does.
func (c *Nodes) MetaLeader() *Node {
	for _, n := range c.List {
		if s := n.Running(); s != nil && s.JetStreamIsLeader() {
			return n
		}
	}
	return nil
}

// StepDown makes the stream's leader give up its lead and waits for another one.
func (c *Nodes) StepDown(stream string) {
	c.tb.Helper()
	var old *Node
	Eventually(c.tb, startTimeout, "a leader of "+stream, func() bool { old = c.Leader(stream); return old != nil })
	nc, err := nats.Connect(old.URL())
	if err != nil {
		c.tb.Fatalf("natstest: connect to step down %s: %v", stream, err)
	}
	defer nc.Close()
	msg, err := nc.Request("$JS.API.STREAM.LEADER.STEPDOWN."+stream, nil, 5*time.Second)
	if err != nil {
		c.tb.Fatalf("natstest: step down %s: %v", stream, err)
	}
	var answer struct {
		Error *struct {
			Description string `json:"description"`
		} `json:"error"`
	}
	if err := json.Unmarshal(msg.Data, &answer); err != nil || answer.Error != nil {
		c.tb.Fatalf("natstest: step down %s: %s", stream, msg.Data)
	}
	Eventually(c.tb, startTimeout, "another leader of "+stream, func() bool {
		l := c.Leader(stream)
		return l != nil && l != old
	})
}

// Split cuts one server off from all others of a Splittable cluster; its clients
// stay. Join ends it.
func (c *Nodes) Split(n *Node) { c.lead(n, (*Line).Cut) }

// Join ends a Split. It does not wait: see WaitReady.
func (c *Nodes) Join(n *Node) { c.lead(n, (*Line).Heal) }

func (c *Nodes) lead(n *Node, do func(*Line)) {
	c.tb.Helper()
	if len(c.lines) == 0 {
		c.tb.Fatal("natstest: make the cluster Splittable to split it")
	}
	for p, x := range c.lines {
		if c.List[p.from] == n || c.List[p.to] == n {
			do(x)
		}
	}
}
