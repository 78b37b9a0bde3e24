package subjects

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Bounds of a request beside those of the wire.
const (
	MaxAttemptsLimit = 100       // max_attempts
	MaxLabels        = 64        // labels, each key up to MaxToken and value up to MaxString bytes
	MaxStops         = 64        // stop strings and stop token ids, each
	MaxMeta          = 256 << 10 // bytes of meta
	MaxExtra         = 256       // unknown fields of an object
	MaxGroup         = 1 << 20   // members of a group
)

// problems collects what is wrong, field by field.
type problems []error

func (p *problems) add(field, format string, args ...any) {
	*p = append(*p, &FieldError{field, fmt.Sprintf(format, args...)})
}

func (p *problems) token(field, v string) {
	if err := CheckToken(field, v); err != nil {
		*p = append(*p, &FieldError{field, strings.TrimPrefix(err.Error(), ErrBadName.Error()+": ")})
	}
}

// text checks a free string: bounded, UTF-8, and without NUL, which separates
// the parts of a namespace.
func (p *problems) text(field, v string) {
	switch {
	case len(v) > MaxString:
		p.add(field, "is %d bytes long: at most %d are allowed", len(v), MaxString)
	case !utf8.ValidString(v):
		p.add(field, "is not valid UTF-8")
	case strings.IndexByte(v, 0) >= 0:
		p.add(field, "has a NUL byte")
	}
}

func (p *problems) whole(field string, v, lo, hi int64) {
	if v < lo || v > hi {
		p.add(field, "is %d: give %d to %d", v, lo, hi)
	}
}

func (p *problems) real(field string, v *float64, lo, hi float64, openLow bool) {
	if v == nil {
		return
	}
	if x := *v; math.IsNaN(x) || x < lo || x > hi || openLow && x == lo {
		if openLow {
			p.add(field, "is %v: give more than %v, at most %v", x, lo, hi)
			return
		}
		p.add(field, "is %v: give %v to %v", x, lo, hi)
	}
}

func (p *problems) dur(field string, v Duration, hi time.Duration) {
	if v < 0 || v.D() > hi {
		p.add(field, "is %v: give 0 (the pool's default) to %v", v, hi)
	}
}

func (p *problems) extra(at string, extra map[string]json.RawMessage) {
	if len(extra) > MaxExtra {
		p.add(atOr(at, "request"), "has %d unknown fields: at most %d are passed on", len(extra), MaxExtra)
		return
	}
	for _, name := range slices.Sorted(maps.Keys(extra)) {
		field := join(at, name)
		switch name {
		case "n", "best_of", "num_return_sequences":
			if s := strings.TrimSpace(string(extra[name])); s != "1" && s != "null" && s != "" {
				p.add(field, "is %s: one request is one sample. Submit a group of requests instead (group.id, group.index, group.size; the client's Expand makes them)", quote(s))
			}
			continue
		}
		switch {
		case len(name) > MaxToken:
			p.add(field[:min(len(field), MaxToken)], "is a field name of %d bytes: at most %d are allowed", len(name), MaxToken)
		case len(extra[name]) > 0 && !json.Valid(extra[name]):
			p.add(field, "is no JSON")
		}
	}
}

// samplingNames are refused beside sampling_params: they would silently not count.
var samplingNames = []string{
	"max_tokens", aliasMaxTokens, "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
	"seed", "stop", "stop_token_ids", "logprobs", "ignore_eos",
}

// Validate names everything that is wrong with a request, each a FieldError.
func (r *Request) Validate() error {
	var p problems
	if r.SchemaVersion != 0 && r.SchemaVersion != SchemaVersion {
		p.add("schema_version", "is %d: this version of rollbus knows %d", r.SchemaVersion, SchemaVersion)
	}
	p.token("id", r.ID)
	p.token("job", r.Job)
	if r.Reader != "" {
		p.token("reader", r.Reader)
	}
	p.text("model", r.Model)
	p.text("lora", r.LoRA)
	p.text("cache_salt", r.CacheSalt)
	p.text("affinity", r.Affinity)
	p.text("reply_key", r.ReplyKey)
	r.validatePrompt(&p)
	r.Sampling.validate(&p)
	if r.Priority != nil {
		p.whole("priority", int64(*r.Priority), math.MinInt32, math.MaxInt32)
	}
	r.validateTies(&p)
	if r.Step != nil {
		p.whole("step", *r.Step, 0, 1<<62)
	}
	r.WeightVersion.validate(&p)
	p.dur("deadline", r.Deadline, MaxDeadline.D())
	p.dur("attempt_timeout", r.AttemptTimeout, MaxDeadline.D())
	p.whole("max_attempts", int64(r.MaxAttempts), 0, MaxAttemptsLimit)
	p.whole("expected_tokens", int64(r.ExpectedTokens), 0, MaxTokenCount)
	r.validateResume(&p)
	r.validateLabels(&p)
	if r.Return != nil {
		p.extra("return", r.Return.Extra)
	}
	p.extra("", r.Extra)
	for _, name := range samplingNames {
		if _, there := r.Extra[name]; there {
			p.add(name, "stands beside sampling_params: put it inside")
		}
	}
	return errors.Join(p...)
}

