package faults

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// A server that crashes forgets that a message was dropped because a newer one
// of its subject came, if that newer one has expired meanwhile: retired
// reservations come back, bound. Seen with nats-server 2.15.3.
//
// scenario F8
// scenario B11
func TestReservationsThatACrashedServerBringsBackAreRetiredAgain(t *testing.T) {
	t.Parallel()
	const keys = 20
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	name, err := subjects.NewPool(poolName)
	if err != nil {
		t.Fatal(err)
	}
	dir, crashed := t.TempDir(), t.TempDir()
	before := natstest.Server(t, natstest.Dir(dir), natstest.SyncAlways())
	store, err := kvstate.Open(before.Conn(t), name)
	if err != nil {
		t.Fatal(err)
	}
	if err := subjects.Ensure(ctx, store.JS(), name, subjects.Layout{Budget: 256 << 20, LivenessTTL: scaled(subjects.DefaultLivenessTTL)}); err != nil {
		t.Fatal(err)
	}
	var last uint64
	for n := range keys {
		id := fmt.Sprint(n)
		last, err = store.Bind(ctx, kvstate.Bind{
			Held:     subjects.Held{Engine: "e1", Job: "j", ID: id, State: subjects.StateBound, Bind: 1, Epoch: "x", Tokens: 100, LeftMS: time.Hour.Milliseconds()},
			Expected: last, TTL: 25 * time.Hour, Body: []byte("{}"),
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := store.Commit(ctx, &subjects.Result{Job: "j", ID: id, Status: subjects.Failed}, subjects.Answer{Bind: 1, Engine: "e1", Epoch: "x"}); err != nil {
			t.Fatal(err)
		}
	}
	// One that lives, as there always is: an emptied block would be dropped whole.
	if _, err := store.Bind(ctx, kvstate.Bind{
		Held: subjects.Held{Engine: "e2", Job: "other", ID: "lease", State: subjects.StateExternal, Bind: 1, Tokens: 1, LeftMS: time.Hour.Milliseconds()}, TTL: time.Hour,
	}); err != nil {
		t.Fatal(err)
	}
	for n := range keys { // released, with markers that expire sooner than in production
		gone := subjects.Released{Engine: "e1", Job: "j", ID: fmt.Sprint(n), Outcome: subjects.OutcomeAnswered, Bind: 1}
		m := &nats.Msg{Subject: name.ReservationSubject(gone.Engine, gone.Job, gone.ID), Header: gone.Header()}
		m.Header.Set(jetstream.MsgTTLHeader, "1")
		if _, err := store.JS().PublishMsg(ctx, m); err != nil {
			t.Fatal(err)
		}
	}
	natstest.Eventually(t, 20*time.Second, "the markers expire", func() bool { return messages(ctx, t, store.JS(), name) == 1 })
	// What a crash leaves is what is on disk now.
	if err := os.CopyFS(filepath.Join(crashed, "jetstream"), os.DirFS(filepath.Join(dir, "jetstream"))); err != nil {
		t.Fatal(err)
	}
	before.Stop()

	after := natstest.Server(t, natstest.Dir(crashed))
	js, err := jetstream.New(after.Conn(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d of %d retired reservations came back", messages(ctx, t, js, name)-1, keys)
	d, err := newProcess(t.TempDir(), "d1", rollbus, []string{"dispatcher", "--name", "d1", "--server", after.URL(), "--pool", poolName, "--timing-scale", fmt.Sprint(scale)},
		[]string{"ROLLBUS_LOG_LEVEL=warn"}, func(name string, err error) { t.Errorf("%s ended by itself: %v", name, err) })
	if err != nil {
		t.Fatal(err)
	}
	if err := d.start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.close)
	kv, err := js.KeyValue(ctx, name.Bucket(subjects.Reservations))
	if err != nil {
		t.Fatal(err)
	}
	natstest.Eventually(t, 30*time.Second, "nothing but the lease is held", func() bool {
		left, err := kv.Keys(ctx)
		return err == nil && len(left) == 1
	})
	for stream, want := range map[string]uint64{name.Retry(): 0, name.Results(): keys} {
		s, err := js.Stream(ctx, stream)
		if err != nil {
			t.Fatal(err)
		}
		if got := s.CachedInfo().State.LastSeq; got != want {
			t.Errorf("the last sequence of %s is %d, not %d: something was run or answered again", stream, got, want)
		}
	}
}

// messages of the reservations bucket.
func messages(ctx context.Context, t *testing.T, js jetstream.JetStream, name subjects.Pool) uint64 {
	t.Helper()
	s, err := js.Stream(ctx, subjects.BucketStream(name.Bucket(subjects.Reservations)))
	if err != nil {
		t.Fatal(err)
	}
	return s.CachedInfo().State.Msgs
}
