package telemetry_test

import (
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/rollbus/rollbus/workeragent/telemetry"
)

func TestBrokenLoadsGiveNoHeadroom(t *testing.T) {
	full := `"num_waiting_reqs":0,"num_used_tokens":10,"max_total_num_tokens":100,"max_running_requests":8`
	for name, body := range map[string]string{
		"a rank twice":        `{"loads":[{"dp_rank":0,"num_running_reqs":1,` + full + `},{"dp_rank":0,"num_running_reqs":1,` + full + `}]}`,
		"two without a rank":  `{"loads":[{"num_running_reqs":1,` + full + `},{"num_running_reqs":1,` + full + `}]}`,
		"negative":            `{"loads":[{"num_running_reqs":-1,` + full + `}]}`,
		"a word":              `{"loads":[{"num_running_reqs":"1",` + full + `}]}`,
		"more than its slots": `{"loads":[{"num_running_reqs":9,` + full + `}]}`,
		"used over capacity":  `{"loads":[{"num_running_reqs":1,"num_waiting_reqs":0,"num_used_tokens":120,"max_total_num_tokens":100}]}`,
		"total under used":    `{"loads":[{"num_running_reqs":1,"num_total_tokens":5,` + full + `}]}`,
		"fewer than it says":  `{"dp_rank_count":2,"loads":[{"num_running_reqs":1,` + full + `}]}`,
		"more than it says":   `{"dp_rank_count":1,"loads":[{"dp_rank":0,"num_running_reqs":1,` + full + `},{"dp_rank":1,"num_running_reqs":1,` + full + `}]}`,
		"a gap in the ranks":  `{"loads":[{"dp_rank":0,"num_running_reqs":1,` + full + `},{"dp_rank":2,"num_running_reqs":1,` + full + `}]}`,
		"a prefill engine":    `{"loads":[{"num_running_reqs":1,"disaggregation":{"mode":"prefill"},` + full + `}]}`,
		"nobody":              `{"loads":[]}`,
	} {
		s, err := telemetry.ParseLoads([]byte(body))
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if s.Complete() {
			t.Errorf("%s: complete: %+v", name, s)
		}
	}
	s, err := telemetry.ParseLoads([]byte(`{"loads":[{"num_running_reqs":1,` + full + `}]}`))
	if err != nil || !s.Complete() {
		t.Errorf("a sound answer: %+v %v", s, err)
	}
}

func TestHintsCompleteButNeverOverride(t *testing.T) {
	s, _ := telemetry.ParseGetLoad(read(t, "testdata/get_load-sglang-dp2.json"))
	s.Fill(telemetry.Hints{Ranks: ptr(2), MaxRunning: ptr(32), CapacityTokens: ptr(int64(1 << 20))})
	if !s.Complete() || *s.Ranks[0].MaxRunning != 32 || *s.Ranks[1].KVCapacityTokens != 1<<20 {
		t.Errorf("got %+v", s)
	}
	s.Fill(telemetry.Hints{Ranks: ptr(4), MaxRunning: ptr(64)})
	if s.Complete() || *s.Ranks[0].MaxRunning != 32 {
		t.Errorf("a rank is missing, or slots were overridden: %+v", s)
	}
	silent, _ := telemetry.ParseLoads(read(t, "testdata/loads-sglang-unpublished-dp2.json"))
	silent.Fill(telemetry.Hints{MaxRunning: ptr(8), CapacityTokens: ptr(int64(100))})
	if silent.Ranks[0].MaxRunning != nil || silent.Complete() {
		t.Errorf("a rank that published nothing was completed: %+v", silent.Ranks)
	}
}

func TestABodyThatIsNoJSONIsAnError(t *testing.T) {
	html := []byte("<html>502</html>")
	_, e1 := telemetry.ParseLoads(html)
	_, e2 := telemetry.ParseGetLoad(html)
	_, e3 := telemetry.ParseServerInfo(html)
	_, e4 := telemetry.ParseEventSources(html)
	_, e5 := telemetry.ParseModels(html)
	_, e6 := telemetry.ParseSlots(html)
	_, e7 := telemetry.ParseProps(html)
	_, e8 := telemetry.ParseServerInfo([]byte(`{}`))
	_, e9 := telemetry.ParseLoads([]byte(`{}`))
	for i, err := range []error{e1, e2, e3, e4, e5, e6, e7, e8, e9} {
		if !errors.Is(err, telemetry.ErrShape) {
			t.Errorf("parser %d: %v", i+1, err)
		}
	}
}

func TestASilentAdvertisedRankKeepsTheBoardIncomplete(t *testing.T) {
	var b telemetry.Board
	stat := telemetry.LoadStat{Source: telemetry.SourceLoadStat, Running: 1, Capacity: ptr(int64(100)), InPayload: ptr(int64(0))}
	b.Put(0, 5, stat, 0)
	s, _ := b.Sample(time.Second, ptr(2))
	if s.Complete() {
		t.Error("one of two ranks counts as complete")
	}
	other := stat
	other.InPayload = ptr(int64(1))
	if _, ok := b.Put(0, 6, other, 0); ok {
		t.Error("a message of rank 1 was taken on the socket of rank 0")
	}
	b.Put(1, 9, other, 2*time.Second)
	if s, age := b.Sample(2*time.Second, ptr(2)); !s.Complete() || age != 2*time.Second {
		t.Errorf("both ranks: %+v, age %v", s, age)
	}
	if s, _ := b.Sample(4*time.Second, ptr(2)); s.Complete() || len(s.Ranks) != 1 {
		t.Errorf("rank 0 is 4 s old and still counts: %+v", s)
	}
	if restarted, ok := b.Put(1, 0, other, 3*time.Second); !restarted || !ok {
		t.Error("a sequence that fell back is no restart")
	}
	b.Remove(1)
	if s, _ := b.Sample(3*time.Second, ptr(2)); len(s.Ranks) != 1 || s.Ranks[0].Rank != 0 {
		t.Errorf("a removed rank is still there: %+v", s.Ranks)
	}
}

func FuzzLoads(f *testing.F) {
	for _, pattern := range []string{"testdata/*load*.json", "testdata/server*.json", "testdata/kv_event*.json", "testdata/llamacpp-*.json"} {
		files, _ := filepath.Glob(pattern)
		for _, name := range files {
			f.Add(read(f, name))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, parse := range []func([]byte) (telemetry.Sample, error){telemetry.ParseLoads, telemetry.ParseGetLoad} {
			if s, err := parse(b); err == nil {
				checkSane(t, s)
			}
		}
		_, _ = telemetry.ParseServerInfo(b)
		_, _ = telemetry.ParseEventSources(b)
		_, _ = telemetry.ParseModels(b)
		_, _ = telemetry.ParseSlots(b)
		_, _ = telemetry.ParseProps(b)
	})
}

func FuzzLoadStat(f *testing.F) {
	f.Add(unhex(f, "96a84c6f6164537461740703cd0400cd200002"))
	f.Add(unhex(f, "83a974696d657374616d70cb41dac30fb4600000b46d61785f746f74616c5f6e756d5f746f6b656e73ce0006c000b46d61785f72756e6e696e675f7265717565737473cd0100"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if l, err := telemetry.ParseLoadStat(b); err == nil {
			r, problems := l.Rank(1)
			checkSane(t, telemetry.Sample{Ranks: []telemetry.Rank{r}, Problems: problems})
		}
	})
}
