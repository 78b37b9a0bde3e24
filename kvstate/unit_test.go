package kvstate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"pgregory.net/rapid"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

func TestATimeToLiveIsWrittenInWholeSecondsRoundedUp(t *testing.T) {
	for in, want := range map[time.Duration]string{
		0: "1", time.Nanosecond: "1", time.Second: "1", time.Second + 1: "2", 90 * time.Second: "90",
		1500 * time.Millisecond: "2", 24 * time.Hour: "86400",
	} {
		h := nats.Header{}
		setTTL(h, in)
		if got := h.Get(subjects.HdrTTL); got != want {
			t.Errorf("%v is written %q, want %q", in, got, want)
		}
	}
	for in, want := range map[string]time.Duration{
		"": 0, "90": 90 * time.Second, "1m30s": 90 * time.Second, "2.5s": 2 * time.Second, "never": 0, "x": 0,
		"-1": 0, "99999999999999": 0,
	} {
		if got := ttlOf(nats.Header{subjects.HdrTTL: {in}}); got != want {
			t.Errorf("%q is read as %v, want %v", in, got, want)
		}
	}
}

func TestEveryAnswerOfJetStreamIsOfOneKind(t *testing.T) {
	for _, c := range []struct {
		code, err int
		text      string
		want      error
	}{
		{400, 10071, "wrong last sequence: 17", ErrConflict},
		{400, 10071, "wrong last sequence", ErrBusy},
		{400, 10164, "wrong last sequence", ErrBusy},
		{400, 10201, "atomic publish batch contains duplicate message id", ErrDuplicate},
		{409, 10158, "duplicate message id is in process", ErrUnknown},
		{503, 10008, "JetStream system temporarily unavailable", ErrUnknown},
		{503, 10077, "maximum bytes exceeded", ErrFull},
		{503, 10077, "maximum messages exceeded", ErrFull},
		{503, 10077, "write /nats/1.blk: no space left on device", ErrFull},
		{503, 10077, "message size exceeds maximum allowed", ErrRefused},
		{429, 10167, "too many requests", ErrFull},
		{500, 10047, "insufficient storage resources available", ErrFull},
		{503, 10023, "insufficient resources", ErrFull},
		{400, 10002, "resource limits exceeded for account", ErrFull},
		{500, 10009, "JetStream cluster can not handle request", ErrUnavailable},
		{404, 10059, "stream not found", ErrUnavailable},
		{400, 10054, "message size exceeds maximum allowed", ErrRefused},
		{400, 10166, "per-message TTL is disabled", ErrRefused},
	} {
		var e apiError
		text, err := json.Marshal(map[string]any{"error": map[string]any{"code": c.code, "err_code": c.err, "description": c.text}})
		must(t, err)
		must(t, json.Unmarshal(text, &e))
		t.Run(fmt.Sprintf("%d %s", c.err, c.text), func(t *testing.T) { wantErr(t, e.write(), c.want) })
	}
	if err := (apiError{}).write(); err != nil {
		t.Fatalf("no error is %v", err)
	}
	n, ok := actualSequence("wrong last sequence: 18446744073709551615")
	if !ok || n != 1<<64-1 {
		t.Fatalf("actual sequence %d, %v", n, ok)
	}
}

func TestServerTimeNeverGoesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c ServerClock
		if _, ok := c.Now(); ok {
			t.Fatal("the time is known before the first stamp")
		}
		stamp := time.Date(2031, 1, 1, 0, 0, 0, 0, time.UTC) // far from this machine's clock
		now := func() time.Time {
			n, ok := c.Now()
			if !ok {
				t.Fatal("unknown")
			}
			return n
		}
		c.Observe(stamp)
		if !now().Equal(stamp) {
			t.Fatalf("it is %v, want the stamp %v", now(), stamp)
		}
		wait(time.Minute)
		if want := stamp.Add(time.Minute); !now().Equal(want) {
			t.Fatalf("after a minute it is %v, want %v", now(), want)
		}
		c.Observe(stamp.Add(30 * time.Second)) // stored 30 s ago
		c.Observe(time.Time{})
		c.Observe(stamp.Add(-10 * time.Minute)) // the server's clock stepped back: scenario F12
		if want := stamp.Add(time.Minute); !now().Equal(want) {
			t.Fatalf("after older stamps it is %v, want %v", now(), want)
		}
		c.Observe(stamp.Add(2 * time.Minute)) // a better bound
		wait(time.Second)
		if want := stamp.Add(2*time.Minute + time.Second); !now().Equal(want) {
			t.Fatalf("after a newer stamp it is %v, want %v", now(), want)
		}
	})
}

