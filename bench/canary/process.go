package canary

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// fleet are the processes of one arm.
type fleet struct {
	bin, dir string
	ctx      context.Context
	parts    []*exec.Cmd
}

// start runs a subcommand of the program; its output goes to a file in the folder.
func (f *fleet) start(name string, args ...string) (*exec.Cmd, error) {
	log, err := os.Create(filepath.Join(f.dir, name+".log"))
	if err != nil {
		return nil, err
	}
	defer log.Close() // the process has its own
	cmd := exec.CommandContext(f.ctx, f.bin, args...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	f.parts = append(f.parts, cmd)
	return cmd, nil
}

// end kills them all and waits; the caller has cancelled their context.
func (f *fleet) end() {
	for _, p := range f.parts {
		_ = p.Wait() // killed
	}
}

// startWait is how long a process may take until it serves.
const startWait = 30 * time.Second

// readJSON waits until a file is there and whole.
func readJSON(ctx context.Context, path string, into any) error {
	ctx, cancel := context.WithTimeoutCause(ctx, startWait, fmt.Errorf("%s is not there after %v: see the logs beside it", path, startWait))
	defer cancel()
	for {
		if b, err := os.ReadFile(path); err == nil && json.Unmarshal(b, into) == nil {
			return nil
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

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

// programDigest is that of the program that a process runs.
func programDigest(pid int) (string, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return "", fmt.Errorf("digest of process %d: %w", pid, err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("digest of process %d: %w", pid, err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
