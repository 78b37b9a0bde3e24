//go:build load

package load

import (
	"context"
	"fmt"
	"os"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// Bounds, MiB of VmRSS.
const (
	idleDispatcher = 60
	idleAgent      = 40
	fullDispatcher = 300
	queuedGrowth   = 0.5 // of the idle figure, by what is queued
)

const (
	idleFor   = 30 * time.Second
	queued    = 100_000
	queuedFor = 75 * time.Second // the expiry walker has read them all by then
	engines   = 1000
	bound     = 20_000
	body      = 1024
	streams   = 64
	long      = 4096 // tokens of a stream's output, some hundred seconds
	slots     = 20   // of an engine: of 1,000 they hold what is bound, of 50 they leave it queued
)

// figures is the table that is printed at the end.
var figures []figure

type figure struct {
	what              string
	mib, atMost, peak float64
}

func check(t *testing.T, what string, p *process, atMost float64) float64 {
	t.Helper()
	now := p.rss(t)
	figures = append(figures, figure{what, now, atMost, p.peak(t)})
	if now > atMost {
		t.Errorf("%s: %.1f MiB, at most %.1f are allowed", what, now, atMost)
	}
	return now
}

func TestMain(m *testing.M) {
	code := m.Run()
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "PROCESS\tVMRSS MIB\tAT MOST\tPEAK MIB")
	for _, f := range figures {
		fmt.Fprintf(w, "%s\t%.1f\t%.1f\t%.1f\n", f.what, f.mib, f.atMost, f.peak)
	}
	w.Flush()
	os.Exit(code)
}

// An idle pool is small, and what waits in it is not in its processes: queued
// work stays in the stream.
func TestWaitingWorkIsNotInMemory(t *testing.T) {
	pool := newPool(t)
	pool.register(50)
	d, a := pool.serve(slots)

	pause(t, idleFor)
	idleD := check(t, "dispatcher, idle, 50 engines", d, idleDispatcher)
	idleA := check(t, "agent, idle", a, idleAgent)

	pool.submit(queued, 512)
	pause(t, queuedFor)
	if left := pool.messages(pool.name.Rollouts()); left < queued*9/10 {
		t.Errorf("only %d rollouts are queued: the figures say nothing of %d", left, queued)
	}
	check(t, "dispatcher, 100,000 queued", d, idleD*(1+queuedGrowth))
	check(t, "agent, 100,000 queued", a, idleA*(1+queuedGrowth))
}

// What runs costs an agent little: its streams are read through small buffers,
// and what was generated is kept once.
func TestAnAgentWithLongStreamsStaysSmall(t *testing.T) {
	pool := newPool(t)
	_, a := pool.serve(streams)
	pool.submit(streams, long)
	pause(t, idleFor)
	if n := pool.messages(subjects.BucketStream(pool.name.Bucket(subjects.Reservations))); n != streams {
		t.Errorf("%d rollouts run, want %d", n, streams)
	}
	check(t, "agent, 64 long streams", a, idleAgent)
}

func TestABigPoolFitsOneDispatcher(t *testing.T) {
	pool := newPool(t)
	pool.register(engines)
	pool.bind(bound)
	d := pool.start("dispatcher")
	d.awaitReady(t)
	pause(t, idleFor)
	if n := pool.messages(subjects.BucketStream(pool.name.Bucket(subjects.Reservations))); n != bound {
		t.Errorf("%d reservations stand, want the %d that were made", n, bound)
	}
	check(t, "dispatcher, 1,000 engines, 20,000 reservations", d, fullDispatcher)
}

// pool is a pool of the test.
type pool struct {
	t     *testing.T
	ctx   context.Context
	url   string
	name  subjects.Pool
	nc    *nats.Conn
	store *kvstate.Store
	bin   string
}

func (p *pool) fatal(what string, err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatalf("%s: %v", what, err)
	}
}

func engineName(i int) string { return fmt.Sprintf("e%04d", i) }

const epoch = "1-load"

// register writes registrations and renews them until the test ends.
func (p *pool) register(n int) {
	p.t.Helper()
	capacity, length := int64(500_000), 32_768
	put := func() error {
		for i := range n {
			e := subjects.Engine{
				SchemaVersion: subjects.SchemaVersion, Engine: engineName(i), Agent: "load", Epoch: epoch, Kind: "openai", Model: "sim",
				State: subjects.EngineReady, Slots: slots, Ranks: 1, CapacityTokens: &capacity, MaxModelLen: &length, Events: "none",
			}
			if _, err := p.store.PutEngine(p.ctx, e); err != nil {
				return fmt.Errorf("register %s: %w", e.Engine, err)
			}
		}
		return nil
	}
	p.fatal("register", put())
	every := time.NewTicker(5 * time.Second)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer every.Stop()
		for {
			select {
			case <-every.C:
				if err := put(); err != nil && p.ctx.Err() == nil {
					p.t.Errorf("renew: %v", err)
				}
			case <-p.ctx.Done():
				return
			}
		}
	}()
	p.t.Cleanup(func() { <-ended })
}

func request(id string, tokens int) *subjects.Request {
	prompt := make([]uint32, body/6)
	for i := range prompt {
		prompt[i] = uint32(10_000 + i)
	}
	return &subjects.Request{
		SchemaVersion: subjects.SchemaVersion, ID: id, Job: "load", PromptTokenIDs: prompt,
		Sampling: subjects.SamplingParams{MaxTokens: tokens, IgnoreEOS: true}, Stream: true,
	}
}

// submit queues rollouts of so many tokens of output, streamed.
func (p *pool) submit(n, tokens int) {
	p.t.Helper()
	c, err := client.Open(p.ctx, p.nc, p.name.String(), "load", client.WithoutLedger())
	p.fatal("open a client", err)
	defer c.Close()
	all := func(yield func(*subjects.Request) bool) {
		for i := range n {
			if !yield(request(fmt.Sprintf("q%d", i), tokens)) {
				return
			}
		}
	}
	for _, err := range c.SubmitMany(p.ctx, all) {
		p.fatal("submit", err)
	}
}

// bind makes reservations, spread over the engines.
func (p *pool) bind(n int) {
	p.t.Helper()
	last := map[string]uint64{}
	for i := range n {
		r := request(fmt.Sprintf("b%d", i), 512)
		b, err := r.MarshalJSON()
		p.fatal("encode", err)
		e := engineName(i % engines)
		last[e], err = p.store.Bind(p.ctx, kvstate.Bind{
			Held: subjects.Held{
				Engine: e, Job: "load", ID: r.ID, State: subjects.StateBound, Bind: 1, Epoch: epoch, LeftMS: 3_600_000,
				Tokens: 700, PromptTokens: len(r.PromptTokenIDs), MaxTokens: 512, Lane: subjects.LaneNormal, Dispatcher: "gone",
			},
			Expected: last[e], Body: b,
		})
		p.fatal("bind", err)
	}
}

func (p *pool) messages(stream string) int {
	p.t.Helper()
	js, err := jetstream.New(p.nc)
	p.fatal("JetStream", err)
	s, err := js.Stream(p.ctx, stream)
	p.fatal("look at "+stream, err)
	return int(s.CachedInfo().State.Msgs)
}
