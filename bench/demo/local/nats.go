package local

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/subjects"
)

// NATSConfig is how the embedded server runs.
type NATSConfig struct {
	Dir string // where it keeps its streams; required
	// Listen is host:port; port 0 is a free one. Empty = no socket: only this
	// process reaches it.
	Listen string
	// Sync makes every write reach the disk before it is acknowledged.
	Sync bool
	// Budget is what its streams may reserve in bytes; 0 = 64 GiB on file,
	// which reserves nothing on the disk itself.
	Budget int64
}

// startWait is how long the server may take to be ready.
const startWait = 20 * time.Second

// NATS is an embedded server.
type NATS struct {
	srv *server.Server
	url string
}

// StartNATS starts a server with JetStream.
func StartNATS(ctx context.Context, cfg NATSConfig, log *slog.Logger) (*NATS, error) {
	if cfg.Budget == 0 {
		cfg.Budget = 64 << 30
	}
	o := &server.Options{
		ServerName: "rollbus", JetStream: true, StoreDir: cfg.Dir, NoSigs: true, DisableShortFirstPing: true,
		MaxPayload: subjects.MaxPayload, MaxPending: 64 << 20, SyncAlways: cfg.Sync,
		JetStreamMaxStore: cfg.Budget, JetStreamMaxMemory: 4 << 30,
		DontListen: cfg.Listen == "",
	}
	if cfg.Listen != "" {
		host, port, err := net.SplitHostPort(cfg.Listen)
		if err != nil {
			return nil, fmt.Errorf("NATS address %q: %w: give host:port, port 0 for a free one", cfg.Listen, err)
		}
		o.Host = host
		if o.Port, err = strconv.Atoi(port); err != nil || o.Port < 0 || o.Port > 65535 {
			return nil, fmt.Errorf("NATS address %q: port must be 0 to 65535", cfg.Listen)
		}
		if o.Port == 0 {
			o.Port = server.RANDOM_PORT
		}
	}
	srv, err := server.NewServer(o)
	if err != nil {
		return nil, fmt.Errorf("start NATS: %w", err)
	}
	fatal := make(chan string, 1)
	srv.SetLoggerV2(serverLog{log, fatal}, false, false, false)
	srv.Start() // returns when everything listens, or cannot
	where := fmt.Sprintf("start NATS on %s with its streams in %s", cmp.Or(cfg.Listen, "no socket"), cfg.Dir)
	select {
	case why := <-fatal:
		srv.Shutdown()
		srv.WaitForShutdown()
		return nil, fmt.Errorf("%s: %s", where, why)
	default:
	}
	wait := startWait
	if t, ok := ctx.Deadline(); ok {
		wait = min(wait, time.Until(t))
	}
	if !srv.Running() || !srv.ReadyForConnections(wait) || !srv.JetStreamEnabled() {
		srv.Shutdown()
		srv.WaitForShutdown()
		return nil, fmt.Errorf("%s: not ready after %v: is the folder writable?", where, wait)
	}
	n := &NATS{srv: srv}
	if cfg.Listen != "" {
		n.url = srv.ClientURL()
	}
	return n, nil
}

// URL is where clients connect; empty without a socket.
func (n *NATS) URL() string { return n.url }

// Conn connects within the process. It reconnects for ever.
func (n *NATS) Conn(name string) (*nats.Conn, error) {
	nc, err := nats.Connect("", nats.InProcessServer(n.srv), nats.Name(name), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond), nats.ReconnectBufSize(-1))
	if err != nil {
		return nil, fmt.Errorf("connect %s to the embedded NATS: %w", name, err)
	}
	return nc, nil
}

// Stop ends the server. Its streams stay where they are.
func (n *NATS) Stop() {
	n.srv.Shutdown()
	n.srv.WaitForShutdown()
}

// serverLog passes the server's warnings and errors on, nothing else. What is
// fatal to a process of its own is told here instead of ending this one.
type serverLog struct {
	log   *slog.Logger
	fatal chan string
}

func (serverLog) Noticef(string, ...any) {}
func (serverLog) Debugf(string, ...any)  {}
func (serverLog) Tracef(string, ...any)  {}

func (l serverLog) Warnf(format string, v ...any)  { l.log.Warn("nats: " + fmt.Sprintf(format, v...)) }
func (l serverLog) Errorf(format string, v ...any) { l.log.Error("nats: " + fmt.Sprintf(format, v...)) }

func (l serverLog) Fatalf(format string, v ...any) {
	select {
	case l.fatal <- fmt.Sprintf(format, v...):
	default: // the first one says why
	}
}

var errStopped = errors.New("stopped")