func (r *Request) validatePrompt(p *problems) {
	kinds := 0
	for _, has := range [...]bool{r.PromptTokenIDs != nil, r.Prompt != "", len(r.Messages) > 0} {
		if has {
			kinds++
		}
	}
	switch {
	case kinds == 0:
		p.add("prompt", "is missing or empty: give exactly one of prompt_token_ids, prompt, messages")
	case kinds > 1:
		p.add("prompt", "is given in %d ways: give exactly one of prompt_token_ids, prompt, messages", kinds)
	case r.PromptTokenIDs != nil && len(r.PromptTokenIDs) == 0:
		p.add("prompt_token_ids", "is empty: give at least one token")
	}
	if !utf8.ValidString(r.Prompt) {
		p.add("prompt", "is not valid UTF-8")
	}
	if len(r.Messages) > 0 {
		var msgs []map[string]json.RawMessage
		if err := json.Unmarshal(r.Messages, &msgs); err != nil {
			p.add("messages", "is no list of objects: %s", plain(err))
		} else if len(msgs) == 0 {
			p.add("messages", "is empty: give at least one message")
		}
	}
}

func (s *SamplingParams) validate(p *problems) {
	const at = "sampling_params."
	if s.MaxTokens == 0 {
		p.add(at+"max_tokens", "is missing or 0: give how many tokens may be generated, at least 1")
	} else {
		p.whole(at+"max_tokens", int64(s.MaxTokens), 1, MaxTokenCount)
	}
	p.real(at+"temperature", s.Temperature, 0, 100, false)
	p.real(at+"top_p", s.TopP, 0, 1, true)
	p.real(at+"min_p", s.MinP, 0, 1, false)
	if s.TopK != nil {
		p.whole(at+"top_k", int64(*s.TopK), -1, MaxTokenCount)
	}
	if s.Logprobs != nil {
		p.whole(at+"logprobs", int64(*s.Logprobs), -1, MaxTokenCount)
	}
	p.whole(at+"stop (number of strings)", int64(len(s.Stop)), 0, MaxStops)
	for i, v := range s.Stop {
		if v == "" {
			p.add(fmt.Sprintf("%sstop[%d]", at, i), "is empty")
		} else {
			p.text(fmt.Sprintf("%sstop[%d]", at, i), v)
		}
	}
	p.whole(at+"stop_token_ids (number of ids)", int64(len(s.StopTokenIDs)), 0, 16*MaxStops)
	for i, v := range s.StopTokenIDs {
		if v < 0 || v > math.MaxUint32 {
			p.add(fmt.Sprintf("%sstop_token_ids[%d]", at, i), "is %d: give 0 to %d", v, uint32(math.MaxUint32))
		}
	}
	p.extra("sampling_params", s.Extra)
}

func (r *Request) validateTies(p *problems) {
	if g := r.Group; g != nil {
		if g.ID == "" {
			p.add("group.id", "is empty: name the group")
		}
		p.text("group.id", g.ID)
		p.whole("group.size", int64(g.Size), 0, MaxGroup)
		most := int64(MaxGroup)
		if g.Size > 0 {
			most = int64(g.Size)
		}
		p.whole("group.index", int64(g.Index), 0, most-1)
		p.whole("group.need", int64(g.Need), 0, most)
		p.whole("group.min_survivors", int64(g.MinSurvivors), 0, most)
	}
	if t := r.Trajectory; t != nil {
		if t.ID == "" {
			p.add("trajectory.id", "is empty: name the trajectory")
		}
		p.text("trajectory.id", t.ID)
		p.whole("trajectory.turn", int64(t.Turn), 1, MaxBind)
	}
}

func (w *WeightVersion) validate(p *problems) {
	if w == nil {
		return
	}
	for _, f := range [...]struct {
		name string
		v    *int64
	}{{"min", w.Min}, {"exact", w.Exact}, {"max_staleness", w.MaxStaleness}} {
		if f.v != nil {
			p.whole("weight_version."+f.name, *f.v, 0, 1<<62)
		}
	}
	if w.Exact != nil && (w.Min != nil || w.MaxStaleness != nil) {
		p.add("weight_version.exact", "stands beside min or max_staleness: give exact alone, or the others")
	}
}

