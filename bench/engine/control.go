package engine

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Version that /version reports.
const Version = "0.0.0+rollbus.simulated"

func (l *life) handleHealth(w http.ResponseWriter, _ *http.Request) {
	if l.s.dead.Load() {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	w.WriteHeader(http.StatusOK)
}

func (l *life) handleVersion(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{"version": Version, "simulated": true})
}

func (l *life) handleModels(w http.ResponseWriter, _ *http.Request) {
	type entry struct {
		ID          string  `json:"id"`
		Object      string  `json:"object"`
		Created     int64   `json:"created"`
		OwnedBy     string  `json:"owned_by"`
		Root        string  `json:"root"`
		Parent      *string `json:"parent"`
		MaxModelLen int     `json:"max_model_len"`
	}
	c := &l.s.cfg
	data := []entry{{ID: c.Model, Root: c.Model}}
	for _, name := range c.LoRAs {
		data = append(data, entry{ID: name, Root: name, Parent: &c.Model})
	}
	for i := range data {
		data[i].Object, data[i].OwnedBy = "model", "rollbus-simulated"
		data[i].Created, data[i].MaxModelLen = l.started.Unix(), c.MaxModelLen
	}
	writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": data})
}

func (l *life) handleTokenize(w http.ResponseWriter, r *http.Request) {
	var q struct {
		Prompt   json.RawMessage `json:"prompt"`
		Messages []chatMessage   `json:"messages"`
	}
	if !readJSON(w, r, &q) {
		return
	}
	tokens := []uint32{}
	if len(q.Messages) > 0 {
		tokens = chatPrompt(q.Messages)
	} else if p, err := promptTokens(q.Prompt); err != nil {
		badRequest(w, err.Error())
		return
	} else if p != nil {
		tokens = p
	}
	writeJSON(w, http.StatusOK, map[string]any{"count": len(tokens), "max_model_len": l.s.cfg.MaxModelLen, "tokens": tokens})
}

// control adds what vLLM serves in its dev mode.
func (l *life) control(handle func(string, http.HandlerFunc)) {
	handle("GET /server_info", l.handleServerInfo)
	handle("POST /abort_requests", l.handleAbort)
	handle("POST /reset_prefix_cache", l.then(func() { l.drv.flush() }))
	handle("POST /pause", l.handlePause)
	handle("POST /resume", l.handleResume)
	handle("GET /is_paused", l.show(func() any { return map[string]bool{"is_paused": l.paused} }))
	handle("POST /sleep", l.handleSleep)
	handle("POST /wake_up", l.handleWake)
	handle("GET /is_sleeping", l.show(func() any { return map[string]bool{"is_sleeping": l.asleep > 0} }))
	handle("GET /weight_info", l.show(func() any { return map[string]any{"weight_version": strconv.FormatInt(l.weights, 10)} }))
	handle("POST /update_weight_version", l.handleWeights)
}

// then runs f on the driver's goroutine and answers 200.
func (l *life) then(f func()) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if l.drv.do(f) != nil {
			drop()
		}
		w.WriteHeader(http.StatusOK)
	}
}

func (l *life) show(f func() any) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		l.mu.Lock()
		v := f()
		l.mu.Unlock()
		writeJSON(w, http.StatusOK, v)
	}
}

func (l *life) handleServerInfo(w http.ResponseWriter, r *http.Request) {
	c, e := &l.s.cfg, &l.s.cfg.Engine
	if r.URL.Query().Get("config_format") != "json" {
		writeJSON(w, http.StatusOK, map[string]any{"simulated": true, "vllm_config": fmt.Sprintf("%+v", *e)})
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{
		"simulated": true, "time_scale": c.TimeScale, "profile": e.Profile,
		"vllm_config": map[string]any{
			"model_config":     map[string]any{"model": c.Model, "max_model_len": c.MaxModelLen},
			"scheduler_config": map[string]any{"max_num_seqs": e.MaxRunning, "max_num_batched_tokens": e.StepTokens},
			"cache_config":     map[string]any{"block_size": e.BlockTokens, "num_gpu_blocks": e.KVTokens / e.BlockTokens, "enable_prefix_caching": !e.NoCache},
			"parallel_config":  map[string]any{"data_parallel_size": c.Ranks, "tensor_parallel_size": 1},
		},
	})
}

