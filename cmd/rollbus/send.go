package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/subjects"
)

// sender submits requests of any job, one client a job and reader. It keeps no
// ledger: the command ends before the answers come.
type sender struct {
	ctx      context.Context
	nc       *nats.Conn
	pool     string
	settings subjects.Settings
	wait     time.Duration

	mu      sync.Mutex
	clients map[[2]string]*client.Client
}

func newSender(ctx context.Context, nc *nats.Conn, pool string, s subjects.Settings, wait time.Duration) *sender {
	return &sender{ctx: ctx, nc: nc, pool: pool, settings: s, wait: wait, clients: map[[2]string]*client.Client{}}
}

func (s *sender) client(job, reader string) (*client.Client, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := [2]string{job, reader}
	if c := s.clients[key]; c != nil {
		return c, nil
	}
	c, err := client.Open(s.ctx, s.nc, s.pool, job, client.Reader(reader), client.WithoutLedger(), client.Settings(s.settings), client.RetryFor(s.wait))
	if err != nil {
		return nil, fmt.Errorf("job %s: %w", job, err)
	}
	s.clients[key] = c
	return c, nil
}

// send stores one request and returns when NATS has it.
func (s *sender) send(ctx context.Context, r *subjects.Request) (client.Handle, error) {
	c, err := s.client(r.Job, r.ReaderOrDefault())
	if err != nil {
		return client.Handle{}, err
	}
	h, err := c.Submit(ctx, r)
	if full, ok := errors.AsType[*client.BackpressureError](err); ok {
		return h, coded(exitUnavailable, "%w (`rollbus get jobs` shows what waits)", full)
	}
	return h, err
}

func (s *sender) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.clients {
		c.Close()
	}
}
