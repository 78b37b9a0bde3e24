package faults

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/subjects"
)

const (
	poolName    = "faults"
	servers     = 3
	healthyWait = 60 * time.Second // for the cluster to be whole again
	poll        = 25 * time.Millisecond
)

// pool is every process of a pool.
type pool struct {
	cfg     Config
	servers []natsConfig
	parts   [kinds][]*process
	web     *http.Client
	nats    chan struct{} // held while a server is struck and not healthy yet

	mu     sync.Mutex
	ends   []error // of processes that ended by themselves
	struck []Struck
}

// Struck is a fault that happened.
type Struck struct {
	Fault
	At time.Time
}

func newPool(cfg Config) (*pool, error) {
	p := &pool{cfg: cfg, web: &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}, nats: make(chan struct{}, 1)}
	ports, err := freePorts(3*servers + cfg.Engines)
	if err != nil {
		return nil, err
	}
	var routes, urls []string
	for i := range servers {
		routes = append(routes, fmt.Sprintf("nats://127.0.0.1:%d", ports[3*i+1]))
		urls = append(urls, fmt.Sprintf("nats://127.0.0.1:%d", ports[3*i]))
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	for i := range servers {
		name := fmt.Sprintf("n%d", i+1)
		c := natsConfig{Name: name, Port: ports[3*i], Cluster: ports[3*i+1], Monitor: ports[3*i+2], Routes: routes, Dir: filepath.Join(cfg.Dir, name), Sync: cfg.Sync}
		text, err := json.Marshal(c)
		if err != nil {
			return nil, err
		}
		p.servers = append(p.servers, c)
		if err := p.add(NATS, name, self, nil, reexecEnv+"="+string(text)); err != nil {
			return nil, err
		}
	}
	common := []string{"--server", strings.Join(urls, ","), "--pool", poolName, "--timing-scale", fmt.Sprint(cfg.Scale)}
	for i := range cfg.Dispatchers {
		name := fmt.Sprintf("d%d", i+1)
		args := append([]string{"dispatcher", "--name", name, "--replicas", strconv.Itoa(servers)}, common...)
		if err := p.add(Dispatcher, name, cfg.Bin, args, "ROLLBUS_LOG_LEVEL=warn"); err != nil {
			return nil, err
		}
	}
	for i := range cfg.Engines {
		at := fmt.Sprintf("127.0.0.1:%d", ports[3*servers+i])
		args := []string{"engine", "--listen", at, "--time-scale", strconv.Itoa(engineSpeed), "--slots", strconv.Itoa(cfg.slots())}
		if err := p.add(Engine, fmt.Sprintf("engine%d", i+1), cfg.Bin, args, "ROLLBUS_LOG_LEVEL=error"); err != nil {
			return nil, err
		}
		args = append([]string{"agent", "--engine", fmt.Sprintf("%s=%s=http://%s", engineName(i), cfg.kind(), at), "--slots", strconv.Itoa(cfg.slots())}, common...)
		if err := p.add(Agent, fmt.Sprintf("agent%d", i+1), cfg.Bin, args, "ROLLBUS_LOG_LEVEL=warn"); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// Engines run as fast as what they model: a rollout takes one to two seconds.
const (
	engineSpeed = 1
	engineSlots = 12
)

func engineName(i int) string { return fmt.Sprintf("e%d", i+1) }

func (p *pool) add(k Kind, name, bin string, args []string, env ...string) error {
	x, err := newProcess(p.cfg.Dir, name, bin, args, env, p.crashed)
	if err != nil {
		return err
	}
	p.parts[k] = append(p.parts[k], x)
	return nil
}

func (p *pool) crashed(name string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ends = append(p.ends, fmt.Errorf("%s ended by itself: %w: see %s", name, err, filepath.Join(p.cfg.Dir, name+".log")))
}

// failed joins the ends that nobody asked for.
func (p *pool) failed() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return errors.Join(p.ends...)
}

// start brings everything up; the pool's streams are made before what uses them.
func (p *pool) start(ctx context.Context) error {
	if err := p.startAll(NATS); err != nil {
		return err
	}
	if err := p.awaitHealthy(ctx); err != nil {
		return err
	}
	nc, err := p.connect("setup")
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	name, err := subjects.NewPool(poolName)
	if err != nil {
		return err
	}
	layout := subjects.Layout{
		Replicas: servers, Record: true, Budget: 1 << 30,
		LivenessTTL: max(time.Second, time.Duration(p.cfg.Scale*float64(subjects.DefaultLivenessTTL))),
	}
	if err := p.ensure(ctx, js, name, layout); err != nil {
		return err
	}
	if err := p.heat(ctx, nc, name); err != nil {
		return err
	}
	for _, k := range []Kind{Engine, Dispatcher, Agent} {
		if err := p.startAll(k); err != nil {
			return err
		}
	}
	return nil
}

// ensure repeats while a young cluster has not agreed on its leaders.
func (p *pool) ensure(ctx context.Context, js jetstream.JetStream, name subjects.Pool, layout subjects.Layout) error {
	ctx, cancel := context.WithTimeout(ctx, healthyWait)
	defer cancel()
	for {
		once, done := context.WithTimeout(ctx, 20*time.Second)
		err := subjects.Ensure(once, js, name, layout)
		done()
		if err == nil {
			return nil
		}
		if pause(ctx, 10*poll) != nil {
			return fmt.Errorf("make the pool: %w", err)
		}
	}
}

func (p *pool) startAll(k Kind) error {
	for _, x := range p.parts[k] {
		if err := x.start(); err != nil {
			return err
		}
	}
	return nil
}

func (p *pool) close() {
	for _, k := range []Kind{Agent, Dispatcher, Engine, NATS} {
		for _, x := range p.parts[k] {
			x.close()
		}
	}
	p.web.CloseIdleConnections()
}

func (p *pool) url() string {
	urls := make([]string, 0, servers)
	for _, s := range p.servers {
		urls = append(urls, s.url())
	}
	return strings.Join(urls, ",")
}

func (p *pool) connect(name string) (*nats.Conn, error) { return connectTo(p.url(), name) }

// connectTo stays with the servers named: others that these tell of are no choice.
func connectTo(url, name string) (*nats.Conn, error) {
	return nats.Connect(url, nats.Name(name), nats.MaxReconnects(-1), nats.IgnoreDiscoveredServers(), nats.ReconnectWait(100*time.Millisecond),
		nats.ReconnectJitter(50*time.Millisecond, 50*time.Millisecond), nats.ReconnectBufSize(-1), nats.Timeout(2*time.Second),
		nats.PingInterval(time.Second), nats.MaxPingsOutstanding(2),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {})) // lost connections are what this is about
}

