package engine

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"
)

// Fault is a misbehaviour. It strikes the next Count requests for generation,
// in order of arrival; faults armed earlier first.
type Fault struct {
	Kind FaultKind `json:"kind"`
	// Count of requests that it strikes; 0 = all until cleared.
	Count int `json:"count,omitempty"`
	// AfterTokens of output it strikes; 0 = before the first.
	AfterTokens int `json:"after_tokens,omitempty"`
	// IntervalMS between two tokens of drip; default 1,000.
	IntervalMS int `json:"interval_ms,omitempty"`
	// RetryAfterS is the Retry-After header of 429 and 503; 0 = none.
	RetryAfterS int `json:"retry_after_s,omitempty"`
}

// FaultKind is what a Fault does.
type FaultKind string

// Fault kinds. Those of the second block strike the server and not a request.
const (
	FaultHang         FaultKind = "hang"          // takes the request and never answers
	Fault500          FaultKind = "500"           // HTTP 500 at once
	Fault503          FaultKind = "503"           // HTTP 503: the queue is full
	Fault429          FaultKind = "429"           // HTTP 429: the queue is full
	FaultDrip         FaultKind = "drip"          // one token an interval
	FaultTruncate     FaultKind = "truncate"      // the stream ends cleanly, with neither finish reason nor [DONE]
	FaultErrorAfter   FaultKind = "error_after"   // an error object, then [DONE]; HTTP 500 when not streaming
	FaultAbort        FaultKind = "abort"         // finish_reason abort, HTTP 200
	FaultAbortSilent  FaultKind = "abort_silent"  // just [DONE]
	FaultDisconnectAt FaultKind = "disconnect_at" // the connection is dropped
	FaultHTML         FaultKind = "html"          // HTTP 502 with a proxy's page
	FaultKeep         FaultKind = "keep"          // goes on when the client leaves

	FaultWedge   FaultKind = "wedge"   // no step is made any more, /health stays 200; until cleared
	FaultDead    FaultKind = "dead"    // /health 503, requests 500, as after the death of the engine core; until cleared
	FaultDie     FaultKind = "die"     // listener and connections closed
	FaultRestart FaultKind = "restart" // a new life on the same address
	FaultClear   FaultKind = "clear"   // forgets all that is armed, ends a wedge
)

var requestFaults = []FaultKind{FaultHang, Fault500, Fault503, Fault429, FaultDrip, FaultTruncate, FaultErrorAfter,
	FaultAbort, FaultAbortSilent, FaultDisconnectAt, FaultHTML, FaultKeep}

var serverFaults = []FaultKind{FaultWedge, FaultDead, FaultDie, FaultRestart, FaultClear}

// Validate reports everything that is wrong at once.
func (f Fault) Validate() error {
	var errs []error
	if !slices.Contains(requestFaults, f.Kind) && !slices.Contains(serverFaults, f.Kind) {
		errs = append(errs, fmt.Errorf("fault kind %q: give one of %v or %v", f.Kind, requestFaults, serverFaults))
	}
	if f.Count < 0 || f.AfterTokens < 0 || f.IntervalMS < 0 || f.RetryAfterS < 0 {
		errs = append(errs, fmt.Errorf("fault %q: a negative number: give 0 or more", f.Kind))
	}
	return errors.Join(errs...)
}

func (f *Fault) interval() time.Duration {
	if f.IntervalMS == 0 {
		return time.Second
	}
	return time.Duration(f.IntervalMS) * time.Millisecond
}

// is tells whether a fault (nil = none) is of one of these kinds.
func (f *Fault) is(kinds ...FaultKind) bool { return f != nil && slices.Contains(kinds, f.Kind) }

// maxFaults bounds what is armed at once.
const maxFaults = 1000

type armed struct {
	mu     sync.Mutex
	faults []Fault
}

func (a *armed) add(f Fault) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.faults) >= maxFaults {
		return fmt.Errorf("%d faults are armed already: clear them first", maxFaults)
	}
	a.faults = append(a.faults, f)
	return nil
}

func (a *armed) clear() {
	a.mu.Lock()
	a.faults = nil
	a.mu.Unlock()
}

func (a *armed) list() []Fault {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.faults)
}

// take is the fault that strikes the request that comes now, nil for none.
func (a *armed) take() *Fault {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.faults) == 0 {
		return nil
	}
	f := a.faults[0]
	if f.Count == 1 {
		a.faults = slices.Delete(a.faults, 0, 1)
	} else if f.Count > 1 {
		a.faults[0].Count--
	}
	return &f
}

// Arm sets a fault, or lets it happen at once if it strikes the server.
func (s *Server) Arm(f Fault) error {
	if err := f.Validate(); err != nil {
		return err
	}
	switch f.Kind {
	case FaultDie:
		s.Die()
	case FaultRestart:
		return s.Restart()
	case FaultClear:
		s.faults.clear()
		s.dead.Store(false)
		return s.wedge(false)
	case FaultWedge:
		return s.wedge(true)
	case FaultDead:
		s.dead.Store(true)
	default:
		return s.faults.add(f)
	}
	return nil
}

// Faults that are armed, first to strike first.
func (s *Server) Faults() []Fault { return s.faults.list() }

func (s *Server) wedge(on bool) error {
	l := s.current()
	if l == nil {
		return ErrDown
	}
	return l.drv.do(func() { l.drv.setFrozen(frozenWedge, on) })
}

func (l *life) handleFault(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodGet {
		writeJSON(w, http.StatusOK, map[string]any{"armed": l.s.Faults()})
		return
	}
	var f Fault
	if !readJSON(w, r, &f) {
		return
	}
	if err := f.Validate(); err != nil {
		badRequest(w, err.Error())
		return
	}
	if f.is(FaultDie, FaultRestart) {
		w.Header().Set("Connection", "close")
		writeJSON(w, http.StatusAccepted, map[string]any{"kind": f.Kind})
		_ = http.NewResponseController(w).Flush()
		l.s.later(func() { _ = l.s.Arm(f) })
		return
	}
	if err := l.s.Arm(f); err != nil {
		writeError(w, http.StatusConflict, "ConflictError", err.Error())
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{"armed": l.s.Faults()})
}
