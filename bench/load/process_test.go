//go:build load

package load

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	simengine "github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// newPool starts NATS, makes a pool and builds the program.
func newPool(t *testing.T) *pool {
	t.Helper()
	node := natstest.Server(t)
	ctx, cancel := context.WithCancel(t.Context())
	p := &pool{t: t, ctx: ctx, url: node.URL(), nc: node.Conn(t), bin: filepath.Join(t.TempDir(), "rollbus")}
	t.Cleanup(cancel)
	var err error
	p.name, err = subjects.NewPool("load")
	p.fatal("name", err)
	p.store, err = kvstate.Open(p.nc, p.name)
	p.fatal("open the pool", err)
	p.fatal("make the pool", subjects.Ensure(ctx, p.store.JS(), p.name, subjects.Layout{Budget: 4 << 30, Record: true}))
	settings := policy.Recommended()
	settings.SchemaVersion = subjects.SchemaVersion
	_, err = p.store.PutSettings(ctx, settings, 0)
	p.fatal("write the settings", err)
	out, err := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", p.bin, "github.com/rollbus/rollbus/cmd/rollbus").CombinedOutput()
	if err != nil {
		t.Fatalf("build the program: %v\n%s", err, out)
	}
	return p
}

// process is a daemon of rollbus.
type process struct {
	what string
	cmd  *exec.Cmd
	http string
	log  string
}

// serve starts a dispatcher, and an agent beside a simulated engine.
func (p *pool) serve(slots int) (dispatcher, agent *process) {
	p.t.Helper()
	sim, err := simengine.New(simengine.Config{})
	p.fatal("make an engine", err)
	p.fatal("start the engine", sim.Start())
	p.t.Cleanup(func() { _ = sim.Close() })
	dispatcher = p.start("dispatcher")
	agent = p.start("agent", "--engine", "real=openai="+sim.URL(), "--slots", strconv.Itoa(slots))
	dispatcher.awaitReady(p.t)
	agent.awaitReady(p.t)
	return dispatcher, agent
}

// start runs a daemon; it is ended with the test.
func (p *pool) start(what string, args ...string) *process {
	p.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	p.fatal("find a port", err)
	x := &process{what: what, http: l.Addr().String(), log: filepath.Join(p.t.TempDir(), what+".log")}
	p.fatal("free the port", l.Close())
	log, err := os.Create(x.log)
	p.fatal("log", err)
	x.cmd = exec.Command(p.bin, append([]string{what, "--server", p.url, "--pool", p.name.String(), "--http", x.http, "--log-level", "warn"}, args...)...)
	x.cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + p.t.TempDir()}
	x.cmd.Stdout, x.cmd.Stderr = log, log
	p.fatal("start "+what, x.cmd.Start())
	p.t.Cleanup(func() {
		_ = x.cmd.Process.Signal(syscall.SIGTERM) // a second one ends an agent at once
		_ = x.cmd.Process.Signal(syscall.SIGKILL)
		_ = x.cmd.Wait()
		_ = log.Close()
		if p.t.Failed() {
			if b, err := os.ReadFile(x.log); err == nil {
				p.t.Logf("%s said:\n%.4000s", what, b)
			}
		}
	})
	return x
}

// awaitReady waits until the process calls itself ready.
func (x *process) awaitReady(t *testing.T) {
	t.Helper()
	natstest.EventuallyOr(t, 30*time.Second, func() bool {
		r, err := http.Get("http://" + x.http + "/readyz")
		if err != nil {
			return false
		}
		_ = r.Body.Close()
		return r.StatusCode == http.StatusOK
	}, func() string { return x.what + " is ready" })
}

// rss is what the process occupies now, peak what it did at most, in MiB.
func (x *process) rss(t *testing.T) float64  { return x.status(t, "VmRSS") }
func (x *process) peak(t *testing.T) float64 { return x.status(t, "VmHWM") }

func (x *process) status(t *testing.T, field string) float64 {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", x.cmd.Process.Pid))
	if err != nil {
		t.Fatalf("%s has ended: %v", x.what, err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		name, rest, _ := strings.Cut(lines.Text(), ":")
		if name != field {
			continue
		}
		kb, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 64)
		if err != nil {
			t.Fatalf("read %s of %s: %v", field, x.what, err)
		}
		return kb / 1024
	}
	t.Fatalf("%s of %s is not told: this test needs Linux", field, x.what)
	return 0
}

// pause lets time pass: what is measured is what a process occupies after it.
func pause(t *testing.T, d time.Duration) {
	t.Helper()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.Context().Done():
		t.Fatal("the test has ended")
	}
}
