package affinity

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

const (
	affinityOff = "off"
	affinityOn  = "on"
)

// Config of a run.
type Config struct {
	Engines      map[string]string // addresses by name in the pool; at least two
	Policy       string            // of the arm with affinity
	Job          string
	Requests     int           // of each kind, in each arm; at least three for each engine
	PromptTokens int           // of a prompt; of a conversation's first
	Settle       time.Duration // after each answer, when the engines have told that they are idle, for news of the cache to travel
	Seed         uint64        // of the prompts: another one each run, or caches answer from the run before
	// Progress is called as requests are answered, from one goroutine.
	Progress func(arm, kind string, done, of int)
}

// Bounds of a Config.
const (
	MinPromptTokens = 256
	MaxPromptTokens = 1 << 17
	MaxRequests     = 10_000
	leastPerEngine  = 3
)

func (c Config) validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if len(c.Engines) < 2 {
		bad("%d engines: give at least two, or nothing can concentrate or scatter", len(c.Engines))
	}
	if least := leastPerEngine * len(c.Engines); c.Requests < least || c.Requests > MaxRequests {
		bad("%d requests of each kind: give %d to %d, three for each engine at least", c.Requests, least, MaxRequests)
	}
	if c.PromptTokens < MinPromptTokens || c.PromptTokens > MaxPromptTokens {
		bad("prompts of %d tokens: give %d to %d", c.PromptTokens, MinPromptTokens, MaxPromptTokens)
	}
	if _, err := policy.Resolve(subjects.Settings{Policy: c.Policy, Mode: subjects.ModeEnforce}); err != nil {
		errs = append(errs, err)
	}
	if c.Settle < 0 || c.Settle > time.Minute {
		bad("%v to settle: give 0 to 1m", c.Settle)
	}
	return errors.Join(errs...)
}

// run is a run under way.
type run struct {
	cfg    Config
	nc     *nats.Conn
	store  *kvstate.Store
	client *client.Client
	http   *http.Client
	news   *news
	report Report
	model  string
	rng    *rand.Rand
	sent   int

	before subjects.Settings // as they stood
	at     uint64            // revision that was written last; 0 = nothing was
}

const (
	outputTokens  = 16
	turnTokens    = 96              // that each turn adds to what was said
	answerWithin  = 2 * time.Minute // of one request
	startWithin   = 15 * time.Second
	switchWithin  = 15 * time.Second
	restoreWithin = 10 * time.Second
)

// Run drives the pool and returns what it saw; the report tells as much as there
// is when an error ended it. The pool's settings are put back in any case, with
// time of its own when ctx has ended.
func Run(ctx context.Context, nc *nats.Conn, pool subjects.Pool, cfg Config) (_ Report, err error) {
	v := &run{cfg: cfg, nc: nc, http: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, rng: rand.New(rand.NewPCG(cfg.Seed, 1))}
	v.report = Report{Pool: pool.String(), Job: cfg.Job, Policy: cfg.Policy, Seed: cfg.Seed, Restored: true}
	if err := cfg.validate(); err != nil {
		return v.report, err
	}
	if v.store, err = kvstate.Open(nc, pool); err != nil {
		return v.report, err
	}
	if err := v.findEngines(ctx); err != nil {
		return v.report, err
	}
	if v.news, err = listen(nc, pool, cfg.Job+"."); err != nil {
		return v.report, err
	}
	defer v.news.close()
	if v.client, err = client.Open(ctx, nc, pool.String(), cfg.Job, client.WithoutLedger()); err != nil {
		return v.report, err
	}
	defer v.client.Close()
	err = v.arms(ctx)
	if rerr := v.restore(ctx); rerr != nil {
		v.report.Restored = false
		err = errors.Join(err, rerr)
	}
	if err != nil {
		v.report.Problem = err.Error()
	}
	v.report.OK = err == nil && len(v.report.Failed()) == 0
	return v.report, err
}

