package main

import (
	"bytes"
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// screen is an output that tells when something was written to it.
type screen struct {
	mu      sync.Mutex
	text    strings.Builder
	changed chan struct{}
}

func newScreen() *screen { return &screen{changed: make(chan struct{}, 1)} }

func (s *screen) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.text.Write(b)
	select {
	case s.changed <- struct{}{}:
	default:
	}
	return len(b), nil
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

func (s *screen) await(t *testing.T, want string) {
	t.Helper()
	late := time.After(20 * time.Second)
	for !strings.Contains(s.String(), want) {
		select {
		case <-s.changed:
		case <-late:
			t.Fatalf("%q was not printed; there is:\n%s", want, s.String())
		}
	}
}

// call runs a command in this process.
func call(t *testing.T, server string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, msg bytes.Buffer
	code = run(t.Context(), args, []string{"ROLLBUS_SERVER=" + server}, strings.NewReader(""), &out, &msg)
	return code, out.String(), msg.String()
}

func TestAWatchPrintsWhatIsThereThenOnlyWhatChangesThenWhatIsGone(t *testing.T) {
	node := natstest.Server(t)
	if code, _, msg := call(t, node.URL(), "pool", "init"); code != exitOK {
		t.Fatal(msg)
	}
	if code, _, msg := call(t, node.URL(), "submit", "--job", "first", "--prompt", "x"); code != exitOK {
		t.Fatal(msg)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	out, msgs := newScreen(), newScreen()
	var watch sync.WaitGroup
	code := -1
	watch.Go(func() {
		code = run(ctx, []string{"get", "jobs", "--watch", "--interval", "100ms", "-o", "jsonl"},
			[]string{"ROLLBUS_SERVER=" + node.URL()}, strings.NewReader(""), out, msgs)
	})
	out.await(t, `"job":"first"`)
	if code, _, msg := call(t, node.URL(), "submit", "--job", "second", "--prompt", "x"); code != exitOK {
		t.Fatal(msg)
	}
	out.await(t, `"job":"second"`)
	pool, err := subjects.NewPool("default")
	if err != nil {
		t.Fatal(err)
	}
	js, err := jetstream.New(node.Conn(t))
	if err != nil {
		t.Fatal(err)
	}
	cons, err := js.CreateConsumer(ctx, pool.Rollouts(), pool.RolloutsConsumer("first", subjects.LaneNormal))
	if err != nil {
		t.Fatal(err)
	}
	m, err := cons.Next(jetstream.FetchContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	if err := m.DoubleAck(ctx); err != nil { // as a dispatcher does
		t.Fatal(err)
	}
	out.await(t, `{"gone":"first"}`)
	stop()
	watch.Wait()
	if code != exitOK {
		t.Errorf("an interrupted watch ends with %d, want %d: %s", code, exitOK, msgs)
	}
	if n := strings.Count(out.String(), `"job":"first"`); n != 1 {
		t.Errorf("what did not change was printed %d times:\n%s", n, out)
	}
}

func TestAWatchThatCannotLookEvenOnceSaysSo(t *testing.T) {
	node := natstest.Server(t)
	code, _, msg := call(t, node.URL(), "get", "jobs", "--watch")
	if code != exitNotFound || !strings.Contains(msg, "rollbus pool init") {
		t.Errorf("exit %d: %s", code, msg)
	}
}
