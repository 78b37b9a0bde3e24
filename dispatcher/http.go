package dispatcher

import (
	"encoding/json"
	"net/http"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// handler answers GET /metrics, /healthz (200 while the process answers and has
// not stopped), /readyz (200, or 503 with what is missing; in both cases with the
// engines that are registered and not counted) and the balancer
// interface (balancer.go).
func (d *Dispatcher) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(d.metrics.registry, promhttp.HandlerOpts{Registry: d.metrics.registry}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		select {
		case <-d.done:
			reply(w, http.StatusServiceUnavailable, map[string]any{"status": "stopped"})
		default:
			reply(w, http.StatusOK, map[string]any{"status": "ok", "dispatcher": d.cfg.Name, "pool": d.cfg.Pool})
		}
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, q *http.Request) {
		code, page := http.StatusOK, map[string]any{"status": "ready", "dispatcher": d.cfg.Name, "pool": d.cfg.Pool}
		if missing := d.Ready(); len(missing) > 0 {
			code, page = http.StatusServiceUnavailable, map[string]any{"status": "not ready", "missing": missing}
		}
		if out := d.NotCounted(q.Context()); len(out) > 0 {
			page["not_counted"] = out
		}
		reply(w, code, page)
	})
	d.balancer(mux)
	return mux
}

func reply(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(v) // whoever asked is gone
}
