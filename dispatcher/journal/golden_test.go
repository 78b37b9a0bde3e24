package journal_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/rollbus/rollbus/dispatcher/journal"
)

// goldens are journals of every shape that was ever written. They are never
// made anew: a program that reads them otherwise does not read old journals.
//
//	v1             frames without checkpoints
//	v1-checkpoints frames with them
var goldens = map[string]map[string]int{
	"v1": {"Answered": 11, "BindAnswer": 5, "Contact": 62, "DeleteAnswer": 4, "DispatcherPut": 28, "EnginePut": 16, "FetchDone": 15, "Fetched": 5, "Jobs": 32,
		"ReservationGone": 16, "ReservationPut": 17, "RetryAnswer": 4, "ServerTime": 63, "Tick": 615, "ViewSwap": 6, "decisions": 5},
	"v1-checkpoints": {"Answered": 11, "BindAnswer": 5, "Contact": 62, "DeleteAnswer": 4, "DispatcherPut": 28, "EnginePut": 16, "FetchDone": 15, "Fetched": 5, "Jobs": 32,
		"ReservationGone": 16, "ReservationPut": 17, "RetryAnswer": 4, "ServerTime": 63, "Tick": 615, "ViewSwap": 7, "decisions": 5, "checkpoints": 2},
}

func golden(t *testing.T, name string) *journal.Journal {
	t.Helper()
	file := filepath.Join("testdata", name+".bundle")
	if _, err := os.Stat(file); errors.Is(err, os.ErrNotExist) && os.Getenv("NEW_GOLDEN") == name {
		o := journal.Options{MaxAge: 20 * time.Second, CheckpointAge: 12 * time.Second, CheckpointExact: true}
		var b bytes.Buffer
		if _, err := journal.WriteBundle(&b, journal.Manifest{Pool: "p", Program: "test"}, journal.Slice(recorded(t, 1, 12, 2, o)[0])); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, b.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	m, frames, err := journal.ReadBundle(bytes.NewReader(b))
	if err != nil || m.Pool != "p" {
		t.Fatalf("%+v, %v", m, err)
	}
	js, problems := journal.Split(frames)
	if len(js) != 1 || len(problems) > 0 {
		t.Fatalf("%d journals, problems %v", len(js), problems)
	}
	return js[0]
}

func TestAJournalOfEveryVersionIsReadForEver(t *testing.T) {
	for name, want := range goldens {
		j := golden(t, name)
		r, err := journal.NewReader(j)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		got := map[string]int{}
		for {
			s, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			got[journal.Name(s.Event)]++
			got["decisions"] += len(s.Decisions)
			if r.Mark() != nil {
				got["checkpoints"]++
			}
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: %s", name, d)
		}
		// A later core may decide otherwise: then that is listed, to the end.
		rep, err := journal.Replay(j, journal.ReplayOptions{GoOn: true})
		if err != nil || rep.Incomplete != "" || rep.TailMissing || fmt.Sprint(rep.Decisions) != fmt.Sprint(want["decisions"]) {
			t.Errorf("%s: %+v %v", name, rep, err)
		}
	}
}

func TestACheckpointOfEveryVersionIsRestoredForEver(t *testing.T) {
	j := golden(t, "v1-checkpoints")
	frames := j.Frames()
	at := checkpoints(t, frames)
	if len(at) == 0 {
		t.Fatal("it has none")
	}
	for _, a := range at {
		rep := replayed(t, frames[a:], journal.ReplayOptions{GoOn: true})
		if rep.Events == 0 || rep.Unverified != 0 {
			t.Errorf("the checkpoint in frame %d could not be restored: %+v", a, rep)
		}
	}
}
