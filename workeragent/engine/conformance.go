package engine

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/rollbus/rollbus/subjects"
	"github.com/rollbus/rollbus/subjects/blockhash"
	"github.com/rollbus/rollbus/workeragent/kvevents"
)

// Verdict of a check.
type Verdict string

// Verdicts.
const (
	Passed Verdict = "passed"
	Broken Verdict = "failed"
	NotRun Verdict = "not applicable"
)

// Check is one line of the conformance table.
type Check struct {
	Name    string  `json:"name"`
	Verdict Verdict `json:"verdict"`
	Detail  string  `json:"detail,omitempty"`
	MS      float64 `json:"ms"`
}

// ConformanceConfig of a run; zero = the default.
type ConformanceConfig struct {
	// PromptTokens of the ordinary prompt, at least 256. Default 512.
	PromptTokens int
	// FirstToken is the lowest token id used; ids from there on must be ordinary
	// ones of the model. Default 1,000.
	FirstToken uint32
	// CheckTimeout of one check. Default 60 s.
	CheckTimeout time.Duration
}

// conformance is one run of the checks against one engine.
type conformance struct {
	a     Adapter
	cfg   ConformanceConfig
	caps  Capabilities
	seed  atomic.Uint32
	runs  atomic.Uint32
	began int64
}

// Conformance runs every check against a real server, one after the other. The
// engine should be idle otherwise: some checks look at its load. It generates a
// few thousand tokens.
func Conformance(ctx context.Context, a Adapter, cfg ConformanceConfig) []Check {
	if cfg.PromptTokens < 256 {
		cfg.PromptTokens = 512
	}
	if cfg.FirstToken == 0 {
		cfg.FirstToken = 1000
	}
	if cfg.CheckTimeout <= 0 {
		cfg.CheckTimeout = time.Minute
	}
	c := &conformance{a: a, cfg: cfg, began: time.Now().UnixNano()}
	var out []Check
	for _, k := range []struct {
		name string
		run  func(*conformance, context.Context) (string, error)
	}{
		{"says what it is", (*conformance).capabilities},
		{"tokens in: runs to max_tokens", (*conformance).tokensIn},
		{"tokens out: ids come back", (*conformance).tokensOut},
		{"usage counts what came", (*conformance).usage},
		{"text in", (*conformance).textIn},
		{"output comes in pieces", (*conformance).pieces},
		{"a cached prefix is reported", (*conformance).cached},
		{"a salt keeps prompts apart", (*conformance).salted},
		{"a prompt that is too long is a data error", (*conformance).tooLong},
		{"a client that leaves stops the run", (*conformance).leave},
		{"abort by name", (*conformance).abort},
		{"load is complete", (*conformance).load},
		{"load shows a run", (*conformance).loadMoves},
		{"every rank can be pinned", (*conformance).ranks},
		{"cache events follow the cache", (*conformance).events},
		{"its state can be read", (*conformance).state},
	} {
		begun := time.Now()
		cctx, cancel := context.WithTimeout(ctx, cfg.CheckTimeout)
		detail, err := k.run(c, cctx)
		cancel()
		ch := Check{Name: k.name, Verdict: Passed, Detail: detail, MS: ms(time.Since(begun))}
		switch {
		case errors.Is(err, errNotApplicable):
			ch.Verdict = NotRun
		case err != nil:
			ch.Verdict, ch.Detail = Broken, err.Error()
		}
		out = append(out, ch)
		if ctx.Err() != nil {
			break
		}
	}
	return out
}

func na(format string, a ...any) (string, error) { return fmt.Sprintf(format, a...), errNotApplicable }

// prompt gives tokens that nobody has sent before.
func (c *conformance) prompt(n int) []uint32 {
	seed := c.seed.Add(1)*7919 + uint32(c.began)
	out := make([]uint32, n)
	for i := range out {
		seed = seed*1664525 + 1013904223
		out[i] = c.cfg.FirstToken + (seed>>8)%2000
	}
	return out
}

func (c *conformance) request(tokens []uint32, most int) *subjects.Request {
	return &subjects.Request{SchemaVersion: subjects.SchemaVersion, ID: "conformance", Job: "conformance", Model: c.caps.Model,
		PromptTokenIDs: tokens, Sampling: subjects.SamplingParams{MaxTokens: most, IgnoreEOS: true}}
}

