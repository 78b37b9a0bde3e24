package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/rollbus/rollbus/bench/engine/model"
	"github.com/rollbus/rollbus/subjects/blockhash"
)

// Generation is one request, whatever API it came by.
type Generation struct {
	Prompt       []uint32 // not changed
	MaxTokens    int      // at least 1
	MinTokens    int
	Seed         int64
	LoRA, Salt   string
	Stop         []string
	StopTokenIDs []int64
	IgnoreEOS    bool // run to MaxTokens
	// OutputTokens ends the output after that many (finish reason stop), if
	// above 0; TotalTokens when prompt and output together are that long, so
	// that a resumed request ends where it would have.
	OutputTokens int
	TotalTokens  int
	Rank         *int // nil = the server's choice: least 4 x waiting + running
	Stream       bool // wants deltas
}

// End of a generation.
type End struct {
	Reason string // stop, length, abort, error
	Stop   any    // stop string or token id that ended it, nil for none
	Tokens int
	Cached int
	Rank   int
}

// Reasons besides stop and length.
const (
	ReasonAbort = "abort"
	ReasonError = "error"
)

// Submit gives a request to the engine. The caller reads with Next until the
// end, or gives up with Abort. Errors wrap ErrBadRequest, ErrQueueFull or ErrDown.
func (s *Server) Submit(g Generation) (*Stream, error) {
	l := s.current()
	if l == nil {
		return nil, ErrDown
	}
	return l.submit(&g)
}

func (l *life) submit(g *Generation) (*Stream, error) {
	c := &l.s.cfg
	switch {
	case len(g.Prompt) == 0:
		return nil, fmt.Errorf("%w: the prompt is empty", ErrBadRequest)
	case g.MaxTokens < 1:
		return nil, fmt.Errorf("%w: max_tokens is %d, give at least 1", ErrBadRequest, g.MaxTokens)
	case len(g.Prompt) > c.MaxModelLen || g.MaxTokens > c.MaxModelLen-len(g.Prompt):
		return nil, fmt.Errorf("%w: This model's maximum context length is %d tokens. However, you requested %d tokens (%d in the prompt, %d in the completion). Please reduce the length of the prompt or the completion",
			ErrBadRequest, c.MaxModelLen, len(g.Prompt)+g.MaxTokens, len(g.Prompt), g.MaxTokens)
	case g.Rank != nil && (*g.Rank < 0 || *g.Rank >= c.Ranks):
		return nil, fmt.Errorf("%w: data parallel rank %d is out of range, there are %d", ErrBadRequest, *g.Rank, c.Ranks)
	}
	ns := blockhash.Namespace(c.Model, g.LoRA, g.Salt)
	seq := newSequence(ns, g.Seed, g.Prompt)
	j := &Stream{gen: g, plan: planOutput(g, seq, c.MeanOutput), seq: seq, mean: c.MeanOutput, drv: l.drv,
		rank: -1, notify: make(chan struct{}, 1)}
	j.names = newNamer(ns, g, seq, c.Engine.BlockTokens, c.MeanOutput)
	j.blocks = j.names.named
	j.cached.Store(-1)
	var err error
	if down := l.drv.do(func() { err = l.drv.submit(j) }); down != nil {
		return nil, down
	}
	if errors.Is(err, model.ErrTooLarge) {
		err = fmt.Errorf("%w: %w", ErrBadRequest, err)
	}
	if err != nil {
		return nil, err
	}
	return j, nil
}

// Next waits for output beyond what was read and returns it, at most upto
// tokens in all (negative = no bound), or the end once everything before it
// was read. A wake that is closed or sends makes it return early with neither.
// It fails when ctx ends or the server goes down. One caller at a time.
func (j *Stream) Next(ctx context.Context, upto int, wake <-chan struct{}) ([]uint32, *End, error) {
	for {
		end := j.ended.Load()
		have := int(j.tokens.Load())
		if end != nil {
			have = end.Tokens
		}
		if upto >= 0 {
			have = min(have, upto)
		}
		if have > j.read && (j.gen.Stream || end != nil) {
			return j.tokensTo(have), nil, nil
		}
		if end != nil && j.read >= end.Tokens {
			return nil, end, nil
		}
		if upto >= 0 && j.read >= upto && wake == nil {
			return nil, nil, nil
		}
		select {
		case <-j.notify:
		case <-wake:
			return nil, nil, nil
		case <-ctx.Done():
			return nil, nil, context.Cause(ctx)
		case <-j.drv.ctx.Done():
			return nil, nil, ErrDown
		}
	}
}

func (j *Stream) tokensTo(n int) []uint32 {
	out := make([]uint32, 0, n-j.read)
	for ; j.read < n; j.read++ {
		t, _ := j.seq.next(j.mean)
		out = append(out, t)
	}
	return out
}

// Abort ends the generation early; its End says abort. Nothing happens when it
// has ended already.
func (j *Stream) Abort() { _ = j.drv.send(func() { j.drv.abort(j, ReasonAbort) }) }

// Cached prompt tokens, -1 before it was started.
func (j *Stream) Cached() int { return int(j.cached.Load()) }