// findEngines wants every engine named to be one of the pool, and ready.
func (v *run) findEngines(ctx context.Context) error {
	registered, err := v.started(ctx)
	if err != nil {
		return fmt.Errorf("read the engines of pool %s: %w", v.report.Pool, err)
	}
	var errs []error
	for name, at := range v.cfg.Engines {
		i := slices.IndexFunc(registered, func(e subjects.Engine) bool { return e.Engine == name })
		if i < 0 {
			errs = append(errs, fmt.Errorf("engine %s is not registered in pool %s: `rollbus get engines` names those that are", name, v.report.Pool))
			continue
		}
		e := registered[i]
		if e.State != subjects.EngineReady {
			errs = append(errs, fmt.Errorf("engine %s is %s: want it ready", name, e.State))
		}
		block := e.BlockTokens
		if e.EngineBlock != nil {
			block = *e.EngineBlock
		}
		v.model = cmp.Or(v.model, e.Model)
		v.report.Engines = append(v.report.Engines, Engine{Name: name, URL: at, Kind: e.Kind, Block: max(1, block)})
	}
	for _, e := range registered {
		if _, named := v.cfg.Engines[e.Engine]; !named && e.State == subjects.EngineReady {
			errs = append(errs, fmt.Errorf("engine %s takes work of pool %s too: give its address, or drain it", e.Engine, v.report.Pool))
		}
	}
	slices.SortFunc(v.report.Engines, func(a, b Engine) int { return strings.Compare(a.Name, b.Name) })
	for i := range v.report.Engines {
		errs = append(errs, v.report.Engines[i].find(ctx, v.http))
	}
	return errors.Join(errs...)
}

// started are the pool's engines, once none of those named is starting any more.
func (v *run) started(ctx context.Context) ([]subjects.Engine, error) {
	for late := time.Now().Add(startWithin); ; {
		all, err := registrations(ctx, v.store)
		starting := slices.ContainsFunc(all, func(e subjects.Engine) bool {
			_, named := v.cfg.Engines[e.Engine]
			return named && e.State == subjects.EngineStarting
		})
		if err != nil || !starting || time.Now().After(late) {
			return all, err
		}
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			return nil, err
		}
	}
}

// registrations reads the bucket of engines once.
func registrations(ctx context.Context, s *kvstate.Store) (out []subjects.Engine, err error) {
	ctx, done := context.WithTimeout(ctx, switchWithin)
	defer done()
	read := false
	err = s.FollowEngines(ctx, kvstate.FollowConfig{Name: "validate", Values: true}, kvstate.Handler[kvstate.Value[subjects.Engine], kvstate.Value[struct{}]]{
		Swap: func(all []kvstate.Value[subjects.Engine], _ []kvstate.Value[struct{}]) {
			for _, e := range all {
				out = append(out, e.V)
			}
			read = true
			done()
		},
		Put: func(kvstate.Value[subjects.Engine]) {}, Gone: func(kvstate.Value[struct{}]) {}, Alive: func() {},
	})
	if read {
		return out, nil
	}
	return nil, cmp.Or(err, context.Cause(ctx))
}

func (v *run) arms(ctx context.Context) error {
	for _, arm := range []Arm{
		{Affinity: affinityOff, Policy: subjects.BaselinePolicy, Mode: subjects.ModeOff},
		{Affinity: affinityOn, Policy: v.cfg.Policy, Mode: subjects.ModeEnforce},
	} {
		if err := v.use(ctx, &arm); err != nil {
			return fmt.Errorf("affinity %s: %w", arm.Affinity, err)
		}
		for _, kind := range []string{Repeated, MultiTurn, Distinct} {
			p, err := v.phase(ctx, &arm, kind)
			if err != nil {
				err = fmt.Errorf("affinity %s, %s: %w", arm.Affinity, kind, err)
			} else {
				p.judge(&arm, v.report.Engines)
			}
			arm.Phases = append(arm.Phases, p)
			if err != nil {
				v.report.Arms = append(v.report.Arms, arm)
				return err
			}
		}
		v.report.Arms = append(v.report.Arms, arm)
	}
	return nil
}

// use writes the arm's settings and waits until decisions are made by them.
func (v *run) use(ctx context.Context, arm *Arm) error {
	if v.at == 0 {
		s, rev, err := v.store.Settings(ctx)
		if err != nil && !errors.Is(err, kvstate.ErrGone) {
			return fmt.Errorf("read the settings: %w", err)
		}
		v.before, v.at = s, rev
	}
	next := v.before
	next.Mode = arm.Mode
	if arm.Mode != subjects.ModeOff {
		next.Policy = arm.Policy
	}
	if _, err := policy.Resolve(next); err != nil {
		return err
	}
	rev, err := v.store.PutSettings(ctx, next, v.at)
	if err != nil {
		return fmt.Errorf("write the settings: %w", err)
	}
	v.at, v.report.Restored = rev, false
	ctx, cancel := context.WithTimeoutCause(ctx, switchWithin, fmt.Errorf("no dispatcher decides by %s in mode %s within %v", arm.Policy, arm.Mode, switchWithin))
	defer cancel()
	for {
		r, err := v.ask(ctx, v.tokens(MinPromptTokens))
		if err != nil {
			return err
		}
		if r.Mode == arm.Mode && r.Policy == arm.Policy {
			return v.settle(ctx)
		}
	}
}

