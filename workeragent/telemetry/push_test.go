package telemetry_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"sync"
	"testing"
	"time"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/workeragent/kvevents/zmq"
	"github.com/rollbus/rollbus/workeragent/telemetry"
)

// loadPublisher publishes load messages to whoever subscribes.
type loadPublisher struct {
	addr string
	mu   sync.Mutex
	subs []*zmq.Conn
}

func publishLoad(t *testing.T) *loadPublisher {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	l, err := zmq.Listen(ctx, "tcp://127.0.0.1:0", zmq.Options{Type: zmq.PUB})
	if err != nil {
		t.Fatal(err)
	}
	p := &loadPublisher{addr: "tcp://" + l.Addr().String()}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept(ctx)
			if err != nil {
				return
			}
			context.AfterFunc(ctx, func() { _ = c.Close() })
			wg.Go(func() {
				if _, err := c.Recv(); err != nil {
					return
				}
				p.mu.Lock()
				p.subs = append(p.subs, c)
				p.mu.Unlock()
				_, _ = c.Recv()
			})
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	return p
}

func (p *loadPublisher) send(payload []byte, seq uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.subs {
		_ = c.Send([]byte("load"), binary.BigEndian.AppendUint64(nil, seq), payload)
	}
}

// within bounds every wait of these tests.
const within = 20 * time.Second

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	natstest.Eventually(t, within, what, ok)
}

func TestPushedLoadIsFollowedRankByRank(t *testing.T) {
	var cases []struct {
		Name   string
		Frames []string `json:"frames_hex"`
	}
	if err := json.Unmarshal(read(t, "testdata/sglang_load.json"), &cases); err != nil {
		t.Fatal(err)
	}
	payload := func(name string) []byte {
		for _, c := range cases {
			if c.Name == name {
				return unhex(t, c.Frames[2])
			}
		}
		t.Fatal(name)
		return nil
	}
	a, b := publishLoad(t), publishLoad(t)
	p := telemetry.NewPush()
	defer p.Close()
	p.Follow([]string{a.addr, b.addr}, "load")
	full, foreign := payload("loadstat_extended"), payload("loadstat_first_form") // of ranks 0 and 2
	eventually(t, "rank 0", func() bool { a.send(full, 1); s, _ := p.Sample(ptr(2)); return len(s.Ranks) == 1 })
	if s, _ := p.Sample(ptr(2)); s.Complete() || *s.Ranks[0].Running != 12 {
		t.Errorf("one silent rank of two: %+v", s)
	}
	eventually(t, "a foreign rank refused", func() bool { b.send(foreign, 1); return p.Stats().Refused > 0 })
	snapshot := payload("loadsnapshot_map") // of rank 1
	eventually(t, "rank 1", func() bool { b.send(snapshot, 2); s, _ := p.Sample(ptr(2)); return s.Complete() })
	a.send(payload("loadstat_too_short"), 3)
	eventually(t, "a malformed one is dropped, the subscription stays", func() bool { a.send(full, 4); return p.Stats().Malformed > 0 })
	a.send(full, 0)
	eventually(t, "a restart is seen", func() bool { a.send(full, 9); a.send(full, 0); return p.Stats().Restarts > 0 })
	p.Remove(0)
	if s, _ := p.Sample(ptr(2)); len(s.Ranks) != 1 || s.Ranks[0].Rank != 1 {
		t.Errorf("after rank 0 was removed: %+v", s.Ranks)
	}
	p.Follow([]string{a.addr, b.addr}, "load") // added again
	eventually(t, "rank 0 again", func() bool { a.send(full, 20); b.send(snapshot, 30); s, _ := p.Sample(ptr(2)); return s.Complete() })
}
