package telemetry_test

import (
	"bytes"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/rollbus/rollbus/workeragent/telemetry"
)

func parse(t *testing.T, lines ...string) telemetry.Sample {
	t.Helper()
	s, _, err := telemetry.ParseMetrics([]byte(strings.Join(lines, "\n")))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestMissingSeriesAreUnknownNotZero(t *testing.T) {
	s := parse(t, `vllm:num_requests_running{engine="0"} 3`)
	r := s.Ranks[0]
	if r.Waiting != nil || r.KVUsage != nil || r.KVCapacityTokens != nil || r.PreemptionsTotal != nil || s.Complete() {
		t.Errorf("a lone gauge reads as %+v, complete %v", r, s.Complete())
	}
}

func TestABadLineCostsNobodyElse(t *testing.T) {
	s := parse(t, `vllm:num_requests_running{engine="0} 3`, `}{`, `vllm:num_requests_waiting`, `vllm:num_requests_running{engine="0"} 4 1700000000000`,
		`vllm:num_requests_waiting{engine="0",x="a\"}b\\\n"} 5 # {trace_id="1"} 1`)
	diff(t, "running", ptr(4), s.Ranks[0].Running)
	diff(t, "waiting", ptr(5), s.Ranks[0].Waiting)
	if s.BadLines != 3 {
		t.Errorf("%d bad lines, want 3", s.BadLines)
	}
}

func TestImpossibleNumbersBecomeUnknownAndAreNamed(t *testing.T) {
	for name, line := range map[string]string{
		"negative":           `vllm:num_requests_waiting{engine="0"} -1`,
		"half a request":     `vllm:num_requests_waiting{engine="0"} 1.5`,
		"beyond belief":      `vllm:num_requests_waiting{engine="0"} 1e12`,
		"infinite":           `vllm:num_requests_waiting{engine="0"} +Inf`,
		"usage in per cent":  `vllm:kv_cache_usage_perc{engine="0"} 93`,
		"negative usage":     `vllm:kv_cache_usage_perc{engine="0"} -0.5`,
		"rank out of range":  `vllm:num_requests_waiting{engine="70000"} 1`,
		"rank is a word":     `vllm:num_requests_waiting{engine="core-0"} 1`,
		"told twice":         "vllm:num_requests_waiting{model_name=\"a\"} 1\nvllm:num_requests_waiting{model_name=\"b\"} 2",
		"counter below zero": `vllm:generation_tokens_total{engine="0"} -3`,
	} {
		t.Run(name, func(t *testing.T) {
			s := parse(t, `vllm:num_requests_running{engine="0"} 3`, line)
			r := s.Ranks[0]
			if len(s.Problems) != 1 || s.Complete() {
				t.Errorf("problems %v, complete %v", s.Problems, s.Complete())
			}
			if r.Waiting != nil || r.KVUsage != nil || r.GenerationTokens != nil {
				t.Errorf("the number was kept: %+v", r)
			}
		})
	}
}

func TestNaNIsUnknownAndNoError(t *testing.T) {
	s := parse(t, `vllm:num_requests_running{engine="0"} NaN`, `vllm:kv_cache_usage_perc{engine="0"} nan`)
	if r := s.Ranks[0]; r.Running != nil || r.KVUsage != nil || len(s.Problems) != 0 || s.Complete() {
		t.Errorf("NaN reads as %+v, problems %v", r, s.Problems)
	}
}

func TestSeveralAPIServersAreOneNumber(t *testing.T) {
	s := parse(t, `ray_vllm:num_requests_running{engine="1",pid="7"} 3`, `ray_vllm:num_requests_running{engine="1",pid="8"} 9`,
		`ray_vllm:num_requests_running{engine="1",pid="9"} 0`)
	if len(s.Ranks) != 1 || s.Ranks[0].Rank != 1 || *s.Ranks[0].Running != 9 || len(s.Problems) != 0 {
		t.Errorf("got %+v %v", s.Ranks, s.Problems)
	}
	if s.Complete() {
		t.Error("rank 1 without rank 0 counts as complete")
	}
}

func TestASleepingEngineIsNotAwake(t *testing.T) {
	s := parse(t, `vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1`, `vllm:engine_sleep_state{engine="1",sleep_state="awake"} 0`,
		`vllm:engine_sleep_state{engine="1",sleep_state="discard_all"} 1`)
	diff(t, "awake", ptr(false), s.Awake)
}

// scenario P14
func TestTensorParallelCopiesAreNotSummed(t *testing.T) {
	s := parse(t, `sglang:num_running_reqs{tp_rank="0",dp_rank="0"} 5`, `sglang:num_running_reqs{tp_rank="1",dp_rank="0"} 5`,
		`sglang:num_running_reqs{tp_rank="0",dp_rank="1"} 7`, `sglang:num_running_reqs{tp_rank="1",dp_rank="1"} 6`, `sglang:num_running_reqs{tp_rank="0"} 12`)
	if len(s.Ranks) != 2 || *s.Ranks[0].Running != 5 || *s.Ranks[1].Running != 7 {
		t.Errorf("got %+v", s.Ranks)
	}
}

func TestPriorityBucketsAreSummedOnlyWithoutTheirTotal(t *testing.T) {
	s := parse(t, `sglang_num_queue_reqs{priority="1"} 2`, `sglang_num_queue_reqs{priority="2"} 3`,
		`sglang_num_running_reqs{priority=""} 4`, `sglang_num_running_reqs{priority="1"} 3`)
	diff(t, "waiting", ptr(5), s.Ranks[0].Waiting)
	diff(t, "running", ptr(4), s.Ranks[0].Running)
}

func TestARoutersExpositionIsRefused(t *testing.T) {
	_, _, err := telemetry.ParseMetrics([]byte(`sglang:num_running_reqs{worker_addr="http://a:1"} 4`))
	if !errors.Is(err, telemetry.ErrRouter) {
		t.Errorf("got %v", err)
	}
	if _, _, err := telemetry.ParseMetrics([]byte("<html>nginx</html>\ngo_goroutines 3\n")); !errors.Is(err, telemetry.ErrNoSeries) {
		t.Errorf("a page without series: %v", err)
	}
}

// TestGoodTextReadsAsTheLibraryReadsIt compares with the general parser on
// text that it can read.
func TestGoodTextReadsAsTheLibraryReadsIt(t *testing.T) {
	files, _ := filepath.Glob("testdata/*.prom")
	if len(files) == 0 {
		t.Fatal("no fixtures")
	}
	for _, f := range files {
		text := read(t, f)
		p := expfmt.NewTextParser(model.UTF8Validation)
		families, err := p.TextToMetricFamilies(bytes.NewReader(text))
		if err != nil {
			t.Fatal(f, err)
		}
		s, _, err := telemetry.ParseMetrics(text)
		if err != nil {
			t.Fatal(err)
		}
		byRank := map[string]telemetry.Rank{}
		for _, r := range s.Ranks {
			byRank[itoa(r.Rank)] = r
		}
		for name, pick := range map[string]func(telemetry.Rank) *int{
			"vllm:num_requests_running": func(r telemetry.Rank) *int { return r.Running },
			"vllm:num_requests_waiting": func(r telemetry.Rank) *int { return r.Waiting },
		} {
			for _, m := range families[name].GetMetric() {
				rank := "0"
				for _, l := range m.GetLabel() {
					if l.GetName() == "engine" {
						rank = l.GetValue()
					}
				}
				if got := pick(byRank[rank]); got == nil || float64(*got) != m.GetGauge().GetValue() {
					t.Errorf("%s %s rank %s: got %v, library %v", f, name, rank, got, m.GetGauge().GetValue())
				}
			}
		}
	}
}

func FuzzMetrics(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.prom")
	for _, name := range files {
		f.Add(read(f, name))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s, _, err := telemetry.ParseMetrics(b)
		if err == nil {
			checkSane(t, s)
		}
	})
}

func checkSane(t *testing.T, s telemetry.Sample) {
	t.Helper()
	last := -1
	for _, r := range s.Ranks {
		if r.Rank <= last {
			t.Fatalf("ranks out of order: %+v", s.Ranks)
		}
		last = r.Rank
		for _, n := range []*int{r.Running, r.Waiting, r.MaxRunning} {
			if n != nil && *n < 0 {
				t.Fatalf("negative count in %+v", r)
			}
		}
		if u := r.KVUsage; u != nil && !(*u >= 0 && *u <= 1.01) {
			t.Fatalf("usage %v", *u)
		}
	}
	tr := telemetry.NewTracker(telemetry.TrackerConfig{})
	tr.Observe(s, 0, 0)
	if r := tr.Observe(s, 1e9, 0); r.Restarted || r.Preempted != 0 {
		t.Fatalf("the same sample again: %+v", r)
	}
}

func BenchmarkParseMetrics(b *testing.B) {
	text := read(b, "testdata/llmd-sim-loaded.prom")
	b.ReportAllocs()
	for b.Loop() {
		_, _, _ = telemetry.ParseMetrics(text)
	}
}