func wait(d time.Duration) {
	t := time.NewTimer(d)
	<-t.C
}

// The view against a model: what stands is what the last write of each key says,
// unless it ended; sums are those of what stands.
func TestAViewIsWhatItsWritesSay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		clock := new(ServerClock)
		start := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
		clock.Observe(start)
		v := NewReservationView(clock)
		h := v.Handler()
		type model struct {
			r    Reservation
			gone bool
			ends time.Time
		}
		all := map[string]model{}
		var seq uint64
		steps := rapid.IntRange(1, 60).Draw(t, "steps")
		at := start
		for range steps {
			seq++
			engine := rapid.SampledFrom([]string{"e1", "e2"}).Draw(t, "engine")
			id := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "id")
			ttl := rapid.SampledFrom([]time.Duration{0, time.Hour, 10 * time.Hour}).Draw(t, "ttl")
			held := subjects.Held{Engine: engine, Job: "j", ID: id, State: subjects.StateBound, Tokens: rapid.IntRange(0, 9).Draw(t, "tokens")}
			m := model{r: Reservation{Held: held, Revision: seq, Stored: at, TTL: ttl}, ends: endOf(at, ttl)}
			switch rapid.IntRange(0, 5).Draw(t, "what") {
			case 0:
				m.gone = true
				h.Gone(Marker{Released: subjects.Released{Engine: engine, Job: "j", ID: id}, Revision: seq, Stored: at, TTL: ttl})
			case 1:
				m.r.State = subjects.StateReturned
				h.Put(m.r)
			case 2:
				at = at.Add(2 * time.Hour)
				clock.Observe(at)
				continue
			case 3:
				var rs []Reservation
				var ms []Marker
				for k, old := range all {
					switch {
					case !old.ends.IsZero() && !at.Before(old.ends):
						delete(all, k) // the server has dropped it
					case old.gone:
						ms = append(ms, Marker{Released: subjects.Released{Engine: old.r.Engine, Job: "j", ID: old.r.ID}, Revision: old.r.Revision, Stored: old.r.Stored, TTL: old.r.TTL})
					default:
						rs = append(rs, old.r)
					}
				}
				h.Swap(rs, ms)
				continue
			default:
				h.Put(m.r)
			}
			all[engine+id] = m
		}
		want := map[string]EngineLoad{}
		standing := 0
		for _, m := range all {
			// The estimate runs on with this machine's clock: by far less than an hour.
			if !m.ends.IsZero() && !at.Before(m.ends) {
				continue
			}
			l := want[m.r.Engine]
			l.Last = max(l.Last, m.r.Revision)
			switch {
			case m.gone:
			case m.r.State == subjects.StateReturned:
				l.Returned++
				standing++
			default:
				l.Bound++
				l.Tokens += int64(m.r.Tokens)
				standing++
			}
			want[m.r.Engine] = l
		}
		got := v.Engines()
		for _, e := range []string{"e1", "e2"} {
			if got[e] != want[e] {
				t.Fatalf("engine %s has %+v, want %+v", e, got[e], want[e])
			}
		}
		if n := len(v.Snapshot()); n != standing {
			t.Fatalf("%d reservations in the view, want %d", n, standing)
		}
	})
}

func TestOpenNamesEveryBadOption(t *testing.T) {
	n := natstest.Server(t)
	pool, err := subjects.NewPool("p")
	must(t, err)
	if _, err := Open(nil, pool); !errors.Is(err, ErrBadOption) {
		t.Errorf("no connection: %v", err)
	}
	nc := n.Conn(t)
	if _, err := Open(nc, subjects.Pool{}); !errors.Is(err, ErrBadOption) {
		t.Errorf("no pool: %v", err)
	}
	_, err = Open(nc, pool, Timeout(0), Heartbeat(time.Hour), Logger(nil), Clock(nil))
	var joined interface{ Unwrap() []error }
	if !errors.Is(err, ErrBadOption) || !errors.As(err, &joined) || len(joined.Unwrap()) != 4 {
		t.Errorf("four bad options: %v", err)
	}
}