// handleAbort ends the requests named, all of them when none is named.
func (l *life) handleAbort(w http.ResponseWriter, r *http.Request) {
	var q struct {
		IDs []string `json:"request_ids"`
	}
	if r.ContentLength != 0 && !readJSON(w, r, &q) {
		return
	}
	l.then(func() {
		if len(q.IDs) == 0 {
			l.drv.abortAll(nil)
			return
		}
		l.drv.abortAll(func(j *Stream) bool { return slices.Contains(q.IDs, j.name()) })
	})(w, r)
}

// handlePause holds new requests. mode abort (the default) ends those in
// flight, wait answers when they have ended, keep freezes them.
func (l *life) handlePause(w http.ResponseWriter, r *http.Request) {
	mode := cmp.Or(r.URL.Query().Get("mode"), "abort")
	if !slices.Contains([]string{"abort", "wait", "keep"}, mode) {
		badRequest(w, fmt.Sprintf("mode %q: give abort, wait or keep", mode))
		return
	}
	l.mu.Lock()
	l.paused = true
	l.mu.Unlock()
	down := l.drv.do(func() {
		l.drv.hold(true)
		switch mode {
		case "abort":
			l.drv.abortAll(nil)
		case "keep":
			l.drv.setFrozen(frozenPause, true)
		}
	})
	if down != nil {
		drop()
	}
	if mode == "wait" && !l.untilIdle(r) {
		drop()
	}
	writeJSON(w, http.StatusOK, map[string]any{"status": "paused"})
}

// untilIdle waits until nothing is in the models.
func (l *life) untilIdle(r *http.Request) bool {
	t := time.NewTicker(5 * time.Millisecond)
	defer t.Stop()
	for {
		busy := 0
		if l.drv.do(func() { busy = len(l.drv.jobs) - len(l.drv.held) }) != nil {
			return false
		}
		if busy == 0 {
			return true
		}
		select {
		case <-t.C:
		case <-r.Context().Done():
			return false
		}
	}
}

func (l *life) handleResume(w http.ResponseWriter, r *http.Request) {
	l.mu.Lock()
	l.paused = false
	hold := l.asleep > 0
	l.mu.Unlock()
	l.then(func() {
		l.drv.setFrozen(frozenPause, false)
		l.drv.hold(hold)
	})(w, r)
}

// handleSleep ends what is in flight, drops the cache and holds new requests.
func (l *life) handleSleep(w http.ResponseWriter, r *http.Request) {
	level := 1
	if s := r.URL.Query().Get("level"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 || n > 2 {
			badRequest(w, fmt.Sprintf("level %q: give 1 or 2", s))
			return
		}
		level = n
	}
	l.mu.Lock()
	l.asleep = level
	l.mu.Unlock()
	l.then(func() {
		l.drv.hold(true)
		l.drv.abortAll(nil)
		l.drv.flush()
	})(w, r)
}

func (l *life) handleWake(w http.ResponseWriter, r *http.Request) {
	l.mu.Lock()
	l.asleep = 0
	hold := l.paused
	l.mu.Unlock()
	l.then(func() { l.drv.hold(hold) })(w, r)
}

func (l *life) handleWeights(w http.ResponseWriter, r *http.Request) {
	var q struct {
		Version json.RawMessage `json:"new_version"`
	}
	if !readJSON(w, r, &q) {
		return
	}
	n, err := strconv.ParseInt(strings.Trim(string(q.Version), `"`), 10, 64)
	if err != nil {
		badRequest(w, "new_version is no whole number")
		return
	}
	l.mu.Lock()
	l.weights = n
	l.mu.Unlock()
	writeJSON(w, http.StatusOK, map[string]any{"success": true, "weight_version": strconv.FormatInt(n, 10)})
}
