package dispatcher

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/subjects/blockhash"
)

// The balancer interface (S5): frameworks that move requests themselves ask
// where to. HTTP and JSON, POST but for the two that only read; any dispatcher
// of the pool answers, and what one granted another may renew or release.
//
//	/balancer/acquire_server   request_id, prompt_ids -> server and reservation
//	/balancer/renew            the reservation, for another ttl
//	/balancer/release_server   the reservation, with what was used
//	/balancer/add_servers      servers without an agent, for every dispatcher
//	/balancer/remove_servers   take them out again
//	/balancer/get_all_servers  (GET) engines and servers
//	/balancer/get_status       (GET) what is reserved and free
const balancerPrefix = "/balancer/"

const (
	maxBalancerBody = 8 << 20
	defaultHold     = time.Minute
	maxHold         = time.Hour
	defaultJob      = "balancer"
	defaultOutput   = 512 // tokens, when a caller does not say how many it may get
)

// acquireRequest is the body of acquire_server.
type acquireRequest struct {
	RequestID string            `json:"request_id"`
	Job       string            `json:"job"` // "balancer" when empty
	PromptIDs []uint32          `json:"prompt_ids"`
	Tokens    int               `json:"prompt_tokens"` // where the ids are not at hand
	MaxTokens int               `json:"max_tokens"`    // 512 when 0
	Model     string            `json:"model"`
	LoRA      string            `json:"lora"`
	CacheSalt string            `json:"cache_salt"`
	Session   string            `json:"session_id"` // a trajectory: its turns stay together
	Group     string            `json:"group"`
	Affinity  string            `json:"affinity"`
	TTL       subjects.Duration `json:"ttl"` // "1m" when empty
}

// reservation names what a caller holds.
type reservation struct {
	Server    string            `json:"server"`
	Job       string            `json:"job"`
	RequestID string            `json:"request_id"`
	Revision  uint64            `json:"revision"`
	TTL       subjects.Duration `json:"ttl"`
}

type acquireAnswer struct {
	Server          string      `json:"server"`
	Reservation     reservation `json:"reservation"`
	Policy          string      `json:"policy"`
	Reason          string      `json:"reason"`
	PredictedCached *int        `json:"predicted_cached_tokens"`
}

type releaseRequest struct {
	Reservation      reservation `json:"reservation"`
	CompletionTokens *int        `json:"completion_tokens"`
	CachedTokens     *int        `json:"cached_tokens"`
}

type renewRequest struct {
	Reservation reservation       `json:"reservation"`
	TTL         subjects.Duration `json:"ttl"`
}

type serversRequest struct {
	Servers []subjects.Server `json:"servers"`
}

type removeRequest struct {
	Servers []string `json:"servers"`
}

// serverStatus is one engine or server as this dispatcher sees it.
type serverStatus struct {
	Server         string `json:"server"`
	External       bool   `json:"external"`
	State          string `json:"state"`
	Slots          int    `json:"slots"`
	Reserved       int    `json:"reserved"`
	ReservedTokens int64  `json:"reserved_tokens"`
}

// balancerError is an error with its HTTP status.
type balancerError struct {
	status  int
	code    string
	message string
}

func (e *balancerError) Error() string { return e.message }

func refuse(status int, code, format string, args ...any) error {
	return &balancerError{status, code, fmt.Sprintf(format, args...)}
}

func (d *Dispatcher) balancer(mux *http.ServeMux) {
	handle(mux, "acquire_server", d.acquireServer)
	handle(mux, "release_server", d.releaseServer)
	handle(mux, "renew", d.renewServer)
	handle(mux, "add_servers", func(ctx context.Context, r serversRequest) (any, error) {
		return d.changeServers(ctx, func(have []subjects.Server) []subjects.Server {
			for _, s := range r.Servers {
				have = slices.DeleteFunc(have, func(x subjects.Server) bool { return x.Name == s.Name })
			}
			return append(have, r.Servers...)
		})
	})
	handle(mux, "remove_servers", func(ctx context.Context, r removeRequest) (any, error) {
		return d.changeServers(ctx, func(have []subjects.Server) []subjects.Server {
			return slices.DeleteFunc(have, func(x subjects.Server) bool { return slices.Contains(r.Servers, x.Name) })
		})
	})
	mux.HandleFunc("GET "+balancerPrefix+"get_all_servers", func(w http.ResponseWriter, r *http.Request) {
		respond(w, func() (any, error) {
			all, err := d.servers(r.Context())
			return map[string]any{"servers": all}, err
		})
	})
	mux.HandleFunc("GET "+balancerPrefix+"get_status", func(w http.ResponseWriter, r *http.Request) {
		respond(w, func() (any, error) { return d.status(r.Context()) })
	})
}