func (p *pool) awaitHealthy(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, healthyWait, fmt.Errorf("the NATS cluster is not healthy after %v", healthyWait))
	defer cancel()
	for _, s := range p.servers {
		for !s.healthy(ctx, p.web) {
			if err := pause(ctx, 4*poll); err != nil {
				return err
			}
		}
	}
	return nil
}

// follow makes a script of a list of faults.
func follow(faults []Fault) func(context.Context, *pool, func(Struck)) error {
	return func(ctx context.Context, p *pool, each func(Struck)) error { return p.strike(ctx, faults, each) }
}

// outage kills every NATS server at once and starts them again after a while.
func (p *pool) outage(ctx context.Context, lasts time.Duration) error {
	for _, x := range p.parts[NATS] {
		x.end(false)
	}
	_ = pause(ctx, lasts)
	if err := p.startAll(NATS); err != nil {
		return err
	}
	return p.awaitHealthy(ctx)
}

// roll restarts the NATS servers one after the other, as an upgrade does.
func (p *pool) roll(ctx context.Context) error {
	for _, x := range p.parts[NATS] {
		x.end(true)
		if err := x.start(); err != nil {
			return err
		}
		if err := p.awaitHealthy(ctx); err != nil {
			return err
		}
	}
	return nil
}

// strike follows the script. It returns when what it struck is up again.
func (p *pool) strike(ctx context.Context, script []Fault, each func(Struck)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var healing sync.WaitGroup
	for _, f := range script {
		if err := pause(ctx, f.After); err != nil {
			break
		}
		turn := p.parts[f.Kind][f.N].turn
		if f.Kind == NATS {
			turn = p.nats
		}
		select {
		case turn <- struct{}{}:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			break
		}
		x, at := p.parts[f.Kind][f.N], time.Now()
		if err := p.down(x, f); err != nil {
			cancel(err)
			break
		}
		p.mu.Lock()
		p.struck = append(p.struck, Struck{f, at})
		p.mu.Unlock()
		each(Struck{f, at})
		healing.Go(func() {
			defer func() { <-turn }()
			_ = pause(ctx, f.Down) // whatever ends it: it must run again
			if err := p.up(ctx, x, f); err != nil {
				cancel(fmt.Errorf("after %v: %w", f, err))
			}
		})
	}
	healing.Wait()
	return context.Cause(ctx)
}

func (p *pool) down(x *process, f Fault) error {
	if f.Pause {
		return x.signal(syscall.SIGSTOP)
	}
	x.end(false)
	return nil
}

func (p *pool) up(ctx context.Context, x *process, f Fault) error {
	if f.Pause {
		if err := x.signal(syscall.SIGCONT); err != nil {
			return err
		}
	} else if err := x.start(); err != nil {
		return err
	}
	if f.Kind == NATS {
		return p.awaitHealthy(ctx)
	}
	return nil
}

// pause waits; it returns early, with the cause, when ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// freePorts finds ports below those that the system gives to connections: what
// is down must find its own again.
func freePorts(n int) ([]int, error) {
	var ports []int
	var lc net.ListenConfig
	for tries := 0; len(ports) < n; tries++ {
		if tries > 100*n {
			return nil, errors.New("no free ports between 12000 and 32000")
		}
		port := 12000 + rand.IntN(20000) //nolint:gosec // any port will do
		l, err := lc.Listen(context.Background(), "tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		defer func() { _ = l.Close() }() // held until all are found
		ports = append(ports, port)
	}
	return ports, nil
}