func (r *Request) validateResume(p *problems) {
	if r.Resume == nil {
		return
	}
	n := len(r.Resume.TokenIDs)
	if n == 0 {
		p.add("resume.token_ids", "is empty: leave resume out, or give the tokens generated so far")
	}
	if r.Sampling.MaxTokens > 0 && n >= r.Sampling.MaxTokens {
		p.add("resume.token_ids", "has %d tokens and max_tokens is %d: nothing is left to generate", n, r.Sampling.MaxTokens)
	}
	for i, s := range r.Resume.Segments {
		if s.Start < 0 || s.End < s.Start || s.End > n {
			p.add(fmt.Sprintf("resume.segments[%d]", i), "runs from %d to %d of %d tokens", s.Start, s.End, n)
		}
	}
	if len(r.Resume.Logprobs) > 0 && !json.Valid(r.Resume.Logprobs) {
		p.add("resume.logprobs", "is no JSON")
	}
}

func (r *Request) validateLabels(p *problems) {
	if len(r.Labels) > MaxLabels {
		p.add("labels", "has %d entries: at most %d are allowed", len(r.Labels), MaxLabels)
	} else {
		for _, k := range slices.Sorted(maps.Keys(r.Labels)) {
			if k == "" || len(k) > MaxToken || !utf8.ValidString(k) {
				p.add("labels", "has the key %s: give 1 to %d bytes", quote(k), MaxToken)
			}
			p.text("labels."+k[:min(len(k), MaxToken)], r.Labels[k])
		}
	}
	switch {
	case len(r.Meta) > MaxMeta:
		p.add("meta", "is %d bytes long: at most %d are echoed", len(r.Meta), MaxMeta)
	case len(r.Meta) > 0 && !json.Valid(r.Meta):
		p.add("meta", "is no JSON")
	}
}

// Validate names everything that is wrong with the settings but for Knobs,
// whose table is in package policy. Zero fields count as their defaults.
func (s Settings) Validate() error {
	var p problems
	s = s.WithDefaults()
	p.whole("schema_version", int64(s.SchemaVersion), SchemaVersion, SchemaVersion)
	p.text("model", s.Model)
	p.token("policy", s.Policy)
	switch s.Mode {
	case ModeOff, ModeShadow, ModeEnforce:
	default:
		p.add("mode", "is %s: give off, shadow or enforce", quote(s.Mode))
	}
	p.whole("block_tokens", int64(s.BlockTokens), 1, MaxBlockTokens)
	p.whole("anchor_tokens", int64(s.AnchorTokens), 1, MaxTokenCount)
	if s.BlockTokens >= 1 && s.AnchorTokens >= 1 && s.AnchorTokens < s.BlockTokens {
		p.add("anchor_tokens", "is %d and block_tokens %d: give at least one block", s.AnchorTokens, s.BlockTokens)
	}
	between := func(field string, v Duration, lo, hi time.Duration) {
		if v.D() < lo || v.D() > hi {
			p.add(field, "is %v: give %v to %v", v, lo, hi)
		}
	}
	between("deadline", s.Deadline, time.Second, MaxDeadline.D())
	between("attempt_timeout", s.AttemptTimeout, time.Second, MaxDeadline.D())
	between("results_keep", s.ResultsKeep, dupWindow, 90*24*time.Hour)
	p.whole("max_attempts", int64(s.MaxAttempts), 1, MaxAttemptsLimit)
	p.whole("prefetch", int64(s.Prefetch), -1, 4096)
	p.whole("partials_every", int64(s.PartialsEvery), 0, MaxTokenCount)
	const maxJobs = 10_000
	if len(s.JobWeights) > maxJobs {
		p.add("job_weights", "has %d jobs: at most %d are allowed", len(s.JobWeights), maxJobs)
	} else {
		for _, job := range slices.Sorted(maps.Keys(s.JobWeights)) {
			w := s.JobWeights[job]
			field := "job_weights." + job[:min(len(job), MaxToken)]
			p.token(field, job)
			p.real(field, &w, 0, 1e6, true)
		}
	}
	const maxServers = 1000
	if len(s.Servers) > maxServers {
		p.add("servers", "has %d entries: at most %d are allowed", len(s.Servers), maxServers)
		return errors.Join(p...)
	}
	seen := map[string]bool{}
	for i, v := range s.Servers {
		field := fmt.Sprintf("servers[%d]", i)
		p.token(field+".name", v.Name)
		p.text(field+".model", v.Model)
		p.whole(field+".slots", int64(v.Slots), 1, 1<<20)
		p.whole(field+".capacity_tokens", v.CapacityTokens, 0, 1<<42)
		if seen[v.Name] {
			p.add(field+".name", "is %s again: name each server once", quote(v.Name))
		}
		seen[v.Name] = true
	}
	return errors.Join(p...)
}