// handle decodes a body strictly and answers with what f returns.
func handle[T any](mux *http.ServeMux, name string, f func(context.Context, T) (any, error)) {
	mux.HandleFunc("POST "+balancerPrefix+name, func(w http.ResponseWriter, r *http.Request) {
		respond(w, func() (any, error) {
			var in T
			dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBalancerBody))
			dec.DisallowUnknownFields()
			if err := dec.Decode(&in); err != nil {
				return nil, refuse(http.StatusBadRequest, "invalid_request", "%s: the body does not decode: %v", name, err)
			}
			if _, err := dec.Token(); !errors.Is(err, io.EOF) {
				return nil, refuse(http.StatusBadRequest, "invalid_request", "%s: there is more behind the body's JSON object", name)
			}
			return f(r.Context(), in)
		})
	})
}

func respond(w http.ResponseWriter, f func() (any, error)) {
	v, err := f()
	if err == nil {
		reply(w, http.StatusOK, v)
		return
	}
	status, code := http.StatusServiceUnavailable, "unavailable"
	if b, ok := errors.AsType[*balancerError](err); ok {
		status, code = b.status, b.code
	}
	if status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	reply(w, status, map[string]any{"error": map[string]any{"code": code, "message": err.Error()}})
}

func (d *Dispatcher) acquireServer(ctx context.Context, r acquireRequest) (any, error) {
	f, err := d.acquireFacts(r)
	if err != nil {
		return nil, err
	}
	hold := cmp.Or(r.TTL.D(), defaultHold)
	if hold < time.Second || hold > maxHold {
		return nil, refuse(http.StatusBadRequest, "invalid_request", "ttl is %v: give 1s to %v, and renew what takes longer", hold, maxHold)
	}
	g, err := d.Acquire(ctx, f, hold)
	if err != nil {
		if x, ok := errors.AsType[*RefusedError](err); ok {
			status := http.StatusUnprocessableEntity
			switch x.Code {
			case "unavailable":
				status = http.StatusServiceUnavailable
			case "reserved", "live", "answered", "gone":
				status = http.StatusConflict
			}
			return nil, refuse(status, x.Code, "%s", x.Message)
		}
		return nil, err
	}
	return acquireAnswer{
		Server: g.Held.Engine, Policy: g.Held.Policy, Reason: g.Held.Reason, PredictedCached: g.Held.PredictedCached,
		Reservation: reservation{Server: g.Held.Engine, Job: f.Job, RequestID: f.ID, Revision: g.Revision, TTL: subjects.Duration(hold)},
	}, nil
}

// acquireFacts is what placement knows of a request that stays with its caller.
func (d *Dispatcher) acquireFacts(r acquireRequest) (subjects.Facts, error) {
	s := d.settings.Load()
	f := subjects.Facts{
		Job: cmp.Or(r.Job, defaultJob), ID: r.RequestID, Lane: subjects.LaneNormal, Model: r.Model, LoRA: r.LoRA,
		PromptTokens: r.Tokens, MaxTokens: cmp.Or(r.MaxTokens, defaultOutput), Trajectory: r.Session, Group: r.Group, Affinity: r.Affinity,
	}
	if len(r.PromptIDs) > 0 {
		f.PromptTokens = len(r.PromptIDs)
		f.Namespace = blockhash.Namespace(cmp.Or(r.Model, s.Model), r.LoRA, r.CacheSalt)
		f.Blocks = blockhash.Chain(nil, f.Namespace, r.PromptIDs, s.BlockTokens)
		f.BlockTokens = s.BlockTokens
	}
	var errs []error
	errs = append(errs, subjects.CheckToken("request_id", f.ID), subjects.CheckToken("job", f.Job))
	if f.PromptTokens < 1 || f.PromptTokens > 1<<24 {
		errs = append(errs, fmt.Errorf("the prompt has %d tokens: give prompt_ids, or prompt_tokens of 1 to %d", f.PromptTokens, 1<<24))
	}
	if f.MaxTokens < 1 || f.MaxTokens > 1<<24 {
		errs = append(errs, fmt.Errorf("max_tokens is %d: give 1 to %d", f.MaxTokens, 1<<24))
	}
	if err := errors.Join(errs...); err != nil {
		return f, refuse(http.StatusBadRequest, "invalid_request", "%v", err)
	}
	return f, nil
}

