package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rollbus/rollbus/bench/checker"
	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// smallDisk is a file system of that many bytes. Mounting one takes root: where
// the test does not run as root it runs itself again as root of a namespace of
// its own, and done is true.
func smallDisk(t *testing.T, size int) (dir string, done bool) {
	t.Helper()
	dir = t.TempDir()
	err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", size))
	if errors.Is(err, syscall.EPERM) && os.Getenv("TEST_IN_NAMESPACE") == "" {
		cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), "TEST_IN_NAMESPACE=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		}
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil {
			t.Fatalf("in a namespace of its own: %v", err)
		}
		return "", true
	}
	if err != nil {
		t.Fatalf("mount a small file system: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return dir, false
}

// fillDisk takes what is free, to the last byte; the file is removed to give it back.
func fillDisk(t *testing.T, dir string) (ballast string) {
	t.Helper()
	ballast = filepath.Join(dir, "ballast")
	f, err := os.Create(ballast)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for size := 1 << 20; size > 0; {
		if _, err := f.Write(make([]byte, size)); errors.Is(err, syscall.ENOSPC) {
			size /= 2
		} else if err != nil {
			t.Fatal(err)
		}
	}
	return ballast
}

// The disk of NATS fills up while rollouts run and wait, and JetStream switches
// itself off. Everybody says so in words; when there is space again and NATS
// was started anew, everything that was accepted gets its one answer.
//
// scenario B9
func TestADiskThatFillsUpLosesNothing(t *testing.T) {
	dir, done := smallDisk(t, 64<<20)
	if done {
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	node := natstest.Server(t, natstest.Dir(dir))
	const scale = 0.2
	_, pool := scaledPool(t, node.Conn(t), "small", scale)
	rec, err := checker.Record(ctx, node.Conn(t), pool)
	if err != nil {
		t.Fatal(err)
	}
	defer rec.Close()
	sim := simulatedEngine(t, 2)
	bin := program(t)
	common := []string{"--server", node.URL(), "--pool", "small", "--timing-scale", fmt.Sprint(scale), "--http"}
	dispatcherAt, agentAt := freeAddress(t), freeAddress(t)
	start(t, bin, append(append([]string{"dispatcher", "--name", "d1"}, common...), dispatcherAt)...)
	start(t, bin, append(append([]string{"agent", "--engine", "e1=openai=" + sim.URL(), "--slots", "8"}, common...), agentAt)...)
	for _, at := range []string{dispatcherAt, agentAt} {
		natstest.Eventually(t, awaitWithin, "/readyz of "+at, func() bool { ok, _ := readyz(at); return ok })
	}

	c, err := client.Open(ctx, node.Conn(t), "small", "math", client.ManualDone(), client.RetryFor(time.Second))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	submit := func(n int) error {
		r := &subjects.Request{SchemaVersion: subjects.SchemaVersion, Job: "math", ID: fmt.Sprintf("%04d", n), Prompt: strings.Repeat("x", 8<<10),
			Sampling: subjects.SamplingParams{MaxTokens: 120, IgnoreEOS: true}}
		h, err := c.Submit(ctx, r)
		switch {
		case err == nil:
			rec.Accepted(h.Job, h.ID, h.Seq)
		case errors.Is(err, client.ErrUnknown):
			rec.Unknown(r.Job, r.ID, err)
		default:
			rec.Refused(r.Job, r.ID, err)
		}
		return err
	}
	const before, during = 40, 4
	for n := range before {
		if err := submit(n); err != nil {
			t.Fatal(err)
		}
	}
	if err := rec.Await(ctx, func(c checker.Counts) bool { return c.Held >= 8 && c.Answered >= 2 }); err != nil {
		t.Fatal(err)
	}

	ballast := fillDisk(t, dir)
	errs := make([]error, during)
	var submits sync.WaitGroup
	for n := range during {
		submits.Go(func() { errs[n] = submit(before + n) })
	}
	submits.Wait()
	for _, err := range errs {
		if err == nil {
			continue // into what was left of a block
		}
		if !errors.Is(err, client.ErrBackpressure) && !errors.Is(err, client.ErrUnavailable) && !errors.Is(err, client.ErrUnknown) {
			t.Errorf("a submit to a full disk: %v", err)
		}
		t.Log(err)
	}
	for _, at := range []string{dispatcherAt, agentAt} {
		natstest.Eventually(t, awaitWithin, "/readyz of "+at+" says that something is wrong", func() bool { ok, _ := readyz(at); return !ok })
		_, why := readyz(at)
		t.Log(why)
	}
	natstest.Eventually(t, awaitWithin, "the agent spools what it cannot store", func() bool {
		return metric(t, agentAt, `rollbus_agent_spool_answers [1-9]`)
	})

	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	node.Restart() // JetStream stays off until then
	var reader sync.WaitGroup
	defer reader.Wait()
	reading, stop := context.WithCancel(ctx)
	defer stop()
	reader.Go(func() { readAll(reading, t, c, rec) })
	for n := range during { // those refused are submitted again, as their error says
		natstest.Eventually(t, awaitWithin, "a submit is taken again", func() bool { return submit(before+n) == nil })
	}
	f := judged(ctx, t, rec, stop)
	if f.Submitted != before+during || f.Lost != 0 || f.Duplicated != 0 {
		t.Errorf("figures: %+v", f)
	}
	for status, n := range f.Statuses {
		if status != subjects.Completed && status != subjects.Truncated {
			t.Errorf("%d rollouts are %s", n, status)
		}
	}
	for _, at := range []string{dispatcherAt, agentAt} {
		natstest.Eventually(t, awaitWithin, "/readyz of "+at+" again", func() bool { ok, _ := readyz(at); return ok })
	}
}

// readyz tells whether a daemon is ready, and else what it misses.
func readyz(at string) (ok bool, why string) {
	r, err := http.Get("http://" + at + "/readyz")
	if err != nil {
		return false, err.Error()
	}
	defer func() { _ = r.Body.Close() }()
	b, err := io.ReadAll(r.Body)
	return err == nil && r.StatusCode == http.StatusOK, string(b)
}
