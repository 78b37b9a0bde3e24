package kvstate

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// childURL in the environment makes this test binary a follower of the server
// there, which writes one childLine for everything that it is told.
const childURL = "KVSTATE_TEST_CHILD"

type childLine struct {
	What string   `json:"what"`
	Keys []string `json:"keys,omitempty"`
}

func child(url string) {
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	out := json.NewEncoder(os.Stdout)
	say := func(what string, keys ...string) { fail(out.Encode(childLine{what, keys})) }
	nc, err := nats.Connect(url, nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond), nats.ReconnectBufSize(-1))
	fail(err)
	pool, err := subjects.NewPool("p")
	fail(err)
	s, err := Open(nc, pool, Heartbeat(testHeartbeat))
	fail(err)
	ctx, cancel := context.WithCancel(context.Background())
	go func() { // the parent closes stdin when it has seen enough
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	fail(s.FollowReservations(ctx, FollowConfig{Name: "child"}, Handler[Reservation, Marker]{
		Swap: func(rs []Reservation, _ []Marker) {
			keys := []string{}
			for _, r := range rs {
				keys = append(keys, r.ID)
			}
			say("swap", keys...)
		},
		Put:   func(r Reservation) { say("put", r.ID) },
		Gone:  func(m Marker) { say("gone", m.ID) },
		Alive: func() { say("alive") },
	}))
	nc.Close()
}

// scenario F2
func TestAFollowerWhoseProcessStoodStillStartsOver(t *testing.T) {
	t.Parallel()
	e := single(t, jetstream.FileStorage)
	keep := e.bind(t, "e", "keep", 1)
	go1 := e.bind(t, "e", "go", 1)

	cmd := exec.Command(os.Args[0]) // t.Context ends before the cleanups do
	cmd.Env = append(os.Environ(), childURL+"="+e.node.URL())
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	must(t, err)
	stdout, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	lines := make(chan childLine, 1<<16)
	go func() {
		defer close(lines)
		in := bufio.NewScanner(stdout)
		for in.Scan() {
			var l childLine
			if json.Unmarshal(in.Bytes(), &l) == nil {
				lines <- l
			}
		}
	}()
	t.Cleanup(func() {
		stdin.Close()
		_ = cmd.Process.Signal(syscall.SIGCONT) // when the test failed in between
		for range lines {
		}
		must(t, cmd.Wait())
	})
	next := func(what string) childLine {
		t.Helper()
		deadline := time.After(within)
		for {
			select {
			case l, ok := <-lines:
				if !ok {
					t.Fatalf("the follower ended before it said %q", what)
				}
				if l.What == what {
					return l
				}
			case <-deadline:
				t.Fatalf("the follower did not say %q", what)
			}
		}
	}
	if first := next("swap"); !slices.Equal(first.Keys, []string{"keep", "go"}) {
		t.Fatalf("first view %v, want keep and go", first.Keys)
	}
	next("alive")

	must(t, cmd.Process.Signal(syscall.SIGSTOP))
	r := released("e", "go", 1)
	h := r.Header()
	guard(h, go1)
	setTTL(h, time.Second)
	_, err = e.store.publish(t.Context(), e.pool.ReservationSubject("e", "e", "go"), h, nil)
	must(t, err)
	natstest.Eventually(t, within, "the marker gone", func() bool {
		m, err := e.store.last(t.Context(), e.store.reservationsStream(), e.pool.EngineGuard("e"))
		return err == nil && m.seq == keep
	})
	for len(lines) > 0 { // what it had said before
		<-lines
	}
	must(t, cmd.Process.Signal(syscall.SIGCONT))
	if again := next("swap"); !slices.Equal(again.Keys, []string{"keep"}) {
		t.Fatalf("view after the stop %v, want keep alone", again.Keys)
	}
	next("alive")
}
