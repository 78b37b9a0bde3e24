package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// part is a long-lived part of a daemon.
type part struct {
	name string
	// run serves until stop or kill; it returns nil after an orderly end.
	run func(ctx context.Context) error
	// stop ends it softly: what runs is finished or given back. When ctx ends
	// first it ends hard. It returns when the part has ended.
	stop func(ctx context.Context) error
}

// httpFlag is where a daemon serves /metrics, /healthz and /readyz.
type httpFlag struct {
	HTTP string `name:"http" help:"Serve /metrics, /healthz and /readyz here." placeholder:"HOST:PORT"`
}

// scaleFlag shortens every duration of a daemon together. Dispatchers of one
// pool must agree on it, so that it is for tests of whole pools.
type scaleFlag struct {
	TimingScale float64 `hidden:"" default:"1"`
}

func (f scaleFlag) check() error {
	if f.TimingScale < 0.02 || f.TimingScale > 10 {
		return coded(exitUsage, "--timing-scale is %g: give 0.02 to 10", f.TimingScale)
	}
	return nil
}

// readyFlag tells a script when a daemon is up, and where.
type readyFlag struct {
	ReadyFile string `type:"path" help:"Write the addresses here, as JSON, when everything is up." placeholder:"FILE"`
}

func (f readyFlag) ready(at any) error {
	if f.ReadyFile == "" {
		return nil
	}
	b, err := json.Marshal(at)
	if err != nil {
		return fmt.Errorf("ready file: %w", err)
	}
	// Written aside and moved: whoever waits for the file reads it whole.
	tmp := f.ReadyFile + ".new"
	if err := os.WriteFile(tmp, append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("ready file: %w", err)
	}
	if err := os.Rename(tmp, f.ReadyFile); err != nil {
		return fmt.Errorf("ready file: %w", err)
	}
	return nil
}

// stopSlack is how long a part may go on after its stop has returned.
const stopSlack = 5 * time.Second

// supervise runs parts, in order, until ctx ends, a signal comes or one of them
// ends by itself. Then it stops them in reverse order, each softly within the
// budget. A second signal makes what is left of the stop hasty: what runs is
// handed back at once. A third ends everything without a word.
func supervise(ctx context.Context, log *slog.Logger, budget time.Duration, parts ...part) error {
	signals := make(chan os.Signal, 3)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	return superviseWith(ctx, log, budget, signals, parts)
}

func superviseWith(ctx context.Context, log *slog.Logger, budget time.Duration, signals <-chan os.Signal, parts []part) error {
	hard, kill := context.WithCancelCause(context.WithoutCancel(ctx))
	defer kill(nil)
	soft, hasten := context.WithCancelCause(hard)
	defer hasten(nil)
	type ended struct {
		name string
		err  error
	}
	ends := make(chan ended, len(parts))
	for _, p := range parts {
		go func() { ends <- ended{p.name, p.run(hard)} }()
	}
	notify("READY=1")

	var failed error
	left := len(parts)
	select {
	case <-ctx.Done():
		log.Info("stopping", "why", context.Cause(ctx))
	case s := <-signals:
		log.Info("stopping; a second signal hands back at once", "signal", s)
	case e := <-ends:
		left--
		failed = fmt.Errorf("%s: %w", e.name, cmpErr(e.err, errors.New("ended by itself")))
		log.Error("stopping", "err", failed)
	}
	notify("STOPPING=1")
	go func() {
		for _, end := range []context.CancelCauseFunc{hasten, kill} {
			select {
			case s := <-signals:
				log.Warn("stopping at once", "signal", s)
				end(errInterrupted)
			case <-hard.Done():
				return
			}
		}
	}()
	for _, p := range slices.Backward(parts) {
		within, done := context.WithTimeout(soft, budget)
		if err := p.stop(within); err != nil {
			failed = errors.Join(failed, fmt.Errorf("stop %s: %w", p.name, err))
		}
		done()
	}
	patience := time.NewTimer(stopSlack)
	defer patience.Stop()
	for range left {
		select {
		case e := <-ends:
			if e.err != nil {
				failed = errors.Join(failed, fmt.Errorf("%s: %w", e.name, e.err))
			}
		case <-patience.C:
			return errors.Join(failed, errors.New("a part did not end although it was stopped"))
		}
	}
	return failed
}

func cmpErr(err, otherwise error) error {
	if err == nil {
		return otherwise
	}
	return err
}

// notify tells systemd, where it started this process (Type=notify).
func notify(state string) {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return // systemd waits in vain and says so
	}
	_, _ = conn.Write([]byte(state)) // the same
	_ = conn.Close()
}

// web serves a part's metrics beside those of the process, and its health.
func web(c prometheus.Collector, ready func() error) http.Handler {
	reg := prometheus.NewRegistry()
	reg.MustRegister(c, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		_, _ = io.WriteString(w, "ok\n")
	})
	return mux
}

// httpPart serves h on addr. It listens at once, so that a port in use is told
// before anything else starts; the address is what was really bound.
func httpPart(addr string, h http.Handler) (p part, bound string, err error) {
	var lc net.ListenConfig
	l, err := lc.Listen(context.Background(), "tcp", addr)
	if err != nil {
		return part{}, "", coded(exitUsage, "--http %s: %w", addr, err)
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 30 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10}
	return part{
		name: "http",
		run: func(context.Context) error {
			if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				return err
			}
			return nil
		},
		stop: func(ctx context.Context) error {
			if err := srv.Shutdown(ctx); err != nil {
				return srv.Close() // slow readers of metrics hold nothing up
			}
			return nil
		},
	}, l.Addr().String(), nil
}