func (c *conformance) name() Run {
	return Run{ID: fmt.Sprintf("conf-%016x-%04x", c.began, c.runs.Add(1))}
}

func (c *conformance) generate(ctx context.Context, r *subjects.Request) (Outcome, error) {
	o, err := c.a.Generate(ctx, r, c.name(), nil)
	if err == nil && o.Kind != Completed {
		err = fmt.Errorf("%s (%s): %s", o.Kind, o.Code, o.Message)
	}
	return o, err
}

func (c *conformance) capabilities(ctx context.Context) (_ string, err error) {
	if c.caps, err = c.a.Capabilities(ctx); err != nil {
		return "", err
	}
	return fmt.Sprintf("%s, model %s, %d ranks, events %s", c.caps.Kind, c.caps.Model, c.caps.Ranks, c.caps.Events), nil
}

func (c *conformance) tokensIn(ctx context.Context) (string, error) {
	o, err := c.generate(ctx, c.request(c.prompt(c.cfg.PromptTokens), 32))
	if err != nil {
		return "", err
	}
	if o.FinishReason != "length" {
		return "", fmt.Errorf("finish reason %q with ignore_eos, want length", o.FinishReason)
	}
	return fmt.Sprintf("first token after %.0f ms", o.TTFTMS), nil
}

func (c *conformance) tokensOut(ctx context.Context) (string, error) {
	o, err := c.generate(ctx, c.request(c.prompt(c.cfg.PromptTokens), 16))
	if err != nil {
		return "", err
	}
	if len(o.TokenIDs) != 16 {
		return "", fmt.Errorf("%d token ids of 16: results of this engine carry text only", len(o.TokenIDs))
	}
	return "", nil
}

func (c *conformance) usage(ctx context.Context) (string, error) {
	o, err := c.generate(ctx, c.request(c.prompt(c.cfg.PromptTokens), 16))
	switch {
	case err != nil:
		return "", err
	case o.Usage == nil:
		return "", errors.New("no usage: success cannot be proved")
	case o.Usage.CompletionTokens != 16 || o.Usage.PromptTokens != c.cfg.PromptTokens:
		return "", fmt.Errorf("prompt %d and completion %d, want %d and 16", o.Usage.PromptTokens, o.Usage.CompletionTokens, c.cfg.PromptTokens)
	}
	return "", nil
}

func (c *conformance) textIn(ctx context.Context) (string, error) {
	r := c.request(nil, 16)
	r.PromptTokenIDs, r.Prompt = nil, "The capital of France is"
	o, err := c.generate(ctx, r)
	if err == nil && o.Text == "" {
		err = errors.New("no text came back")
	}
	return "", err
}

func (c *conformance) pieces(ctx context.Context) (string, error) {
	n := 0
	o, err := c.a.Generate(ctx, c.request(c.prompt(c.cfg.PromptTokens), 64), c.name(), func(d Delta) {
		if len(d.TokenIDs) > 0 || d.Text != "" {
			n++
		}
	})
	switch {
	case err != nil:
		return "", err
	case o.Kind != Completed:
		return "", fmt.Errorf("%s: %s", o.Kind, o.Message)
	case n < 2:
		return "", fmt.Errorf("64 tokens in %d piece: the watchdog sees no progress", n)
	}
	return fmt.Sprintf("64 tokens in %d pieces", n), nil
}

func (c *conformance) cached(ctx context.Context) (string, error) {
	p := c.prompt(c.cfg.PromptTokens)
	if _, err := c.generate(ctx, c.request(p, 4)); err != nil {
		return "", err
	}
	o, err := c.generate(ctx, c.request(append(p, c.prompt(16)...), 4))
	switch {
	case err != nil:
		return "", err
	case o.Usage == nil || o.Usage.CachedTokens == nil:
		return "", errors.New("cached_tokens is not reported: predictions cannot be checked (vLLM: --enable-prompt-tokens-details)")
	case *o.Usage.CachedTokens == 0:
		return "", errors.New("no token of a prompt sent twice is cached: is prefix caching on?")
	}
	return fmt.Sprintf("%d of %d tokens", *o.Usage.CachedTokens, len(p)), nil
}

