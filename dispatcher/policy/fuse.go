package policy

import "time"

// Fuser closes the loop for one engine (S1.3). Reservations say at once what
// was sent; the engine says late what is really there: direct clients, shared
// prefixes, answers shorter than expected. The difference, averaged, is added:
//
//	fused = max(0, reserved at the sample + EMA(observed - reserved at the sample)) + newer
//
// Reservations newer than the sample are added exactly, and requests whose
// reservation has gone since are no longer counted as running. Without samples the
// loop is open: reserved alone. The zero value has seen nothing; a new epoch
// starts with a zero value. A value type: the core keeps one in each engine.
type Fuser struct {
	tokens, requests float64 // averages of observed - reserved
	hasTokens        bool
	hasRequests      bool
	at               time.Duration // of the last sample
	held             int           // requests reserved then
	rates            rates
}

const (
	fuseWeight = 0.3              // of a sample; at 5 Hz a step is followed within a second
	fuseForget = 10 * time.Second // a longer silence starts the average anew
)

// Reserved is a sum of reservations of one engine.
type Reserved struct {
	Requests     int
	Tokens       int64 // prompt + expected output
	PromptTokens int64
	CachedTokens int64 // of the prompts, expected to be found in the cache when they were placed
}

// Sample takes one usable report, at the time it came, and what was reserved
// when it was taken: the reservations up to the revision the agent had applied;
// but as many requests as the agent says that it had there, if it does: those that
// were released while the report was on its way would look like somebody else's.
// Call it once a report.
func (f *Fuser) Sample(now time.Duration, o *Observed, at Reserved) {
	if now-f.at > fuseForget {
		f.hasTokens, f.hasRequests = false, false
	}
	f.at, f.held = now, at.Requests
	if o.UsedTokens >= 0 {
		f.tokens = blend(f.tokens, float64(o.UsedTokens-at.Tokens), f.hasTokens)
		f.hasTokens = true
	}
	f.requests = blend(f.requests, float64(o.Running+o.Waiting-at.Requests), f.hasRequests)
	f.hasRequests = true
	f.rates.learn(o)
}

func blend(old, v float64, has bool) float64 {
	if !has {
		return v
	}
	return average(old, v, fuseWeight)
}

// Fuse turns a judged report into what a decision reads. all is everything
// reserved now, newer the part of it that the report does not know.
func (f *Fuser) Fuse(o *Observed, all, newer Reserved) {
	if o.UsedTokens >= 0 && f.hasTokens {
		o.UsedTokens = max(0, all.Tokens-newer.Tokens+int64(f.tokens)) + newer.Tokens
	}
	if ended := f.held - (all.Requests - newer.Requests); ended > 0 {
		// They ran; what waits is taken only when the report shows fewer running.
		waited := max(0, ended-o.Running)
		o.Running, o.Waiting = max(0, o.Running-ended), max(0, o.Waiting-waited)
	}
	o.ExternalRequests = 0
	if f.hasRequests && f.requests > 0 {
		o.ExternalRequests = int(f.requests + 0.5)
	}
	o.NewerRequests, o.NewerTokens, o.NewerPrefillTokens, o.NewerCachedTokens = newer.Requests, newer.Tokens, newer.PromptTokens, newer.CachedTokens
	o.ComingTokens = newer.PromptTokens - newer.CachedTokens + max(0, o.WaitingUncachedTokens)
	o.DecodeTokS, o.PrefillTokS = f.rates.decode, f.rates.prefill
}

// Rates are what the engine showed when it was busy, tokens/s; 0 = not known.
func (f *Fuser) Rates() (decode, prefill float64) { return f.rates.decode, f.rates.prefill }

// rates learns what an engine can do from what it does. An idle engine decodes
// slowly because it has little to do, so a higher rate is believed quickly and
// a lower one slowly, and only from a busy engine.
type rates struct{ decode, prefill float64 } // tokens/s; 0 = not known

const (
	rateUp   = 0.5
	rateDown = 0.02
)

func (r *rates) learn(o *Observed) {
	busy := o.Waiting > 0
	if o.MaxRunning > 0 {
		// A few that wait for the step in flight say nothing: a batch of two would
		// be taken for all that the engine can do, and each request there for slow.
		busy = 2*o.Running >= o.MaxRunning || o.Waiting > 0 && 2*o.KVUsageWorst >= 1
	}
	r.decode = peak(r.decode, o.DecodeTokS, busy)
	// An agent that follows its runs tells a rate of prompts only when it saw
	// one, be the engine busy or not. Beside a short queue it would depend on what
	// the engine was given: those that got more would look faster, and get more.
	r.prefill = peak(r.prefill, o.PrefillTokS, busy || o.PendingTold)
}

func peak(old, v float64, busy bool) float64 {
	switch {
	case v <= 0:
		return old
	case old == 0:
		if busy {
			return v
		}
		return 0
	case v > old:
		return average(old, v, rateUp)
	case busy:
		return average(old, v, rateDown)
	}
	return old
}
