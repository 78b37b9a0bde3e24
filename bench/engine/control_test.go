package engine_test

import (
	"strings"
	"testing"

	"github.com/rollbus/rollbus/bench/engine"
)

func TestAbortEndsTheRequestNamedAndAnEmptyListAll(t *testing.T) {
	r := start(t, engine.Config{TimeScale: 20})
	a := r.background(t.Context(), long())
	eventually(t, "it decodes", func() bool { return r.stats().GenerationTokens > 3 })
	r.call("POST", "/abort_requests", m{"request_ids": []string{"cmpl-other"}})
	if r.stats().Running != 1 {
		t.Fatal("another id ended it")
	}
	r.call("POST", "/abort_requests", m{"request_ids": []string{"cmpl-t1"}})
	got := wait(t, "the aborted stream", a)
	if got.reason != "abort" || !got.done || len(got.tokens) == 0 || got.err != nil {
		t.Errorf("aborted: reason %q, done %v, %d tokens, %v", got.reason, got.done, len(got.tokens), got.err)
	}
	b := r.background(t.Context(), long())
	eventually(t, "it runs", func() bool { return r.stats().Running == 1 })
	r.call("POST", "/abort_requests", nil)
	if got := wait(t, "the second", b); got.reason != "abort" {
		t.Errorf("an empty list left it alone: %q", got.reason)
	}
	if s := r.stats(); s.KVUsed != 0 || s.Running != 0 {
		t.Errorf("after the aborts: %+v", s)
	}
}

func TestPauseHoldsAbortsWaitsOrFreezes(t *testing.T) {
	r := start(t, engine.Config{TimeScale: 20})
	a := r.background(t.Context(), long())
	eventually(t, "it runs", func() bool { return r.stats().Running == 1 })

	r.call("POST", "/pause?mode=keep", nil)
	if _, b := r.call("GET", "/is_paused", nil); !strings.Contains(b, "true") {
		t.Errorf("/is_paused: %s", b)
	}
	held := r.background(t.Context(), m{"prompt": "a", "max_tokens": 3, "ignore_eos": true})
	eventually(t, "a new one waits", func() bool { return r.stats().Waiting == 1 })
	eventually(t, "the step in flight has ended", func() bool {
		before := r.stats().GenerationTokens
		return r.stats().GenerationTokens == before
	})
	r.call("POST", "/resume", nil)
	if got := wait(t, "the held request", held); got.reason != "length" {
		t.Errorf("the held request ended %q %v", got.reason, got.err)
	}

	if status, _ := r.call("POST", "/pause?mode=abort", nil); status != 200 {
		t.Errorf("pause: %d", status)
	}
	if got := wait(t, "the running request", a); got.reason != "abort" || len(got.tokens) == 0 {
		t.Errorf("pause abort ended it %q with %d tokens", got.reason, len(got.tokens))
	}
	r.call("POST", "/resume", nil)

	b := r.background(t.Context(), m{"prompt": "a", "max_tokens": 30, "ignore_eos": true})
	eventually(t, "it runs", func() bool { return r.stats().Running == 1 })
	r.call("POST", "/pause?mode=wait", nil)
	if s := r.stats(); s.Running != 0 {
		t.Errorf("pause wait answered with %d running", s.Running)
	}
	if got := wait(t, "what was waited for", b); got.reason != "length" {
		t.Errorf("it ended %q", got.reason)
	}
	r.call("POST", "/resume", nil)
	if status, _ := r.call("POST", "/pause?mode=quickly", nil); status != 400 {
		t.Errorf("an unknown mode: %d", status)
	}
}

func TestSleepDropsTheCacheAndHoldsUntilWoken(t *testing.T) {
	r := start(t, fast())
	body := m{"prompt": ids(64), "max_tokens": 2}
	r.ok("/v1/completions", body)
	r.call("POST", "/sleep?level=2", nil)
	if got := r.metrics(); got["vllm:engine_sleep_state/0,sleep_state=awake"] != 0 || got["vllm:engine_sleep_state/0,sleep_state=discard_all"] != 1 {
		t.Errorf("asleep: %v", got)
	}
	if _, b := r.call("GET", "/is_sleeping", nil); !strings.Contains(b, "true") {
		t.Errorf("/is_sleeping: %s", b)
	}
	held := r.background(t.Context(), m{"prompt": ids(64), "max_tokens": 2, "stream_options": m{"include_usage": true}})
	eventually(t, "a new one waits", func() bool { return r.stats().Waiting == 1 })
	r.call("POST", "/wake_up", nil)
	got := wait(t, "the held request", held)
	if u := got.chunks[len(got.chunks)-1].Usage; u == nil || u.Details.Cached != 0 {
		t.Errorf("after the sleep: %+v", u)
	}
	if got := r.ok("/v1/completions", body); got.Usage.Details.Cached == 0 {
		t.Error("nothing cached before the reset")
	}
	r.call("POST", "/reset_prefix_cache", nil)
	if got := r.ok("/v1/completions", body); got.Usage.Details.Cached != 0 {
		t.Error("the reset left the cache")
	}
}

func TestTheWeightVersionIsWhatItWasToldLast(t *testing.T) {
	r := start(t, engine.Config{WeightVersion: 3})
	if _, b := r.call("GET", "/weight_info", nil); !strings.Contains(b, `"3"`) {
		t.Errorf("at the start: %s", b)
	}
	r.call("POST", "/update_weight_version", m{"new_version": "4"})
	if _, b := r.call("GET", "/weight_info", nil); !strings.Contains(b, `"4"`) {
		t.Errorf("after the update: %s", b)
	}
}
