package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/bench/checker"
	simengine "github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// process is the real program, which a test may kill and start again.
type process struct {
	t    *testing.T
	bin  string
	args []string
	cmd  *exec.Cmd
	log  bytes.Buffer
}

// program makes the test binary answer to the name rollbus.
func program(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(t.TempDir(), "rollbus")
	if err := os.Symlink(self, bin); err != nil {
		t.Fatal(err)
	}
	return bin
}

func start(t *testing.T, bin string, args ...string) *process {
	t.Helper()
	p := &process{t: t, bin: bin, args: args}
	p.begin()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("%v:\n%s", args, &p.log)
		}
	})
	return p
}

func (p *process) begin() {
	p.t.Helper()
	p.cmd = exec.Command(p.bin, p.args...)
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	p.cmd.Env = append(os.Environ(), "ROLLBUS_LOG_LEVEL=warn")
	if err := p.cmd.Start(); err != nil {
		p.t.Fatalf("start %v: %v", p.args, err)
	}
}

// scaledPool makes a pool whose registrations live for that part of the default.
func scaledPool(t *testing.T, nc *nats.Conn, name string, scale float64) (jetstream.JetStream, subjects.Pool) {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	pool, err := subjects.NewPool(name)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), awaitWithin)
	defer cancel()
	layout := subjects.Layout{Budget: 256 << 20, Record: true, LivenessTTL: time.Duration(scale * float64(subjects.DefaultLivenessTTL))}
	if err := subjects.Ensure(ctx, js, pool, layout); err != nil {
		t.Fatal(err)
	}
	return js, pool
}

// simulatedEngine starts an engine that runs so many times as fast as what it models.
func simulatedEngine(t *testing.T, speed float64) *simengine.Server {
	t.Helper()
	sim, err := simengine.New(simengine.Config{TimeScale: speed})
	if err != nil {
		t.Fatal(err)
	}
	if err := sim.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sim.Close() })
	return sim
}

// kill is SIGKILL: nothing is given back, nothing is said.
func (p *process) kill() {
	if p.cmd.ProcessState == nil {
		_ = p.cmd.Process.Signal(syscall.SIGKILL)
		_ = p.cmd.Wait()
	}
}

func (p *process) restart() {
	p.t.Helper()
	p.kill()
	p.begin()
}

// scenario R1
// scenario F1
// scenario F3
// scenario F9
// scenario F13
func TestOneAnswerEachThroughKillsOfRealProcesses(t *testing.T) {
	const (
		scale    = 0.2 // of every liveness timing
		rollouts = 150 // of each job
	)
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	node := natstest.Server(t)
	nc := node.Conn(t)
	_, pool := scaledPool(t, nc, "kill", scale)
	rec, err := checker.Record(ctx, nc, pool)
	if err != nil {
		t.Fatal(err)
	}
	defer rec.Close()

	bin := program(t)
	common := []string{"--server", node.URL(), "--pool", "kill", "--timing-scale", fmt.Sprint(scale)}
	daemon := func(args ...string) *process { return start(t, bin, append(args, common...)...) }
	d1, _ := daemon("dispatcher", "--name", "d1"), daemon("dispatcher", "--name", "d2")
	var agents []*process
	for i := range 2 {
		sim := simulatedEngine(t, 4)
		agents = append(agents, daemon("agent", "--engine", fmt.Sprintf("e%d=openai=%s", i+1, sim.URL()), "--slots", "12"))
	}

	// Two jobs with the same ids, each submitted twice.
	var readers sync.WaitGroup
	defer readers.Wait()
	reading, done := context.WithCancel(ctx)
	defer done()
	var clients []*client.Client
	for _, job := range []string{"math", "code"} {
		c, err := client.Open(ctx, node.Conn(t), "kill", job, client.ManualDone())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		clients = append(clients, c)
		for n := range rollouts {
			r := &subjects.Request{SchemaVersion: subjects.SchemaVersion, Job: job, ID: fmt.Sprintf("%04d", n), Prompt: fmt.Sprintf("%s %d", job, n),
				Sampling: subjects.SamplingParams{MaxTokens: 150 + n%100, IgnoreEOS: true}}
			for range 2 {
				h, err := c.Submit(ctx, r)
				if err != nil {
					t.Fatal(err)
				}
				rec.Accepted(h.Job, h.ID, h.Seq)
			}
		}
	}

	after := func(answered int) {
		t.Helper()
		if err := rec.Await(ctx, func(c checker.Counts) bool { return c.Answered >= answered && c.Held > 0 }); err != nil {
			t.Fatal(err)
		}
	}
	after(20)
	agents[0].restart() // in mid-generation
	after(60)
	d1.restart() // binding: work waits in the queue
	after(100)
	node.Restart()
	// Readers begin now: an answer on its way to one while NATS goes away comes
	// again only after the durable's AckWait, a minute.
	for _, c := range clients {
		readers.Go(func() { readAll(reading, t, c, rec) })
	}
	after(140)
	agents[1].restart()
	after(180)
	d1.kill() // for good: the other one goes on with what it had in hand
	f := judged(ctx, t, rec, done)
	t.Logf("%d rollouts, %d bound again, %d ran twice, %d tokens wasted, dispatch p50 %v", f.Submitted, f.Requeued, f.DoubleRuns, f.WastedTokens, f.DispatchP50)
	if f.Submitted != 2*rollouts || f.Completed != 2*rollouts || f.Lost != 0 || f.Duplicated != 0 {
		t.Errorf("figures: %+v", f)
	}
	if f.Requeued == 0 {
		t.Error("nothing was bound again: the kills struck nothing and the test shows nothing")
	}
}

// judged waits until every answer was received, ends the readers, and has the
// checker look at all of it.
func judged(ctx context.Context, t *testing.T, rec *checker.Recorder, endReaders func()) checker.Figures {
	t.Helper()
	if err := rec.Await(ctx, func(c checker.Counts) bool { return checker.AllAnswered(c) && checker.AllReceived(c) }); err != nil {
		t.Fatal(err)
	}
	endReaders()
	h, err := rec.Finish(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range checker.Check(h) {
		t.Error(v)
	}
	return checker.Figure(h)
}

func readAll(ctx context.Context, t *testing.T, c *client.Client, rec *checker.Recorder) {
	for res, err := range c.Results(ctx) {
		if err != nil {
			t.Errorf("read: %v", err)
			if res == nil {
				return
			}
		}
		rec.Handed(res.Job, res.ID)
		if err := c.Done(ctx, res); err != nil {
			if ctx.Err() == nil {
				t.Errorf("receive %s.%s: %v", res.Job, res.ID, err)
			}
			return
		}
		rec.Received(res.Job, res.ID)
	}
}
