package faults

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"syscall"

	"github.com/nats-io/nats-server/v2/server"
)

// reexecEnv tells a program started anew that it is a NATS server, and which.
const reexecEnv = "ROLLBUS_FAULTS_NATSD"

// natsConfig is one server of the cluster.
type natsConfig struct {
	Name    string   `json:"name"`
	Port    int      `json:"port"`
	Cluster int      `json:"cluster"` // port of the routes
	Monitor int      `json:"monitor"` // port of /healthz
	Routes  []string `json:"routes"`
	Dir     string   `json:"dir"`
	Sync    bool     `json:"sync"` // every write reaches the disk before it is acknowledged
}

// Reexec does not return in a process that was started as a NATS server.
func Reexec() {
	text := os.Getenv(reexecEnv)
	if text == "" {
		return
	}
	if err := serveNATS(text); err != nil {
		fmt.Fprintln(os.Stderr, "nats server:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func serveNATS(text string) error {
	var c natsConfig
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return fmt.Errorf("read %s: %w", reexecEnv, err)
	}
	o := &server.Options{
		ServerName: c.Name, Host: "127.0.0.1", Port: c.Port, HTTPHost: "127.0.0.1", HTTPPort: c.Monitor,
		NoSigs: true, MaxPayload: 8 << 20, JetStream: true, StoreDir: c.Dir, SyncAlways: c.Sync,
		JetStreamMaxMemory: 512 << 20, JetStreamMaxStore: 8 << 30,
		Cluster: server.ClusterOpts{Name: "faults", Host: "127.0.0.1", Port: c.Cluster, PoolSize: -1},
	}
	for _, r := range c.Routes {
		u, err := url.Parse(r)
		if err != nil {
			return err
		}
		o.Routes = append(o.Routes, u)
	}
	s, err := server.NewServer(o)
	if err != nil {
		return err
	}
	s.ConfigureLogger()
	s.Start()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	<-ctx.Done()
	s.Shutdown()
	s.WaitForShutdown()
	return nil
}

// healthy asks a server whether it and its JetStream have caught up.
func (c natsConfig) healthy(ctx context.Context, web *http.Client) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/healthz", c.Monitor), nil)
	if err != nil {
		return false
	}
	resp, err := web.Do(req)
	if err != nil {
		return false
	}
	defer func() { _ = resp.Body.Close() }() // only its status is read
	return resp.StatusCode == http.StatusOK
}

func (c natsConfig) url() string { return fmt.Sprintf("nats://127.0.0.1:%d", c.Port) }
