package affinity

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/rollbus/rollbus/workeragent/telemetry"
)

// Sources of hits.
const (
	sourceVLLM   = "vllm: prefix cache hits, tokens, of /metrics"
	sourceSGLang = `sglang: realtime_tokens_total{mode="prefill_cache"} of /metrics`
	sourceLlama  = "llamacpp: prompt tokens from cache, of /metrics"
	sourceSummed = "cached_tokens of its answers, summed"
)

const (
	readWithin   = 10 * time.Second
	maxMetrics   = 16 << 20
	steadyEvery  = 150 * time.Millisecond // between two readings that must agree
	steadyWithin = 5 * time.Second
)

var errNoCounter = errors.New("no prefix cache counter")

// hits reads an engine's counter, summed over its ranks, and says where it stands.
func hits(ctx context.Context, c *http.Client, base string) (n int64, source string, err error) {
	ctx, cancel := context.WithTimeout(ctx, readWithin)
	defer cancel()
	at, err := url.JoinPath(base, "metrics")
	if err != nil {
		return 0, "", fmt.Errorf("engine address %q: %w", base, err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return 0, "", err
	}
	resp, err := c.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusNotFound {
		return 0, "", fmt.Errorf("%s: %s: %w", at, resp.Status, errNoCounter)
	}
	if resp.StatusCode != http.StatusOK {
		return 0, "", fmt.Errorf("%s: %s", at, resp.Status)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxMetrics))
	if err != nil {
		return 0, "", fmt.Errorf("%s: %w", at, err)
	}
	n, source, err = parseHits(text)
	if err != nil {
		return 0, "", fmt.Errorf("%s: %w", at, err)
	}
	return n, source, nil
}

func parseHits(text []byte) (n int64, source string, err error) {
	s, dialect, err := telemetry.ParseMetrics(text)
	if err != nil {
		return 0, "", err
	}
	for i := range s.Ranks {
		if s.Ranks[i].PrefixHitTokens == nil {
			return 0, "", errNoCounter
		}
		n += *s.Ranks[i].PrefixHitTokens
	}
	if len(s.Ranks) == 0 {
		return 0, "", errNoCounter
	}
	switch dialect {
	case telemetry.DialectVLLM:
		return n, sourceVLLM, nil
	case telemetry.DialectSGLang:
		return n, sourceSGLang, nil
	}
	return n, sourceLlama, nil
}

// find learns where an engine's hits are read.
func (e *Engine) find(ctx context.Context, c *http.Client) error {
	_, source, err := hits(ctx, c, e.URL)
	switch {
	case err == nil:
		e.Source = source
	case errors.Is(err, errNoCounter) && strings.HasPrefix(e.Kind, "sglang"):
		e.Source, e.summed = sourceSummed, true
	default:
		return fmt.Errorf("engine %s: %w", e.Name, err)
	}
	return nil
}

// steady reads every engine's counter until two readings in a row agree: engines
// publish behind what they do.
func (v *run) steady(ctx context.Context) ([]int64, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, steadyWithin, errors.New("the engines' counters do not come to rest: is there other traffic?"))
	defer cancel()
	var last []int64
	for {
		now := make([]int64, len(v.report.Engines))
		same := last != nil
		for i := range v.report.Engines {
			e := &v.report.Engines[i]
			if e.summed {
				continue
			}
			n, _, err := hits(ctx, v.http, e.URL)
			if err != nil {
				if ctx.Err() != nil {
					err = context.Cause(ctx)
				}
				return nil, fmt.Errorf("engine %s: %w", e.Name, err)
			}
			now[i] = n
			same = same && n == last[i]
		}
		if same {
			return now, nil
		}
		last = now
		if err := pause(ctx, steadyEvery); err != nil {
			return nil, err
		}
	}
}

// pause waits, at most until ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
