package bus

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/subjects"
)

// startWait is how long servers may take to be ready.
const startWait = 20 * time.Second

// servers are the NATS servers that both sides share.
type servers struct{ list []*server.Server }

func startServers(ctx context.Context, dir string, n int) (_ *servers, err error) {
	s := &servers{}
	defer func() {
		if err != nil {
			s.stop()
		}
	}()
	ports, err := freePorts(n)
	if err != nil {
		return nil, err
	}
	var routes string
	for _, p := range ports {
		routes += fmt.Sprintf(",nats-route://127.0.0.1:%d", p)
	}
	for i := range n {
		o := &server.Options{
			ServerName: fmt.Sprintf("bench%d", i+1), JetStream: true, StoreDir: filepath.Join(dir, strconv.Itoa(i)), NoSigs: true, NoLog: true,
			Host: "127.0.0.1", Port: server.RANDOM_PORT, MaxPayload: subjects.MaxPayload, MaxPending: 64 << 20,
			JetStreamMaxStore: 64 << 30, JetStreamMaxMemory: 4 << 30,
		}
		if n > 1 {
			o.Cluster = server.ClusterOpts{Name: "bench", Host: "127.0.0.1", Port: ports[i]}
			o.Routes = server.RoutesFromStr(routes[1:])
		}
		srv, err := server.NewServer(o)
		if err != nil {
			return nil, fmt.Errorf("start NATS: %w", err)
		}
		srv.Start()
		s.list = append(s.list, srv)
	}
	for _, srv := range s.list {
		if !srv.ReadyForConnections(startWait) || !srv.JetStreamEnabled() {
			return nil, fmt.Errorf("start NATS in %s: not ready after %v: is the folder writable?", dir, startWait)
		}
	}
	return s, s.awaitLeader(ctx)
}

// awaitLeader waits until the JetStream API of a cluster answers.
func (s *servers) awaitLeader(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, startWait, fmt.Errorf("JetStream has no leader after %v", startWait))
	defer cancel()
	nc, err := s.connect("bench", 0)
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	every := time.NewTicker(50 * time.Millisecond)
	defer every.Stop()
	for {
		try, end := context.WithTimeout(ctx, time.Second)
		_, err := js.AccountInfo(try)
		end()
		if err == nil && s.whole() {
			return nil
		}
		select {
		case <-every.C:
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		}
	}
}

// whole tells whether the cluster's leader counts every server.
func (s *servers) whole() bool {
	if len(s.list) == 1 {
		return true
	}
	for _, srv := range s.list {
		if srv.JetStreamIsLeader() {
			return len(srv.JetStreamClusterPeers()) == len(s.list)
		}
	}
	return false
}

// connect opens a connection over TCP, the i-th to the i-th server, in turn.
func (s *servers) connect(name string, i int) (*nats.Conn, error) {
	nc, err := nats.Connect(s.list[i%len(s.list)].ClientURL(), nats.Name("rollbus "+name), nats.MaxReconnects(-1), nats.ReconnectBufSize(-1))
	if err != nil {
		return nil, fmt.Errorf("connect %s: %w", name, err)
	}
	return nc, nil
}

func (s *servers) stop() {
	for _, srv := range s.list {
		srv.Shutdown()
	}
	for _, srv := range s.list {
		srv.WaitForShutdown()
	}
}

func freePorts(n int) ([]int, error) {
	var out []int
	for range n {
		l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close()
		out = append(out, l.Addr().(*net.TCPAddr).Port)
	}
	return out, nil
}
