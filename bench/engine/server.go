package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rollbus/rollbus/bench/engine/model"
)

// Server is a simulated engine. Make it with New, begin with Start.
//
//	New -> Start -> [life 1] --Die--> down --Restart--> [life 2] ... -> Close
//
// All methods are safe for concurrent use; Close may be called twice.
type Server struct {
	cfg    Config
	faults armed
	ids    atomic.Uint64
	dead   atomic.Bool // FaultDead

	mu     sync.Mutex // held over starting and ending a life
	life   *life      // nil = down
	addr   string     // of the first life, kept by later ones
	lives  int
	closed bool
	wg     sync.WaitGroup // later
}

// life is one process life: what a restart loses.
type life struct {
	s       *Server
	n       int
	started time.Time
	ctx     context.Context
	cancel  context.CancelFunc
	drv     *driver
	srv     *http.Server
	wg      sync.WaitGroup // driver and acceptor
	calls   sync.WaitGroup // handlers, added to while not ended

	mu      sync.Mutex
	ended   bool
	weights int64
	paused  bool
	asleep  int // level, 0 = awake
}

// New checks the configuration; nothing runs before Start.
func New(c Config) (*Server, error) {
	c = c.WithDefaults()
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("simulated engine: %w", err)
	}
	s := &Server{cfg: c}
	for _, f := range c.Faults {
		if err := s.faults.add(f); err != nil {
			return nil, fmt.Errorf("simulated engine: %w", err)
		}
	}
	return s, nil
}

// Config with its defaults.
func (s *Server) Config() Config { return s.cfg }

// Start opens the listener and serves until Close, Die or Restart.
func (s *Server) Start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return ErrDown
	case s.life != nil:
		return ErrRunning
	}
	return s.begin()
}

// begin a life, s.mu held.
func (s *Server) begin() error {
	listen := s.cfg.Listen
	if s.addr != "" {
		listen = s.addr
	}
	ln, err := new(net.ListenConfig).Listen(context.Background(), "tcp", listen)
	if err != nil {
		return fmt.Errorf("simulated engine %s: %w", s.cfg.Model, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	d, err := newDriver(ctx, s.cfg)
	if err != nil {
		cancel()
		_ = ln.Close()
		return err
	}
	s.addr = ln.Addr().String()
	s.lives++
	s.dead.Store(false)
	l := &life{s: s, n: s.lives, started: time.Now(), ctx: ctx, cancel: cancel, drv: d, weights: s.cfg.WeightVersion}
	l.srv = &http.Server{
		Handler:           l.handler(),
		ReadHeaderTimeout: 10 * time.Second,
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	if s.cfg.OnLife != nil {
		s.cfg.OnLife(l.n)
	}
	l.wg.Go(d.run)
	l.wg.Go(func() { _ = l.srv.Serve(ln) })
	s.life = l
	s.cfg.Logger.Info("simulated engine is up", "addr", s.addr, "model", s.cfg.Model, "life", l.n)
	return nil
}

// end the life: connections dropped, nothing answered. s.mu held.
func (s *Server) end() {
	l := s.life
	if l == nil {
		return
	}
	s.life = nil
	l.mu.Lock()
	l.ended = true
	l.mu.Unlock()
	l.cancel()
	_ = l.srv.Close()
	l.wg.Wait()
	l.calls.Wait()
	s.cfg.Logger.Info("simulated engine is down", "addr", s.addr, "life", l.n)
}

// Die ends the life as a killed process would: the listener and every
// connection are closed. Restart brings the server back.
func (s *Server) Die() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end()
}

// Restart begins a new life on the same address: cache, requests and counters
// are lost, the process start time is another.
func (s *Server) Restart() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrDown
	}
	s.end()
	return s.begin()
}

// Close ends everything and waits for it.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	s.end()
	s.mu.Unlock()
	s.wg.Wait()
	return nil
}

// later runs f outside of a handler.
func (s *Server) later(f func()) { s.wg.Go(f) }

// Addr is host:port, "" before Start.
func (s *Server) Addr() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.addr
}

// URL is the base of the API, "" before Start.
func (s *Server) URL() string {
	if a := s.Addr(); a != "" {
		return "http://" + a
	}
	return ""
}

func (s *Server) current() *life {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.life
}

// Stats of every rank, now.
func (s *Server) Stats() ([]model.Stats, error) {
	l := s.current()
	if l == nil {
		return nil, ErrDown
	}
	return l.stats()
}

func (l *life) stats() (out []model.Stats, err error) {
	err = l.drv.do(func() {
		l.drv.advance()
		for _, m := range l.drv.ranks {
			out = append(out, m.Stats())
		}
		out[0].Waiting += len(l.drv.held)
	})
	return out, err
}

// Run serves until ctx ends.
func Run(ctx context.Context, c Config) error {
	s, err := New(c)
	if err != nil {
		return err
	}
	if err := s.Start(); err != nil {
		return err
	}
	<-ctx.Done()
	return s.Close()
}

func (l *life) handler() http.Handler {
	mux := http.NewServeMux()
	handle := func(pattern string, h http.HandlerFunc) {
		for _, p := range l.s.cfg.Without {
			if strings.HasSuffix(pattern, " "+p) {
				return
			}
		}
		mux.HandleFunc(pattern, h)
	}
	handle("POST /v1/completions", l.handleCompletions)
	handle("POST /v1/chat/completions", l.handleChat)
	handle("POST /tokenize", l.handleTokenize)
	handle("GET /health", l.handleHealth)
	handle("GET /v1/models", l.handleModels)
	handle("GET /version", l.handleVersion)
	handle("GET /metrics", l.metrics().ServeHTTP)
	handle("GET /sim/fault", l.handleFault)
	handle("POST /sim/fault", l.handleFault)
	if !l.s.cfg.NoControl {
		l.control(handle)
	}
	if l.s.cfg.Routes != nil {
		l.s.cfg.Routes(l.s, mux)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !l.enter() {
			drop()
		}
		defer l.calls.Done()
		w.Header().Set("Server", "rollbus-simulated-engine")
		if _, pattern := mux.Handler(r); pattern == "" {
			writeError(w, http.StatusNotFound, "NotFoundError", "this simulated engine has no "+r.Method+" "+r.URL.Path)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

func (l *life) enter() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return false
	}
	l.calls.Add(1)
	return true
}

func isDown(err error) bool { return errors.Is(err, ErrDown) }