// heldBy reads what a caller says it holds, from the leader.
func (d *Dispatcher) heldBy(ctx context.Context, r reservation) (kvstate.Reservation, error) {
	job := cmp.Or(r.Job, defaultJob)
	if err := errors.Join(subjects.CheckToken("server", r.Server), subjects.CheckToken("job", job), subjects.CheckToken("request_id", r.RequestID)); err != nil {
		return kvstate.Reservation{}, refuse(http.StatusBadRequest, "invalid_request", "%v", err)
	}
	ctx, cancel := context.WithTimeout(ctx, d.cfg.Timings.Attempt)
	defer cancel()
	k, err := d.store.Reservation(ctx, r.Server, job, r.RequestID)
	switch {
	case errors.Is(err, kvstate.ErrGone):
		return k, notHeld(r)
	case err != nil:
		return k, err
	case k.State != subjects.StateExternal || k.Revision != r.Revision:
		return k, notHeld(r)
	}
	return k, nil
}

func notHeld(r reservation) error {
	return refuse(http.StatusNotFound, "not_held", "request %s holds nothing at %s at revision %d: it was released, or its ttl is over", r.RequestID, r.Server, r.Revision)
}

func (d *Dispatcher) releaseServer(ctx context.Context, r releaseRequest) (any, error) {
	k, err := d.heldBy(ctx, r.Reservation)
	if err != nil {
		return nil, err
	}
	w := d.untilAnswered(ctx, "release_server", func(ctx context.Context) (uint64, error) {
		return d.store.Release(ctx, subjects.Released{
			Engine: k.Engine, Job: k.Job, ID: k.ID, Outcome: subjects.OutcomeAnswered, Bind: k.Bind, Epoch: k.Epoch, Tokens: k.Tokens,
			PromptTokens: k.PromptTokens, CompletionTokens: r.CompletionTokens, CachedTokens: r.CachedTokens, Group: k.Group,
		}, k.Revision)
	})
	switch w.answer {
	case core.OK:
		return map[string]any{"released": true}, nil
	case core.Gone, core.Superseded:
		return nil, notHeld(r.Reservation)
	}
	return nil, w.err
}

func (d *Dispatcher) renewServer(ctx context.Context, r renewRequest) (any, error) {
	hold := cmp.Or(r.TTL.D(), r.Reservation.TTL.D(), defaultHold)
	if hold < time.Second || hold > maxHold {
		return nil, refuse(http.StatusBadRequest, "invalid_request", "ttl is %v: give 1s to %v", hold, maxHold)
	}
	k, err := d.heldBy(ctx, r.Reservation)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, d.cfg.Timings.Attempt)
	defer cancel()
	seq, err := d.store.Renew(ctx, k.Held, k.Revision, hold)
	switch {
	case errors.Is(err, kvstate.ErrGone), errors.Is(err, kvstate.ErrSuperseded):
		return nil, notHeld(r.Reservation)
	case err != nil:
		return nil, err
	}
	out := r.Reservation
	out.Revision, out.TTL = seq, subjects.Duration(hold)
	return map[string]any{"reservation": out}, nil
}

// changeServers changes the settings' servers by compare and set; every
// dispatcher sees the change as it sees any other of the settings.
func (d *Dispatcher) changeServers(ctx context.Context, change func([]subjects.Server) []subjects.Server) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, d.cfg.Timings.Attempt)
	defer cancel()
	for {
		s, revision, err := d.store.Settings(ctx)
		if err != nil && !errors.Is(err, kvstate.ErrGone) {
			return nil, err
		}
		s.Servers = change(slices.Clone(s.Servers))
		_, err = d.store.PutSettings(ctx, s, revision)
		switch {
		case err == nil:
			return map[string]any{"servers": s.Servers}, nil
		case errors.Is(err, kvstate.ErrRefused):
			return nil, refuse(http.StatusBadRequest, "invalid_request", "%v", err)
		case !errors.Is(err, kvstate.ErrConflict) || ctx.Err() != nil:
			return nil, err
		}
	}
}

func (d *Dispatcher) servers(ctx context.Context) ([]serverStatus, error) {
	var out []serverStatus
	err := d.Inspect(ctx, func(c *core.Core) {
		for e := range c.Engines() {
			out = append(out, serverStatus{Server: e.Name, External: e.External, State: e.State, Slots: e.Slots, Reserved: e.Requests, ReservedTokens: e.Tokens})
		}
	})
	return out, err
}

func (d *Dispatcher) status(ctx context.Context) (any, error) {
	all, err := d.servers(ctx)
	if err != nil {
		return nil, err
	}
	slots, reserved := 0, 0
	for _, s := range all {
		slots += s.Slots
		reserved += s.Reserved
	}
	s := d.settings.Load()
	return map[string]any{
		"pool": d.cfg.Pool, "dispatcher": d.cfg.Name, "policy": s.Policy, "mode": s.Mode,
		"servers": len(all), "slots": slots, "reserved": reserved, "ready": len(d.Ready()) == 0,
	}, nil
}
