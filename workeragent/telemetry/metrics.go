package telemetry

import "strings"

// Dialect is whose exposition it is.
type Dialect string

// Dialects.
const (
	DialectVLLM   Dialect = "vllm"
	DialectSGLang Dialect = "sglang"
	DialectLlama  Dialect = "llamacpp"
)

// prefixes of series names. Ray Serve puts ray_ before them, and some exporters
// turn the colon into an underscore.
var prefixes = []struct {
	prefix  string
	dialect Dialect
}{
	{"vllm:", DialectVLLM}, {"ray_vllm:", DialectVLLM}, {"vllm_", DialectVLLM}, {"ray_vllm_", DialectVLLM},
	{"sglang:", DialectSGLang}, {"sglang_", DialectSGLang}, {"ray_sglang:", DialectSGLang},
	{"llamacpp:", DialectLlama}, {"llamacpp_", DialectLlama},
}

// split takes the prefix off a series name.
func split(name string) (Dialect, string, bool) {
	for _, p := range prefixes {
		if rest, ok := strings.CutPrefix(name, p.prefix); ok {
			return p.dialect, rest, true
		}
	}
	return "", "", false
}

// ParseMetrics reads the exposition of one engine, whichever kind it is.
func ParseMetrics(text []byte) (Sample, Dialect, error) {
	var (
		s      Sample
		v      = vllmMetrics{s: &s}
		g      = sglangMetrics{s: &s}
		l      = llamaMetrics{s: &s}
		counts = map[Dialect]int{}
		router bool
	)
	s.BadLines = scan(text, func(name string, labels []label, value float64) {
		if name == "process_start_time_seconds" && value > 0 {
			s.StartedAt = &value
			return
		}
		d, rest, ok := split(name)
		if !ok || strings.HasSuffix(rest, "_created") {
			return
		}
		if _, ok := get(labels, "worker_addr"); ok {
			router = true
		}
		counts[d]++
		switch d {
		case DialectVLLM:
			v.add(rest, labels, value)
		case DialectSGLang:
			g.add(rest, labels, value)
		case DialectLlama:
			l.add(rest, value)
		}
	})
	if router {
		return Sample{}, "", ErrRouter
	}
	best := Dialect("")
	for _, d := range []Dialect{DialectVLLM, DialectSGLang, DialectLlama} {
		if counts[d] > counts[best] {
			best = d
		}
	}
	switch best {
	case DialectVLLM:
		v.finish()
	case DialectSGLang:
		g.finish()
	case DialectLlama:
		l.finish()
	default:
		return s, "", ErrNoSeries
	}
	s.check()
	return s, best, nil
}