func (c *conformance) salted(ctx context.Context) (string, error) {
	p := c.prompt(c.cfg.PromptTokens)
	if _, err := c.generate(ctx, c.request(p, 4)); err != nil {
		return "", err
	}
	r := c.request(p, 4)
	r.CacheSalt = fmt.Sprint("salt-", c.began)
	o, err := c.generate(ctx, r)
	switch {
	case err != nil:
		return "", err
	case o.Usage == nil || o.Usage.CachedTokens == nil:
		return na("cached_tokens is not reported")
	case *o.Usage.CachedTokens > 0:
		return "", fmt.Errorf("%d tokens of another salt's prompt were reused", *o.Usage.CachedTokens)
	}
	return "", nil
}

func (c *conformance) tooLong(ctx context.Context) (string, error) {
	if c.caps.MaxModelLen == nil {
		return na("the context length is not told")
	}
	const most = 300_000
	n := *c.caps.MaxModelLen + 1
	if n > most {
		return na("a context of %d tokens is not tried out", *c.caps.MaxModelLen)
	}
	o, err := c.a.Generate(ctx, c.request(c.prompt(n), 4), c.name(), nil)
	if err == nil && o.Kind != DataError {
		err = fmt.Errorf("%d tokens for a context of %d: %s (%s)", n, n-1, o.Kind, o.Code)
	}
	return o.Code, err
}

// long starts a run of many tokens and waits for its first.
func (c *conformance) long(ctx context.Context) (run Run, done chan Outcome, leave context.CancelFunc, err error) {
	ctx, leave = context.WithCancel(ctx)
	run, done = c.name(), make(chan Outcome, 1)
	most := 20_000
	if c.caps.MaxModelLen != nil {
		most = min(most, *c.caps.MaxModelLen-c.cfg.PromptTokens-1)
	}
	begun := make(chan struct{}, 1)
	r := c.request(c.prompt(c.cfg.PromptTokens), max(most, 64))
	go func() {
		o, _ := c.a.Generate(ctx, r, run, func(d Delta) {
			if len(d.TokenIDs) == 0 && d.Text == "" {
				return
			}
			select {
			case begun <- struct{}{}:
			default:
			}
		})
		done <- o
	}()
	select {
	case <-begun:
		return run, done, leave, nil
	case o := <-done:
		leave()
		return run, nil, leave, fmt.Errorf("a long run ended before its first token: %s %s", o.Kind, o.Message)
	}
}

// running over all ranks, -1 = unknown.
func (c *conformance) running(ctx context.Context) int {
	l, err := c.a.Load(ctx)
	if err != nil || l == nil {
		return -1
	}
	n := 0
	for _, r := range l.Ranks {
		if r.Running == nil {
			return -1
		}
		n += *r.Running
		if r.Waiting != nil {
			n += *r.Waiting
		}
	}
	return n
}

