package model

import (
	"errors"
	"fmt"
	"time"
)

// Profile is how fast an engine is. A step that decodes d requests holding kv
// tokens and prefills chunks takes
//
//	Step + d x Sequence + kv x KVReadPS
//	     + sum over chunks of (tokens x PromptToken + pairs x PairPS)
//
// where pairs counts each chunk token once for every token before it.
//
// Left out: the overlap of compute and memory traffic (terms are added, which
// is up to a quarter pessimistic for mixed steps), padding to captured graph
// sizes, sampling cost, tensor-parallel communication, mixture-of-experts
// routing, speculative decoding, and the noise of a real machine.
type Profile struct {
	Name        string        `json:"name"`
	Step        time.Duration `json:"step_ns"`         // weights read once, and the scheduler's own time, per step
	Sequence    time.Duration `json:"sequence_ns"`     // per decoding request and step
	KVReadPS    int64         `json:"kv_read_ps"`      // picoseconds to read one KV token, per step
	PromptToken time.Duration `json:"prompt_token_ns"` // compute of one prompt token without attention
	PairPS      int64         `json:"pair_ps"`         // picoseconds of attention for one token and one token before it
}

// H100x8B is a dense 8B model (32 layers, 8 KV heads of 128, bf16) on one H100
// SXM, from the data sheet (3.35 TB/s, 989 TFLOP/s dense bf16), the model's
// shape, and the 75 % of bandwidth and 45 % of compute that engines reach:
//
//	Step        16.1 GB of weights / 2.5 TB/s = 6.4 ms, scheduling hidden in it
//	Sequence    16 GFLOP / 445 TFLOP/s = 36 us, half of it hidden behind the weights
//	KVReadPS    128 KiB / 2.5 TB/s = 52.4 ns
//	PromptToken 36 us
//	PairPS      4 x 32 x 4096 FLOP / 445 TFLOP/s = 1.18 ns
//
// The 75 % come from published sweeps of vLLM with Llama 3.1 8B: 6.48 ms a
// token for one stream and 6.59 ms for four on an H100 (InferenceBench, vLLM
// 0.21), and 77 % of the bandwidth on an A100 (vLLM 0.23, one stream). Here it
// is 6.44 and 6.54 ms at 250 tokens of context; 10,500 tokens/s for 256
// streams of 1,000 tokens; 23,900 prompt tokens/s for a prompt of 8,192.
func H100x8B() Profile {
	return Profile{
		Name: "h100-8b", Step: 6400 * time.Microsecond, Sequence: 18 * time.Microsecond,
		KVReadPS: 52_400, PromptToken: 36 * time.Microsecond, PairPS: 1_180,
	}
}

// Times is the profile of an engine percent/100 times as fast (300 = three
// times). Below 1 it is taken as 1.
func (p Profile) Times(percent int) Profile {
	q := max(1, int64(percent))
	p.Name = fmt.Sprintf("%s x%d%%", p.Name, q)
	p.Step = p.Step * 100 / time.Duration(q)
	p.Sequence = p.Sequence * 100 / time.Duration(q)
	p.KVReadPS = p.KVReadPS * 100 / q
	p.PromptToken = p.PromptToken * 100 / time.Duration(q)
	p.PairPS = p.PairPS * 100 / q
	return p
}

// DecodeRate is tokens per second of a batch that only decodes, at that many
// requests and KV tokens.
func (p Profile) DecodeRate(requests, kvTokens int) float64 {
	step := ps(p.Step)*1000 + ps(requests)*ps(p.Sequence)*1000 + ps(kvTokens)*ps(p.KVReadPS)
	return float64(requests) / (float64(step) / 1e12)
}

// PrefillRate is tokens per second of one prompt of that length, alone.
func (p Profile) PrefillRate(tokens int) float64 {
	t := ps(p.Step)*1000 + p.chunk(tokens, 0)
	return float64(tokens) / (float64(t) / 1e12)
}

// chunk is the time of n prompt tokens that have before tokens before them.
func (p Profile) chunk(n, before int) ps {
	pairs := ps(n)*ps(before) + ps(n)*ps(n+1)/2
	return ps(n)*ps(p.PromptToken)*1000 + pairs*ps(p.PairPS)
}

func (p Profile) validate() error {
	var errs []error
	if p.Step <= 0 {
		errs = append(errs, fmt.Errorf("profile %q: step of %v: give the time of a step, above 0", p.Name, p.Step))
	}
	if p.Sequence < 0 || p.KVReadPS < 0 || p.PromptToken < 0 || p.PairPS < 0 {
		errs = append(errs, fmt.Errorf("profile %q: a negative time: give 0 or more", p.Name))
	}
	if p.Step > 10*time.Second || p.Sequence > time.Millisecond || p.KVReadPS > 1e6 || p.PromptToken > time.Second || p.PairPS > 1e5 {
		errs = append(errs, fmt.Errorf("profile %q: slower than any engine (a step over 10 s, 1 ms a request, a prompt token over a second, 1 us to read a KV token, 100 ns of attention for a pair): check the units", p.Name))
	}
	return errors.Join(errs...)
}