func TestAFollowerEndsWithItsConnection(t *testing.T) {
	e := single(t, jetstream.MemoryStorage)
	nc := e.node.Conn(t)
	f := e.watch(t, e.storeOn(t, nc), "closed", "").wait(t)
	nc.Close()
	natstest.Eventually(t, within, "the follower ended", func() bool {
		select {
		case <-f.ended:
			return true
		default:
			return false
		}
	})
	wantErr(t, f.err, ErrUnavailable)
}

func TestAFollowerWaitsForItsStreamAndNoticesANewOne(t *testing.T) {
	n := natstest.Server(t)
	e := &env{node: n, nc: n.Conn(t), layout: subjects.Layout{Storage: jetstream.MemoryStorage, Budget: 128 << 20}}
	pool, err := subjects.NewPool("p")
	must(t, err)
	e.pool = pool
	e.store = e.storeOn(t, e.nc)
	f := e.watch(t, e.store, "early", "")
	e.ensure(t)
	f.wait(t)
	e.bind(t, "e", "a", 1)
	natstest.Eventually(t, within, "the key", func() bool { return len(f.keys()) == 1 })
	// Somebody deletes the stream and it is made again: nothing of the old one stays.
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	must(t, e.store.JS().DeleteStream(ctx, e.store.reservationsStream()))
	e.ensure(t)
	b := e.bind(t, "e", "b", 1)
	f.shows(t, keyOf("e", "b", 1, b))
}

// A whole day of a reservation's life in fake time: an embedded server inside a
// bubble, its TTLs included.
func TestAReservationThatNobodyRetiresIsReclaimedADayAfterItsDeadline(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		n := natstest.Server(t, natstest.InProcess(), natstest.Dir(dir))
		e := &env{node: n, nc: n.Conn(t), layout: subjects.Layout{Storage: jetstream.MemoryStorage, Budget: 128 << 20}}
		pool, err := subjects.NewPool("p")
		must(t, err)
		e.pool = pool
		e.store = e.storeOn(t, e.nc, Heartbeat(time.Minute))
		e.ensure(t)
		h := held("e", "a", 1) // a minute left
		_, err = e.store.Bind(t.Context(), Bind{Held: h, Body: []byte("x")})
		must(t, err)
		wait(24*time.Hour + 30*time.Second)
		_, err = e.store.Reservation(t.Context(), "e", "e", "a")
		must(t, err)
		wait(time.Minute)
		_, err = e.store.Reservation(t.Context(), "e", "e", "a")
		wantErr(t, err, ErrGone)
	})
}

// What plainAck does not take is for the decoder; what it takes must be what
// the decoder reads.
func TestAnAcknowledgementIsReadQuicklyOnlyWhenItIsPlain(t *testing.T) {
	for in, want := range map[string]uint64{
		`{"stream":"KV_x","seq":7}`: 7, `{"stream":"S","seq":9999999999999999999}`: 9999999999999999999,
		`{"stream":"S","seq":0}`: 0, `{"stream":"","seq":7}`: 0, `{"stream":"S","seq":}`: 0, `{"stream":"S","seq":7`: 0,
		`{"stream":"S","seq":7}}`: 0, `{"stream":"S","seq":-7}`: 0, `{"stream":"S","seq":18446744073709551616}`: 0,
		`{"stream":"S","seq":7,"duplicate":true}`: 0, `{"stream":"S","domain":"d","seq":7}`: 0,
		`{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 8"},"stream":"S","seq":0}`: 0,
		`{"stream":"S\",\"seq\":3","seq":7}`: 0, ``: 0, `{}`: 0,
	} {
		seq, ok := plainAck([]byte(in))
		if ok != (want > 0) || ok && seq != want {
			t.Errorf("%s is read as %d, %v: want %d", in, seq, ok, want)
		}
		var slow struct{ Seq uint64 }
		if ok && (json.Unmarshal([]byte(in), &slow) != nil || slow.Seq != seq) {
			t.Errorf("%s is read as %d and decodes as %d", in, seq, slow.Seq)
		}
	}
}