// waitFor looks ten times a second until ok, or ctx ends.
func waitFor(ctx context.Context, ok func() bool) bool {
	t := time.NewTicker(100 * time.Millisecond)
	defer t.Stop()
	for !ok() {
		select {
		case <-t.C:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

func (c *conformance) leave(ctx context.Context) (string, error) {
	if c.running(ctx) < 0 {
		return na("the server does not tell its load")
	}
	_, done, leave, err := c.long(ctx)
	if err != nil {
		return "", err
	}
	leave()
	<-done
	left := time.Now()
	if !waitFor(ctx, func() bool { return c.running(ctx) == 0 }) {
		return "", errors.New("the engine still shows it: runs that are given up go on")
	}
	return fmt.Sprintf("gone after %.1f s", time.Since(left).Seconds()), nil
}

func (c *conformance) abort(ctx context.Context) (string, error) {
	if _, ok := c.a.(*SGLang); !ok {
		return na("this kind stops when the client leaves")
	}
	run, done, leave, err := c.long(ctx)
	if err != nil {
		return "", err
	}
	defer leave()
	if err := c.a.Abort(ctx, run); err != nil {
		leave()
		<-done
		return "", err
	}
	select {
	case o := <-done:
		if o.Kind != Aborted {
			return "", fmt.Errorf("an aborted run ended as %s %s", o.Kind, o.Code)
		}
		return fmt.Sprintf("%d tokens came before it", len(o.TokenIDs)), nil
	case <-ctx.Done():
		leave()
		<-done
		return "", errors.New("the run went on")
	}
}

func (c *conformance) load(ctx context.Context) (string, error) {
	l, err := c.a.Load(ctx)
	switch {
	case err != nil:
		return "", err
	case l == nil:
		return na("the server does not tell its load")
	case len(l.Ranks) != c.caps.Ranks:
		return "", fmt.Errorf("%d of %d ranks report", len(l.Ranks), c.caps.Ranks)
	}
	capacity := ""
	for _, r := range l.Ranks {
		if r.Running == nil || r.Waiting == nil {
			return "", fmt.Errorf("rank %d reports no running or waiting count", r.Rank)
		}
		if r.KVCapacityTokens == nil {
			capacity = ", KV capacity unknown"
		}
	}
	return "from " + l.Source + capacity, nil
}

func (c *conformance) loadMoves(ctx context.Context) (string, error) {
	if c.running(ctx) < 0 {
		return na("the server does not tell its load")
	}
	_, done, leave, err := c.long(ctx)
	if err != nil {
		return "", err
	}
	defer func() { leave(); <-done }()
	sent := time.Now()
	if !waitFor(ctx, func() bool { return c.running(ctx) > 0 }) {
		return "", errors.New("a run of many tokens never shows")
	}
	return fmt.Sprintf("shown after %.1f s", time.Since(sent).Seconds()), nil
}

func (c *conformance) ranks(ctx context.Context) (string, error) {
	if c.caps.Ranks < 2 {
		return na("one rank")
	}
	for rank := range c.caps.Ranks {
		run := c.name()
		run.Rank = &rank
		o, err := c.a.Generate(ctx, c.request(c.prompt(c.cfg.PromptTokens), 4), run, nil)
		switch {
		case err != nil:
			return "", err
		case o.Kind != Completed:
			return "", fmt.Errorf("rank %d: %s %s", rank, o.Kind, o.Message)
		case len(o.Extra["dp_rank_asked"]) > 0:
			return "", fmt.Errorf("rank %d was asked for, rank %s answered", rank, o.Extra["dp_rank"])
		}
	}
	return "", nil
}

func (c *conformance) events(ctx context.Context) (string, error) {
	e, ok := c.a.(EventSourcer)
	if !ok || c.caps.Events != "exact" {
		return na("the server publishes none")
	}
	sources, err := e.EventSources(ctx)
	if err != nil {
		return "", err
	}
	const block = 64
	f, err := kvevents.New(kvevents.Config{Engine: "conformance", Epoch: "c", Sources: sources, Identity: e.Identity,
		Index: kvevents.IndexConfig{Model: c.caps.Model, BlockTokens: block}})
	if err != nil {
		return "", err
	}
	fctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { defer close(done); _ = f.Run(fctx) }()
	defer func() { cancel(); <-done }()
	if !waitFor(ctx, f.Exact) {
		return "", fmt.Errorf("not every rank's publisher is heard: %+v", f.Status())
	}
	p := c.prompt(c.cfg.PromptTokens)
	want := blockhash.Chain(nil, blockhash.Namespace(c.caps.Model, "", ""), p, block)
	tries, n := 0, 0
	if !waitFor(ctx, func() bool { // a block is told of with the step after it
		if tries++; tries == 1 || tries%20 == 0 {
			if _, err = c.generate(ctx, c.request(p, 4)); err != nil {
				return true
			}
		}
		n, _ = f.View().Match(want)
		return n >= len(want)-1
	}) {
		return "", fmt.Errorf("%d of %d blocks of a prompt appeared; alarms %v, %+v", n, len(want), f.Alarms(), f.Status())
	}
	if err != nil {
		return "", err
	}
	s := f.Status()[0]
	return fmt.Sprintf("%d of %d blocks, engine blocks of %d tokens", n, len(want), s.BlockSize), nil
}

func (c *conformance) state(ctx context.Context) (string, error) {
	k, ok := c.a.(Controller)
	if !ok || !controllable(ctx, k) {
		return na("no control calls are served")
	}
	s, err := k.State(ctx)
	if err != nil {
		return "", err
	}
	return "weight version " + or(s.WeightVersion, "unknown"), nil
}
