package workload

import (
	"cmp"
	"encoding/json"
	"math/bits"
	"strconv"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/rollbus/rollbus/subjects"
)

// Segment is a stretch of a prompt: the first Tokens tokens of the content ID.
type Segment struct {
	ID     uint64
	Tokens int
}

// Rollout is one request of a workload.
type Rollout struct {
	Job, ID string
	Prompt  []Segment
	Output  int // tokens it will generate
	Limit   int // its job's max_tokens, from which nobody can tell the output; 0 = twice the output

	// At is when it is submitted: from the start in an open loop, from the
	// start of its step in a closed one. Ignored when After is set.
	At   time.Duration
	Step int64

	Group       string // "" = none
	Index, Size int    // in the group

	Trajectory string // "" = a single turn
	Turn       int    // from 1
	Last       bool
	After      string        // ID of the turn before, "" = none: submitted Gap after that one's answer
	Gap        time.Duration // the time of the tool between the turns
}

// Workload is a set of rollouts and how they are released (see Pace).
type Workload struct {
	Name string
	// Closed: a step begins when every rollout of the step before is answered.
	Closed   bool
	Rollouts []Rollout
}

// PromptTokens of a rollout.
func (r *Rollout) PromptTokens() int {
	n := 0
	for _, s := range r.Prompt {
		n += s.Tokens
	}
	return n
}

// OutputSegment stands for the rollout's output in the prompts of later turns.
func (r *Rollout) OutputSegment() Segment {
	return Segment{ID: xxhash.Sum64String(r.Job+"."+r.ID) | 1<<63, Tokens: r.Output}
}

// Tokens from 1,000 up to this are used: ids that any model knows.
const (
	firstToken = 1_000
	lastToken  = 100_000
)

// Token number i of a content.
func Token(id uint64, i int) uint32 {
	h, _ := bits.Mul64(mix(id^uint64(i)*0x9e3779b97f4a7c15), lastToken-firstToken)
	return firstToken + uint32(h)
}

// mix is the finalizer of splitmix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Tokens appends the token ids of a prompt. outputs gives what an earlier turn
// really said, by the ID of its OutputSegment; nil, or nil from it, means that
// stand-in tokens are used.
func Tokens(dst []uint32, prompt []Segment, outputs func(id uint64) []uint32) []uint32 {
	for _, s := range prompt {
		if outputs != nil {
			if said := outputs(s.ID); said != nil {
				dst = append(dst, said...)
				continue
			}
		}
		for i := range s.Tokens {
			dst = append(dst, Token(s.ID, i))
		}
	}
	return dst
}

// Names appends names of the whole blocks of a prompt: chained, equal exactly
// where the segments are. They are not the hashes of the tokens.
func Names(dst []uint64, ns uint64, prompt []Segment, blockTokens int) []uint64 {
	n := namer{h: ns, block: max(1, blockTokens)}
	for _, s := range prompt {
		dst = n.add(dst, s)
	}
	return dst
}

// OutputNames names the blocks of prompt and output together, by block number:
// those that generating completes. Ask in rising order.
func (r *Rollout) OutputNames(ns uint64, blockTokens int) func(i int) uint64 {
	var names []uint64
	return func(i int) uint64 {
		if names == nil {
			names = Names(nil, ns, append(r.Prompt[:len(r.Prompt):len(r.Prompt)], r.OutputSegment()), blockTokens)
		}
		if i >= len(names) {
			return mix(ns ^ uint64(i)) // past what the rollout says: never asked
		}
		return names[i]
	}
}

type namer struct {
	h     uint64
	block int
	have  int // tokens in the unfinished block
}

func (n *namer) add(dst []uint64, s Segment) []uint64 {
	for from := 0; from < s.Tokens; {
		take := min(n.block-n.have, s.Tokens-from)
		n.h = mix(n.h ^ mix(s.ID+uint64(from)*0x9e3779b97f4a7c15) + uint64(take))
		from += take
		if n.have += take; n.have == n.block {
			dst = append(dst, n.h)
			n.have = 0
		}
	}
	return dst
}

// powerOfTwo that is at least n.
func powerOfTwo(n int) int { return 1 << bits.Len(uint(max(1, n)-1)) }

// limit gives every rollout of a job the same Limit: the first power of two
// above all its outputs.
func limit(rs []Rollout) {
	most := map[string]int{}
	for i := range rs {
		most[rs[i].Job] = max(most[rs[i].Job], rs[i].Output)
	}
	for i := range rs {
		rs[i].Limit = powerOfTwo(most[rs[i].Job] + 1)
	}
}

// RequestOptions say how a rollout becomes a message.
type RequestOptions struct {
	Model string
	// MaxTokens of every request; 0 = the rollout's Limit. An output that
	// reaches it ends by length.
	MaxTokens int
	// Forced makes any engine generate exactly Output tokens: max_tokens is the
	// output and EOS is ignored. Otherwise a simulated engine is told where to
	// stop (sim_total_tokens) and a real one stops where its model does.
	Forced  bool
	Outputs func(id uint64) []uint32 // see Tokens
}

// Request is the message for the bus.
func (r *Rollout) Request(o RequestOptions) *subjects.Request {
	seed := int64(r.Index)
	q := &subjects.Request{
		SchemaVersion: subjects.SchemaVersion, ID: r.ID, Job: r.Job, Model: o.Model,
		PromptTokenIDs: Tokens(make([]uint32, 0, r.PromptTokens()), r.Prompt, o.Outputs),
	}
	q.Sampling.Seed = &seed
	if o.Forced {
		q.Sampling.MaxTokens, q.Sampling.IgnoreEOS = r.Output, true
	} else {
		q.Sampling.MaxTokens = cmp.Or(o.MaxTokens, r.Limit, 2*powerOfTwo(r.Output))
		total := strconv.Itoa(len(q.PromptTokenIDs) + r.Output)
		q.Sampling.Extra = map[string]json.RawMessage{"sim_total_tokens": json.RawMessage(total)}
	}
	if r.Group != "" {
		q.Group = &subjects.Group{ID: r.Group, Index: r.Index, Size: r.Size}
	}
	if r.Trajectory != "" {
		q.Trajectory = &subjects.Trajectory{ID: r.Trajectory, Turn: r.Turn, Last: r.Last}
	}
	if r.Step > 0 {
		step := r.Step
		q.Step = &step
	}
	return q
}