// restore puts the settings back, if they are still ours.
func (v *run) restore(ctx context.Context) error {
	if v.report.Restored {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), restoreWithin)
	defer cancel()
	_, err := v.store.PutSettings(ctx, v.before, v.at)
	switch {
	case errors.Is(err, kvstate.ErrConflict):
		return fmt.Errorf("somebody else has changed the settings of pool %s meanwhile: they are left as they are; before, the policy was %q in mode %q", v.report.Pool, v.before.Policy, v.before.Mode)
	case err != nil:
		return fmt.Errorf("put the settings of pool %s back (policy %q, mode %q): %w", v.report.Pool, v.before.Policy, v.before.Mode, err)
	}
	v.report.Restored = true
	return nil
}

// phase sends one kind of prompts, one request after the other.
func (v *run) phase(ctx context.Context, arm *Arm, kind string) (Phase, error) {
	p := Phase{Kind: kind}
	before, err := v.steady(ctx)
	if err != nil {
		return p, err
	}
	prompt := v.tokens(v.cfg.PromptTokens)
	for i := range v.cfg.Requests {
		if kind == Distinct {
			prompt = v.tokens(v.cfg.PromptTokens)
		}
		r, err := v.ask(ctx, prompt)
		if err != nil {
			return p, err
		}
		if i > 0 && kind != Distinct {
			p.Possible += v.possible(p.Requests[i-1].PromptTokens, len(prompt))
		}
		p.Requests = append(p.Requests, r.Request)
		if kind == MultiTurn {
			prompt = slices.Concat(prompt, r.output, v.tokens(turnTokens))
		}
		if v.cfg.Progress != nil {
			v.cfg.Progress(arm.Affinity, kind, i+1, v.cfg.Requests)
		}
		if err := v.settle(ctx); err != nil {
			return p, err
		}
	}
	after, err := v.steady(ctx)
	if err != nil {
		return p, err
	}
	for i, e := range v.report.Engines {
		p.Engines = append(p.Engines, Counted{Engine: e.Name, Before: before[i], After: after[i]})
	}
	return p, nil
}

// settle lets the news of an answer travel: every engine tells that it is idle
// again, and the cache's changes have the pause.
func (v *run) settle(ctx context.Context) error {
	if err := v.news.allIdle(ctx, v.report.Engines); err != nil {
		return err
	}
	return pause(ctx, v.cfg.Settle)
}

// possible is how many tokens of a prompt can be found cached when known of them
// were computed before: whole blocks of the largest engine block, and never the
// prompt's last token, which has to be computed for the first one of the output.
func (v *run) possible(known, prompt int) int64 {
	block := 1
	for _, e := range v.report.Engines {
		block = max(block, e.Block)
	}
	n := min(known, prompt-1)
	return int64(n - n%block)
}

type answered struct {
	Request
	output []uint32
}

// ask sends one prompt and waits for its answer and for its decision.
func (v *run) ask(ctx context.Context, prompt []uint32) (answered, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, answerWithin, fmt.Errorf("no answer within %v", answerWithin))
	defer cancel()
	v.sent++
	zero := 0.0
	q := &subjects.Request{
		ID: fmt.Sprintf("%x-%d", v.cfg.Seed, v.sent), Job: v.cfg.Job, Model: v.model, PromptTokenIDs: prompt,
		Sampling: subjects.SamplingParams{MaxTokens: outputTokens, Temperature: &zero},
	}
	res, err := v.client.Do(ctx, q)
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return answered{}, fmt.Errorf("rollout %s.%s: %w", v.cfg.Job, q.ID, err)
	}
	if res.Status != subjects.Completed && res.Status != subjects.Truncated {
		why := ""
		if res.Error != nil {
			why = ": " + res.Error.Message
		}
		return answered{}, fmt.Errorf("rollout %s ended %s%s", res.Key(), res.Status, why)
	}
	a := answered{output: res.TokenIDs, Request: Request{Rollout: res.Key(), PromptTokens: len(prompt), Cached: res.Usage.CachedTokens}}
	a.Engine, a.Predicted = res.Route.Engine, res.Route.PredictedCachedTokens
	d, err := v.news.decision(ctx, res.Key(), a.Engine)
	if err != nil {
		return a, err
	}
	a.Decision, a.Policy, a.Mode, a.Reason = d, d.Policy, d.Mode, d.Reason
	return a, nil
}

// tokens are n tokens that nobody has seen before. Their ids are small: every
// model has them.
func (v *run) tokens(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = 100 + v.rng.Uint32N(20_000)
	}
	return out
}
