package faults

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// Of a flood.
const (
	floodQueued  = 100_000
	floodMostMiB = 96 // of a dispatcher or an agent beside them; about 30 without a flood
)

// residentMiB is the most memory that a process has had.
func residentMiB(t *testing.T, pid int) int {
	t.Helper()
	f, err := os.Open(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if kb, ok := strings.CutPrefix(lines.Text(), "VmHWM:"); ok {
			n, err := strconv.Atoi(strings.Fields(kb)[0])
			if err != nil {
				t.Fatal(err)
			}
			return n / 1024
		}
	}
	t.Fatalf("process %d tells no VmHWM", pid)
	return 0
}

// scenario F15
// scenario B6
func TestAHundredThousandQueuedRolloutsStayInTheQueueAndMemoryIsBounded(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Second)
	defer cancel()
	node := natstest.Server(t)
	nc := node.Conn(t)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	name, err := subjects.NewPool(poolName)
	if err != nil {
		t.Fatal(err)
	}
	if err := subjects.Ensure(ctx, js, name, subjects.Layout{Budget: 1 << 30, LivenessTTL: scaled(subjects.DefaultLivenessTTL)}); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	run := func(name string, args ...string) *process {
		x, err := newProcess(dir, name, rollbus, args, []string{"ROLLBUS_LOG_LEVEL=warn"}, func(name string, err error) { t.Errorf("%s ended by itself: %v", name, err) })
		if err != nil {
			t.Fatal(err)
		}
		if err := x.start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(x.close)
		return x
	}
	common := []string{"--server", node.URL(), "--pool", poolName, "--timing-scale", fmt.Sprint(scale)}
	d := run("d1", append([]string{"dispatcher", "--name", "d1"}, common...)...)
	c, err := client.Open(ctx, nc, poolName, "flood", client.ManualDone())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()

	var flood errgroup.Group
	flood.SetLimit(256)
	for n := range floodQueued {
		flood.Go(func() error {
			_, err := c.Submit(ctx, &subjects.Request{ID: strconv.Itoa(n), Prompt: "flood", Sampling: subjects.SamplingParams{MaxTokens: 8, IgnoreEOS: true}})
			return err
		})
	}
	if err := flood.Wait(); err != nil {
		t.Fatal(err)
	}
	queued, err := js.Stream(ctx, name.Rollouts())
	if err != nil {
		t.Fatal(err)
	}
	if n := queued.CachedInfo().State.Msgs; n != floodQueued {
		t.Errorf("with no engine %d of %d rollouts wait in the queue", n, floodQueued)
	}

	// One more than the client may have unanswered is refused, with a reason.
	if _, err := c.Submit(ctx, &subjects.Request{ID: "more", Prompt: "flood", Sampling: subjects.SamplingParams{MaxTokens: 8}}); !errors.Is(err, client.ErrBackpressure) {
		t.Errorf("rollout %d was answered with %v, not with back-pressure", floodQueued+1, err)
	}

	// An engine comes: what waits is served although so much waits.
	ports, err := freePorts(1)
	if err != nil {
		t.Fatal(err)
	}
	at := fmt.Sprintf("127.0.0.1:%d", ports[0])
	run("engine1", "engine", "--listen", at, "--time-scale", "20", "--slots", "64")
	a := run("agent1", append([]string{"agent", "--engine", "e1=openai=http://" + at, "--slots", "64"}, common...)...)
	read := 0
	for res, err := range c.Results(ctx) {
		if err != nil {
			t.Fatal(err)
		}
		if !res.Status.Sample() {
			t.Errorf("%s ended as %s", res.Key(), res.Status)
		}
		if read++; read == 1000 {
			break
		}
	}
	if read != 1000 {
		t.Errorf("%d answers came before the time was up, not 1000", read)
	}
	for _, x := range []*process{d, a} {
		mib := residentMiB(t, x.cmd.Process.Pid)
		t.Logf("%s has had %d MiB at most", x.name, mib)
		if mib > floodMostMiB {
			t.Errorf("%s has had %d MiB with %d rollouts queued; at most %d", x.name, mib, floodQueued, floodMostMiB)
		}
	}
	if s := nc.Status(); s != nats.CONNECTED {
		t.Errorf("the connection is %v after the flood", s)
	}
}
